"""Program with the agent of `math-agent`. It imports only OpenAI's client, so its environment needs only `openai`.

Each line of stdin is one episode, a JSON object with `data`, `base_url` and `api_key`. Each line of stdout is its
result: the last completion, which the run's reward scores, and the number of calculator calls. The program ends when
its stdin is closed.
"""

from __future__ import annotations

import ast
import json
import operator
import sys
from typing import Any

import openai

TURNS = 4
OPERATIONS: dict[type[ast.AST], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Calculates the value of an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": 'for example "3 + 4"'}},
            "required": ["expression"],
        },
    },
}


def value(node: ast.AST) -> Any:
    """Return the value of an expression of numbers and + - * /.

    Raises:
        ValueError: the expression contains anything else.
    """
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](value(left), value(right))
    raise ValueError(f"{ast.unparse(node)!r}: expected numbers with + - * / between them.")


def calculator(arguments: str) -> str:
    """Return the value of the expression, or an error, as the text of a tool message."""
    try:
        return f"{value(ast.parse(json.loads(arguments)['expression'], mode='eval').body):.12g}"
    except (KeyError, TypeError, ValueError, SyntaxError, ArithmeticError, RecursionError) as error:
        return f"error: {error}"


def solve(client: openai.OpenAI, messages: list[Any]) -> dict[str, Any]:
    """Run one episode; return its last completion and the number of calculator calls."""
    calls = 0
    for _ in range(TURNS):
        message = (
            client.chat.completions.create(model="policy", messages=messages, tools=[CALCULATOR]).choices[0].message
        )
        if not message.tool_calls:
            break
        messages.append(message)
        for call in message.tool_calls:
            calls += 1
            result = calculator(call.function.arguments) if call.type == "function" else "error: no such tool"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return {"answer": message.content or "", "calls": calls}


if __name__ == "__main__":
    for line in sys.stdin:
        episode = json.loads(line)
        with openai.OpenAI(base_url=episode["base_url"], api_key=episode["api_key"]) as client:
            print(json.dumps(solve(client, episode["data"]["messages"])), flush=True)
