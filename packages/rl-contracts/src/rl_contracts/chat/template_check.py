"""Check that a chat template shows all of a conversation.

Templates drop roles, tools and calls that they do not know without an error. The model then learns an answer without
the text that it depends on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rl_contracts.errors import DataError

_THINK = re.compile(r"</?think>")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_MOVED = ("system", "developer")
"""Roles whose text templates move: to the front, or before the last question."""


def require_rendered(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, text: str) -> None:
    """Reject a conversation of which a template does not show everything.

    Contents, and names and arguments of tool calls, must be in the text in the order of the messages, and the names of
    tools anywhere. White space and JSON escapes do not count. Reasoning of turns before the last may be missing.

    Args:
        messages: the conversation.
        tools: JSON schemas that the template was given.
        text: what the template made of both.

    Raises:
        DataError: names the message or the tool, and what is missing.
    """
    squashed, start = _squash(text), 0
    for tool in tools or ():
        name = tool.get("function", tool).get("name") if isinstance(tool, Mapping) else None
        if name and _end(squashed, name, 0) is None:
            raise _missing("tools", name)
    for index, message in enumerate(messages):
        where = f"message {index} ({message['role']})"
        if message["role"] in _MOVED:
            _ends(squashed, _contents(message, False), 0, where)
            continue
        ends = _ends(squashed, _contents(message, index == len(messages) - 1), start, where)
        calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
        for call in calls:
            _ends(squashed, _leaves(call.get("arguments")), start, f"{where}, tool call {call.get('name')}")
        if calls:  # the text of a turn with calls may be shown after their results
            ends = _ends(squashed, (call.get("name") for call in calls), start, f"{where}, tool call")
        start = max([start, *ends])


def _contents(message: Mapping[str, Any], is_last: bool) -> Iterator[str]:
    """Yield the texts of a message, of the last turn also its reasoning."""
    content = message.get("content") or ""
    parts = [content] if isinstance(content, str) else content
    texts = [part.get("text") or "" if isinstance(part, Mapping) else part for part in parts]
    if message["role"] != "assistant":
        yield from texts
        return
    is_learned = is_last and message.get("weight") != 0
    for text in texts:
        yield from _THINK.split(text) if is_learned else _THINK.split(text)[-1:]
    yield from (message[key] for key in _REASONING if is_learned and isinstance(message.get(key), str))


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the names and values of arguments that are neither lists nor objects."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from _leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
    elif value is not None:
        yield value


def _ends(squashed: str, values: Iterable[Any], start: int, where: str) -> list[int]:
    """Return where each value ends in the text from `start` on."""
    ends = []
    for value in values:
        end = _end(squashed, value, start)
        if end is None:
            raise _missing(where, value)
        ends.append(end)
    return ends


def _end(squashed: str, value: Any, start: int) -> int | None:
    """Return where a value ends in the text from `start` on, in the first of its forms, or None if it is not there."""
    for form in _forms(value):
        at = squashed.find(form, start)
        if at >= 0:
            return at + len(form)
    return None


def _forms(value: Any) -> Iterator[str]:
    """Yield the ways in which templates write a value: as it is, and as JSON or Python escape it once or twice."""
    if not isinstance(value, str):
        yield from (json.dumps(value), repr(value))
        return
    text = value.strip()
    yield _squash(text)  # nearly always
    escaped = json.dumps(text, ensure_ascii=False)[1:-1]
    forms = (escaped, json.dumps(text)[1:-1], repr(text)[1:-1], json.dumps(escaped, ensure_ascii=False)[1:-1])
    yield from map(_squash, forms)


def _squash(text: str) -> str:
    return "".join(text.split())


def _missing(where: str, value: Any) -> DataError:
    return DataError(
        f"{where}: expected {value!r:.60} in the text of the conversation, but the chat template does not show it; "
        "change the message, or give another template (commands: `model.chat_template=FILE`)"
    )
