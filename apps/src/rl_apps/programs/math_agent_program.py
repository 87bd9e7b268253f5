"""The agent of `math-agent` as a program of its own: it imports OpenAI's client and nothing of this project, and can
run in an environment that has no more than that.

A line of stdin is an episode: `data`, `base_url` and `api_key`. A line of stdout is its result: the last answer, which
the run's reward scores, and how often the calculator was called. It goes on until its stdin ends.
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
    """Of numbers with + - * / between them."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](value(left), value(right))
    raise ValueError(f"{ast.unparse(node)!r}: expected numbers with + - * / between them.")


def calculator(arguments: str) -> str:
    """What the model is told of a call."""
    try:
        return f"{value(ast.parse(json.loads(arguments)['expression'], mode='eval').body):.12g}"
    except (KeyError, TypeError, ValueError, SyntaxError, ArithmeticError, RecursionError) as error:
        return f"error: {error}"


def solve(client: openai.OpenAI, messages: list[Any]) -> dict[str, Any]:
    """An episode."""
    calls = 0
    for _ in range(TURNS):
        answer = (
            client.chat.completions.create(model="policy", messages=messages, tools=[CALCULATOR]).choices[0].message
        )
        if not answer.tool_calls:
            break
        messages.append(answer)
        for call in answer.tool_calls:
            calls += 1
            told = calculator(call.function.arguments) if call.type == "function" else "error: no such tool"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": told})
    return {"answer": answer.content or "", "calls": calls}


if __name__ == "__main__":
    for line in sys.stdin:
        episode = json.loads(line)
        with openai.OpenAI(base_url=episode["base_url"], api_key=episode["api_key"]) as client:
            print(json.dumps(solve(client, episode["data"]["messages"])), flush=True)
