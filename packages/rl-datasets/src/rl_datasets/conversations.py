"""Read conversations: the one reader of messages for chat, preference and tool data."""

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
"""Roles of other formats (ShareGPT, OpenAI's functions, HH-RLHF), and the chat templates' names for them."""
_ROLE = ("role", "from")
_CONTENT = ("content", "value")
_CALLS = ("tool_calls", "function_call")
_ARGUMENTS = ("arguments", "parameters", "args", "input")
"""Names of a call's arguments (OpenAI, Llama, LangChain, Anthropic)."""
_TEXT_PARTS = ("text", "input_text", "output_text")
_EMPTY: tuple[Any, ...] = ("", [], {})
_CALL = {"id", "index", "type"}
"""Further entries of a call."""
_ROW_SWITCHES = ("weight", "loss_weight", "sample_weight", "train", "trainable")
_SWITCHES = (*_ROW_SWITCHES, "training", "learn", "loss")
"""Entries that say whether a turn is learned."""
_NOT_READ = re.compile(
    r"(image|audio|video|document)s?|functions|function_calls|tools|is_target|no_grad"
    r"|(.*_)?(weight|train|learn|loss|mask|supervis|ignore).*"
)
"""Entries of a message that no chat template shows, and other names for whether a turn is learned."""


def read_messages(where: str, value: Any, role: str = "user") -> list[Message]:
    """Return the messages of a column.

    Args:
        where: place of the row, for errors.
        value: a list of messages, one message, one of these as JSON text, or another text. A text that begins with
            `Human:` or `Assistant:` is a dialogue (see `parse_dialogue`), any other is one message.
        role: role of a text that is no dialogue.

    Returns:
        Messages with `role`, a text `content`, and the further entries of each that are not null; `tool_calls` as
        OpenAI writes them, with arguments as objects. An assistant turn that is not learned has `weight` 0, whichever
        entry says so.

    Raises:
        DataError: the value holds no messages, or a message or an entry of it cannot be read.
    """
    value = decoded(value)
    if isinstance(value, str) and value.strip() and not is_dialogue(value):
        return [{"role": role, "content": value}]
    messages = parse_dialogue(value) if isinstance(value, str) else [value] if isinstance(value, Mapping) else value
    if not isinstance(messages, list) or not messages:
        raise DataError(
            f"{where}: expected a text or a list of messages with role and content, found {value!r:.60}; complete the "
            "row or remove it"
        )
    return [_message(where, message) for message in messages]


def is_dialogue(text: str) -> bool:
    """Whether a text begins with the mark of a turn."""
    return _FIRST_TURN.match(text) is not None


def parse_dialogue(text: str) -> list[Message]:
    """Return the turns of a text marked `\\n\\nHuman:` and `\\n\\nAssistant:`; none if it does not begin with a mark.

    Marks may also follow a single line break, in a text that has no other marks after a blank line.
    Turns that follow each other with the same role are joined by a blank line, because chat templates ask for
    alternation. A mark of the assistant with nothing after it, at the end, opens the answer and is no turn.
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
    """Return the messages of a prompt without an empty assistant turn at their end, which only opens the answer."""
    return messages[:-1] if messages and messages[-1]["role"] == "assistant" and is_empty(messages[-1]) else messages


def is_empty(message: Message) -> bool:
    """Whether a message has neither text nor tool calls."""
    return not message["content"].strip() and not message.get("tool_calls")


def is_learned(message: Message) -> bool:
    """Whether a message is an assistant turn to learn from."""
    return bool(message["role"] == "assistant" and message.get("weight") != 0)


def reject_row_weight(where: str, row: Mapping[str, Any]) -> None:
    """Reject a row with a weight of its own: every row counts once.

    Raises:
        DataError: names the column.
    """
    for name in _ROW_SWITCHES:
        if row.get(name, 1) not in (1, None):
            raise DataError(
                f"{where}: expected 1 in {name!r}, because each example counts once, found {row[name]!r:.60}; "
                f"remove the row, or leave the column out by data.columns.{UNUSED}{name}={name}"
            )


def _message(where: str, message: Any) -> Message:
    """Return one message without the entries that are null."""
    entries = _entries(message)
    name, content, calls = (_one_of(where, entries, names) for names in (_ROLE, _CONTENT, _CALLS))
    if name == "function_call":
        content, calls = None, content
    calls = parsed(calls)
    if not isinstance(name, str) or (content is None and not calls):
        raise DataError(f"{where}: expected messages with role and content, found {message!r:.60}; correct the row")
    role = name.strip().lower()
    role = _ROLES.get(role, role)
    weight = _weight(where, role, entries)
    for key, value in entries.items():
        if _NOT_READ.fullmatch(key.lower()) and value not in _EMPTY:
            raise DataError(
                f"{where}: expected messages without {key!r}, which is not read, found {value!r:.60} (role {role}); "
                "remove it or the row, and mark turns that are not learned by weight 0"
            )
    result = {**entries, **weight, "role": role, "content": _text(where, role, content)}
    return result | ({"tool_calls": _calls(where, calls)} if calls else {})


def _weight(where: str, role: str, entries: dict[str, Any]) -> dict[str, int]:
    """Return the weight 0 of a turn that is not learned, and take the entries that say it out of a message."""
    switches = {key: entries.pop(key) for key in _SWITCHES if key in entries}
    for key, value in switches.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise DataError(
                f"{where}: expected {' or '.join(_SWITCHES)} with 0 or 1 in messages, found {key}={value!r:.60}; turns "
                "are learned or not, so change or remove it"
            )
        if value and (role != "assistant" or not all(switches.values())):
            raise DataError(
                f"{where}: expected {key}={value!r} in an assistant turn without other such entries, found a "
                f"{role} message with {switches}; only assistant turns are learned, so remove it"
            )
    return {"weight": 0} if role == "assistant" and switches and not any(switches.values()) else {}


def _text(where: str, role: str, content: Any) -> str:
    """Return content as a text: a list of text parts is joined, another result of a tool is written as JSON."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    others = [part for part in parts if not _is_text(role, part)]
    if isinstance(content, list) and not others:
        return "".join(part if isinstance(part, str) else part["text"] for part in parts)
    is_number = isinstance(content, int | float) and not isinstance(content, bool) and math.isfinite(content)
    if role == "tool" or is_number:
        return json.dumps(content, ensure_ascii=False, default=str)
    raise DataError(
        f"{where}: expected a text or a list of text parts as content (role {role}), found "
        f"{(others or parts)[0]!r:.60}; only text is read, so remove the row"
    )


def _is_text(role: str, part: Any) -> bool:
    """Whether a part of a message is a text, or an object that holds one and nothing else to show."""
    entries = _entries(part)
    is_part = entries.get("type") in _TEXT_PARTS or entries.keys() == {"text"}
    return isinstance(entries.get("text"), str) if is_part else isinstance(part, str) and role != "tool"


def _calls(where: str, value: Any) -> list[dict[str, Any]]:
    """Return tool calls as `{"type": "function", "function": {"name", "arguments"}}` with objects as arguments."""
    return [_call(where, call) for call in (value if isinstance(value, list) else [value])]


def _call(where: str, value: Any) -> dict[str, Any]:
    call = _entries(value)
    call |= _entries(call.pop("function", None))
    name, arguments = call.pop("name", None), parsed(_one_of(where, call, _ARGUMENTS) or {})
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise DataError(
            f"{where}: expected tool calls with the name of a function and an object as arguments, found "
            f"{value!r:.120}; correct the row"
        )
    if unread := sorted(call.keys() - _CALL):
        raise DataError(
            f"{where}: expected a name, arguments and {', '.join(sorted(_CALL))} in tool calls, found also "
            f"{', '.join(unread)}; remove it, or rename it if it holds the arguments"
        )
    return {**call, "type": "function", "function": {"name": name, "arguments": arguments}}


def _entries(value: Any) -> dict[str, Any]:
    """Return the entries that are not null, because Parquet gives every object all keys; none of what is no object."""
    return {key: entry for key, entry in value.items() if entry is not None} if isinstance(value, Mapping) else {}


def _one_of(where: str, entries: dict[str, Any], names: tuple[str, ...]) -> Any:
    """Take the entries of these names out, and return the one that is not empty; None where there is none."""
    given = [entries.pop(name) for name in names if name in entries]
    filled = [value for value in given if value not in _EMPTY]
    if any(value != filled[0] for value in filled):
        raise DataError(f"{where}: expected one of {', '.join(names)}, found {filled!r:.120}; keep one of them")
    return (filled or given or [None])[0]


def has_messages(value: Any) -> bool:
    """Whether a value is a message or a list of messages."""
    messages = value if isinstance(value, list) else [value]
    return bool(messages) and all(isinstance(item, Mapping) and {*_ROLE} & item.keys() for item in messages)


def decoded(value: Any) -> Any:
    """Return the messages that a text of JSON holds; any other value as it is."""
    found = parsed(value)
    return found if has_messages(found) else value


def parsed(value: Any) -> Any:
    """Return the object, list or null that a text of JSON holds; any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        result = json.loads(value)
    except json.JSONDecodeError:
        return value
    return result if result is None or isinstance(result, dict | list) else value
