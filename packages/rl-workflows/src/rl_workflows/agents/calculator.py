"""Calculator tool for models: arithmetic only, with bounds on the expression and its numbers."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

__all__ = ["calculator"]

LONGEST = 300
"""Maximum number of characters of an expression. This also bounds its depth."""
LARGEST = 10**100
"""Largest absolute value of results, intermediate ones included."""
LARGEST_EXPONENT = 1000
"""Largest absolute value of an exponent."""

_WRITTEN = str.maketrans({"^": "**", "\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-", "[": "(", "]": ")"})
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
    if len(expression) > LONGEST:
        raise ValueError(f"the expression has {len(expression)} characters; at most {LONGEST} are allowed.")
    plain = re.sub(r"(?<=\d),(?=\d{3}\b)", "", expression.translate(_WRITTEN)).strip()
    try:
        value = _value(ast.parse(plain, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{expression!r} is not an arithmetic expression.") from None
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _value(node: ast.AST) -> int | float:
    found: Any
    match node:
        case ast.Constant(value=int() | float() as found) if not isinstance(found, bool):
            pass
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATIONS:
            found = _OPERATIONS[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            found = _applied(type(op), _value(left), _value(right))
        case _:
            raise ValueError(f"{ast.unparse(node)!r}: expected numbers, + - * / // % ** and parentheses.")
    if not isinstance(found, int | float):
        raise ValueError("the result is not a real number.")
    if not abs(found) <= LARGEST:  # nor inf or nan
        raise ValueError(f"a number is larger than {LARGEST:.0e}.")
    return found


def _applied(operation: type[ast.AST], left: float, right: float) -> Any:
    if operation is ast.Pow and abs(right) > LARGEST_EXPONENT:
        raise ValueError(f"the exponent {right} is larger than {LARGEST_EXPONENT}.")
    if operation is ast.Div and isinstance(left, int) and isinstance(right, int) and right and left % right == 0:
        return left // right  # exact
    return _OPERATIONS[operation](left, right)
