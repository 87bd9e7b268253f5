"""Calculator tool for models: arithmetic only, with bounds on the expression and its numbers."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

__all__ = ["calculator"]

MAX_CHARACTERS = 300
"""Maximum number of characters of an expression. This also bounds its depth."""
LARGEST = 10**100
"""Largest absolute value of results, intermediate ones included."""
LARGEST_EXPONENT = 1000
"""Largest absolute value of an exponent."""

_PYTHON_OPERATORS = str.maketrans(
    {"^": "**", "\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-", "[": "(", "]": ")"}
)
_OPERATIONS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculator(expression: str) -> str:
    """Calculates the value of an arithmetic expression.

    Args:
        expression: numbers, + - * / // % ** and parentheses, for example "(3 + 4) * 2.5".
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression has {len(expression)} characters; at most {MAX_CHARACTERS} are allowed.")
    plain = re.sub(r"(?<=\d),(?=\d{3}\b)", "", expression.translate(_PYTHON_OPERATORS)).strip()
    try:
        value = _evaluate(ast.parse(plain, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{expression!r} is not an arithmetic expression.") from None
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _evaluate(node: ast.AST) -> int | float:
    value: Any
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            pass
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATIONS:
            value = _OPERATIONS[type(op)](_evaluate(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            value = _apply(type(op), _evaluate(left), _evaluate(right))
        case _:
            raise ValueError(f"{ast.unparse(node)!r}: expected numbers, + - * / // % ** and parentheses.")
    if not isinstance(value, int | float):
        raise ValueError("the result is not a real number.")
    if not abs(value) <= LARGEST:  # also true for inf and nan
        raise ValueError(f"a number is larger than {LARGEST:.0e}.")
    return value


def _apply(operation: type[ast.AST], left: float, right: float) -> Any:
    if operation is ast.Pow and abs(right) > LARGEST_EXPONENT:
        raise ValueError(f"the exponent {right} is larger than {LARGEST_EXPONENT}.")
    if operation is ast.Div and isinstance(left, int) and isinstance(right, int) and right and left % right == 0:
        return left // right  # exact: a float would round large integers
    return _OPERATIONS[operation](left, right)
