"""Check that a chat template renders a conversation completely.

Templates silently drop roles, tools and calls that they do not support. The model then trains on a completion without
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
_MOVED_ROLES = ("system", "developer")
"""Roles whose messages a template may move to the front or before the last question."""


def require_rendered(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, text: str) -> None:
    """Reject a conversation that a template renders incompletely.

    Message contents, and names and arguments of tool calls, must occur in the order of the messages. Tool names may
    occur anywhere. Whitespace and JSON escapes are ignored. Reasoning may be missing, except in the last turn.

    Args:
        messages: the conversation.
        tools: JSON schemas passed to the template.
        text: the rendered conversation.

    Raises:
        DataError: a text or a tool name is missing. The error names the missing text, and its chat message or tool.
    """
    rendered, start = _remove_whitespace(text), 0
    for tool in tools or ():
        name = tool.get("function", tool).get("name") if isinstance(tool, Mapping) else None
        if name and _end_position(rendered, name, 0) is None:
            raise _missing_error("tools", name)
    for index, message in enumerate(messages):
        location = f"message {index} ({message['role']})"
        if message["role"] in _MOVED_ROLES:
            _end_positions(rendered, _contents(message, False), 0, location)
            continue
        ends = _end_positions(rendered, _contents(message, index == len(messages) - 1), start, location)
        calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
        for call in calls:
            _end_positions(rendered, _leaves(call.get("arguments")), start, f"{location}, tool call {call.get('name')}")
        if calls:  # templates may render the text of a turn with calls after their results
            ends = _end_positions(rendered, (call.get("name") for call in calls), start, f"{location}, tool call")
        start = max([start, *ends])


def _contents(message: Mapping[str, Any], is_last: bool) -> Iterator[str]:
    """Yield the texts of a message, and its reasoning if it is an assistant message to train on in the last turn."""
    content = message.get("content") or ""
    parts = [content] if isinstance(content, str) else content
    texts = [part.get("text") or "" if isinstance(part, Mapping) else part for part in parts]
    if message["role"] != "assistant":
        yield from texts
        return
    is_trained = is_last and message.get("weight") != 0
    for text in texts:
        yield from _THINK.split(text) if is_trained else _THINK.split(text)[-1:]
    yield from (message[key] for key in _REASONING if is_trained and isinstance(message.get(key), str))


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the keys and scalar values of nested arguments."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from _leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
    elif value is not None:
        yield value


def _end_positions(rendered: str, values: Iterable[Any], start: int, location: str) -> list[int]:
    """Return the end position of each value in the text, searching from `start`.

    Raises:
        DataError: a value is missing.
    """
    ends = []
    for value in values:
        end = _end_position(rendered, value, start)
        if end is None:
            raise _missing_error(location, value)
        ends.append(end)
    return ends


def _end_position(rendered: str, value: Any, start: int) -> int | None:
    """Return the end position of the first form of a value that occurs at or after `start`, or None."""
    for form in _forms(value):
        begin = rendered.find(form, start)
        if begin >= 0:
            return begin + len(form)
    return None


def _forms(value: Any) -> Iterator[str]:
    """Yield the forms in which a template may write a value: verbatim, or escaped by JSON or Python, once or twice."""
    if not isinstance(value, str):
        yield from (json.dumps(value), repr(value))
        return
    text = value.strip()
    yield _remove_whitespace(text)  # the most common form
    escaped = json.dumps(text, ensure_ascii=False)[1:-1]
    forms = (escaped, json.dumps(text)[1:-1], repr(text)[1:-1], json.dumps(escaped, ensure_ascii=False)[1:-1])
    yield from map(_remove_whitespace, forms)


def _remove_whitespace(text: str) -> str:
    return "".join(text.split())


def _missing_error(location: str, value: Any) -> DataError:
    return DataError(
        f"{location}: expected {value!r:.60} in the rendered conversation, but the chat template omits it; "
        "change the data, or use another template (in commands, set `model.chat_template=FILE`)"
    )
