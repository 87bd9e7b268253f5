"""Reader of conversations, shared by chat, preference and tool data."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from rl_contracts.errors import DataError
from rl_datasets.columns import UNUSED

Message = dict[str, Any]

_TURN = re.compile(r"\n\n(Human|Assistant):")
_LINE = re.compile(r"\n+(Human|Assistant):")
_FIRST_TURN = re.compile(r"\s*(?:Human|Assistant):")
_ROLES = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "ai", "bot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "function", "function_response", "tool_response"), "tool"),
}
"""Roles of other formats (ShareGPT, OpenAI's functions, HH-RLHF), mapped to the names that chat templates use."""
_ROLE = ("role", "from")
_CONTENT = ("content", "value")
_CALLS = ("tool_calls", "function_call")
_ARGUMENTS = ("arguments", "parameters", "args", "input")
"""Names for the arguments of a call (OpenAI, Llama, LangChain, Anthropic)."""
_TEXT_PARTS = ("text", "input_text", "output_text")
_EMPTY: tuple[Any, ...] = ("", [], {})
_CALL = {"id", "index", "type"}
"""Additional entries that a call may have."""
_ROW_SWITCHES = ("weight", "loss_weight", "sample_weight", "train", "trainable")
_SWITCHES = (*_ROW_SWITCHES, "training", "learn", "loss")
"""Entries that state whether a turn is learned."""
_NOT_READ = re.compile(
    r"(image|audio|video|document)s?|functions|function_calls|tools|is_target|no_grad"
    r"|(.*_)?(weight|train|learn|loss|mask|supervis|ignore).*"
)
"""Entries of a message that are rejected: no chat template renders them, or they may state whether a turn is learned
under a name that is not in `_SWITCHES`."""


def read_messages(where: str, value: Any, role: str = "user") -> list[Message]:
    """Return the messages of a column.

    Args:
        where: location of the record, for errors.
        value: a list of messages, one message, one of these as JSON text, or a plain text. A plain text that begins
            with `Human:` or `Assistant:` is a dialogue (see `parse_dialogue`); any other plain text is one message.
        role: role of a text that is not a dialogue.

    Returns:
        Messages with `role`, a text `content`, and all other entries that are not null. `tool_calls` have OpenAI's
        format, with arguments as objects. An assistant turn that is not learned has `weight` 0, whatever the name of
        the entry in the file.

    Raises:
        DataError: the value has no messages, or a message or an entry of it cannot be read.
    """
    value = decoded(value)
    if isinstance(value, str) and value.strip() and not is_dialogue(value):
        return [{"role": role, "content": value}]
    messages = parse_dialogue(value) if isinstance(value, str) else [value] if isinstance(value, Mapping) else value
    if not isinstance(messages, list) or not messages:
        raise DataError(
            f"{where}: expected a text or a list of messages with role and content, found {value!r:.60}; complete or "
            "remove the example"
        )
    return [_message(where, message) for message in messages]


def is_dialogue(text: str) -> bool:
    """Return whether a text begins with the mark of a turn."""
    return _FIRST_TURN.match(text) is not None


def parse_dialogue(text: str) -> list[Message]:
    """Return the turns of a text marked `\\n\\nHuman:` and `\\n\\nAssistant:`; none if it does not begin with a mark.

    If no later mark follows a blank line, marks after a single line break also count. Consecutive turns of the same
    role are joined by a blank line, because chat templates require alternating roles. An assistant mark at the end
    with no text after it opens the answer and is not a turn.
    """
    if not is_dialogue(text):
        return []
    text = f"\n\n{text.lstrip()}"
    parts = (_TURN if _TURN.search(text, 1) else _LINE).split(text)
    turns: list[Message] = []
    for mark, part in zip(parts[1::2], parts[2::2], strict=True):
        role, content = _ROLES.get(mark.lower(), mark.lower()), part.strip()
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] = f"{turns[-1]['content']}\n\n{content}".strip()
        else:
            turns.append({"role": role, "content": content})
    return without_opening(turns)


def without_opening(messages: list[Message]) -> list[Message]:
    """Return the messages of a prompt without a final empty assistant turn, which only opens the answer."""
    return messages[:-1] if messages and messages[-1]["role"] == "assistant" and is_empty(messages[-1]) else messages


def is_empty(message: Message) -> bool:
    """Return whether a message has neither text nor tool calls."""
    return not message["content"].strip() and not message.get("tool_calls")


def is_learned(message: Message) -> bool:
    """Return whether a message is an assistant turn to learn from."""
    return bool(message["role"] == "assistant" and message.get("weight") != 0)


def reject_row_weight(where: str, row: Mapping[str, Any]) -> None:
    """Reject a record with a weight other than 1, because every example counts once.

    Raises:
        DataError: a weight column is not 1 or null.
    """
    for name in _ROW_SWITCHES:
        if row.get(name, 1) not in (1, None):
            raise DataError(
                f"{where}: expected 1 in {name!r}, because each example counts once, found {row[name]!r:.60}; "
                f"remove the example, or exclude the column by data.columns.{UNUSED}{name}={name}"
            )


def _message(where: str, message: Any) -> Message:
    """Return one message without null entries."""
    entries = _entries(message)
    name, content, calls = (_one_of(where, entries, names) for names in (_ROLE, _CONTENT, _CALLS))
    if name == "function_call":
        content, calls = None, content
    calls = parsed(calls)
    if not isinstance(name, str) or (content is None and not calls):
        raise DataError(f"{where}: expected messages with role and content, found {message!r:.60}; correct the example")
    role = name.strip().lower()
    role = _ROLES.get(role, role)
    weight = _weight(where, role, entries)
    for key, value in entries.items():
        if _NOT_READ.fullmatch(key.lower()) and value not in _EMPTY:
            raise DataError(
                f"{where}: expected messages without {key!r}, which is not read, found {value!r:.60} (role {role}); "
                "remove it or the example, and mark turns that are not learned by weight 0"
            )
    result = {**entries, **weight, "role": role, "content": _text(where, role, content)}
    return result | ({"tool_calls": _calls(where, calls)} if calls else {})


def _weight(where: str, role: str, entries: dict[str, Any]) -> dict[str, int]:
    """Return `{"weight": 0}` for a turn that is not learned, else `{}`; remove the entries that state it."""
    switches = {key: entries.pop(key) for key in _SWITCHES if key in entries}
    for key, value in switches.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise DataError(
                f"{where}: expected 0 (do not learn the turn) or 1 for {key!r} of a message, found {value!r:.60}; "
                "change or remove it"
            )
        if value and (role != "assistant" or not all(switches.values())):
            raise DataError(
                f"{where}: expected {key}={value!r} only in an assistant turn without contradicting entries, found a "
                f"{role} message with {switches}; remove the entries that do not apply"
            )
    return {"weight": 0} if role == "assistant" and switches and not any(switches.values()) else {}


def _text(where: str, role: str, content: Any) -> str:
    """Return content as text: join a list of text parts; write numbers and other results of tools as JSON."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    unread = [part for part in parts if not _is_text(role, part)]
    if isinstance(content, list) and not unread:
        return "".join(part if isinstance(part, str) else part["text"] for part in parts)
    is_number = isinstance(content, int | float) and not isinstance(content, bool) and math.isfinite(content)
    if role == "tool" or is_number:
        return json.dumps(content, ensure_ascii=False, default=str)
    raise DataError(
        f"{where}: expected a text or a list of text parts as content (role {role}), found "
        f"{(unread or parts)[0]!r:.60}; only text is read, so remove the example"
    )


def _is_text(role: str, part: Any) -> bool:
    """Return whether a part of a message is a text, or an object that contains only a text."""
    entries = _entries(part)
    is_part = entries.get("type") in _TEXT_PARTS or entries.keys() == {"text"}
    return isinstance(entries.get("text"), str) if is_part else isinstance(part, str) and role != "tool"


def _calls(where: str, value: Any) -> list[dict[str, Any]]:
    """Return tool calls as `{"type": "function", "function": {"name", "arguments"}}`, with arguments as objects."""
    return [_call(where, call) for call in (value if isinstance(value, list) else [value])]


def _call(where: str, value: Any) -> dict[str, Any]:
    call = _entries(value)
    call |= _entries(call.pop("function", None))
    name, arguments = call.pop("name", None), parsed(_one_of(where, call, _ARGUMENTS) or {})
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise DataError(
            f"{where}: expected tool calls with the name of a function and an object as arguments, found "
            f"{value!r:.120}; correct the example"
        )
    if unread := sorted(call.keys() - _CALL):
        raise DataError(
            f"{where}: unknown keys in a tool call: {', '.join(unread)}; expected a name, arguments and "
            f"{', '.join(sorted(_CALL))}. Remove the keys, or rename the key that contains the arguments"
        )
    return {**call, "type": "function", "function": {"name": name, "arguments": arguments}}


def _entries(value: Any) -> dict[str, Any]:
    """Return the non-null entries of an object, or an empty dict for other values. Parquet adds null entries."""
    return {key: entry for key, entry in value.items() if entry is not None} if isinstance(value, Mapping) else {}


def _one_of(where: str, entries: dict[str, Any], names: tuple[str, ...]) -> Any:
    """Remove the entries with these names. Return their non-empty value, or an empty value or None if all are empty."""
    values = [entries.pop(name) for name in names if name in entries]
    filled = [value for value in values if value not in _EMPTY]
    if any(value != filled[0] for value in filled):
        raise DataError(f"{where}: expected one of {', '.join(names)}, found {filled!r:.120}; keep one of them")
    return (filled or values or [None])[0]


def has_messages(value: Any) -> bool:
    """Return whether a value is a message or a list of messages."""
    messages = value if isinstance(value, list) else [value]
    return bool(messages) and all(isinstance(item, Mapping) and {*_ROLE} & item.keys() for item in messages)


def decoded(value: Any) -> Any:
    """Return the messages in a JSON text, or any other value unchanged."""
    result = parsed(value)
    return result if has_messages(result) else value


def parsed(value: Any) -> Any:
    """Return the object, list or null in a JSON text, or any other value unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[", "null")):  # a failed parse is slow
        return value
    try:
        result = json.loads(value)
    except json.JSONDecodeError:
        return value
    return result if result is None or isinstance(result, dict | list) else value
