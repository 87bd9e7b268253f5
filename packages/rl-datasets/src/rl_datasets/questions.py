"""Read the columns `system`, `history` and `input` of a question.

Other columns with usual names of question parts are rejected if their text is missing from the messages.
`rl_datasets.tools` reads the column `tools`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rl_contracts.errors import DataError
from rl_datasets.columns import UNUSED, Record
from rl_datasets.conversations import Message, decoded, is_dialogue, parsed, read_messages

_SYSTEM = ("system", "system_prompt", "system_message", "system_instruction")
_HISTORY = ("history", "chat_history", "conversation_history")
_TEXTS = (
    *("prompt", "instruction", "question", "query", "problem", "input", *_HISTORY, "dialog", "dialogue", "developer"),
    *("context", "contexts", "ctx", "passage", "passages", "document", "documents", "article", "story"),
    *("premise", "hypothesis", "choices", "options", "endings", "option_a", "option_b", "option_c", "option_d"),
    *("opa", "opb", "opc", "opd", "starter_code", "sql_context", "schema", "api_list"),
)
"""Columns with a text of the question in public data sets (Alpaca, Dolly, SQuAD, MMLU, HellaSwag, SNLI)."""
_NOT_READ = (
    *("image", "images", "image_path", "image_url", "video", "videos", "audio", "audios", "audio_path"),
    "chat_template_kwargs",
)


def read_question(record: Record, column: str, value: Any) -> list[Message]:
    """Return the messages of a column, preceded by the record's `system` message.

    A column with one text has the Alpaca format: `input` is appended after a blank line, and the turns of
    `history` come before it. `history` is a list of messages, or of pairs of a question and its answer.

    Args:
        record: location and columns of the record.
        column: name of the column, for errors.
        value: content of the column.

    Raises:
        DataError: a column cannot be read.
    """
    where, row = record
    value = decoded(value)
    messages = read_messages(f"{where}: {column}", value)
    if isinstance(value, str) and not is_dialogue(value):
        for _, text in _named(row, ("input",)):
            if isinstance(text, str | int) and str(text).strip():
                messages[0]["content"] += f"\n\n{text}"
        for name, turns in _named(row, _HISTORY)[:1]:
            messages = [*_history(where, name, turns), *messages]
    return with_system(record, messages)


def with_system(record: Record, messages: list[Message]) -> list[Message]:
    """Return the messages, beginning with the record's `system` column if it has one.

    Raises:
        DataError: the column is not a text, or the messages begin with another system message.
    """
    where, row = record
    for name, text in _named(row, _SYSTEM):
        if not isinstance(text, str):
            raise DataError(f"{where}: expected a text in the column {name!r}, found {text!r:.60}; correct the example")
        if messages[0]["role"] != "system":
            messages = [{"role": "system", "content": text}, *messages]
        elif _normalize_spaces(messages[0]["content"]) != _normalize_spaces(text):
            raise DataError(
                f"{where}: expected one system message, found {text!r:.60} in the column {name!r} and "
                f"{messages[0]['content']!r:.60} in the messages; keep one of them"
            )
    return messages


def reject_unread(record: Record, column: str, messages: list[Message]) -> None:
    """Reject a record with a question column whose text is missing from the messages up to the last question.

    Args:
        record: location and columns of the record.
        column: the column that was read into `messages`.
        messages: the conversation.

    Raises:
        DataError: a column was not read.
    """
    where, row = record
    columns = {
        name: value
        for name in row
        if name != column and name.lower() in (*_TEXTS, *_NOT_READ) and (value := parsed(row[name]))
    }
    if not columns:
        return
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=len(messages) - 1)
    question_text = _normalize_spaces("\n".join(message["content"] for message in messages[: last + 1]))
    for name, value in columns.items():
        if name.lower() in _NOT_READ or any(_normalize_spaces(text) not in question_text for text in _texts(value)):
            raise DataError(
                f"{where}: expected the column {name!r} in the messages, because it may belong to the question, found "
                f"messages without it; add the text of the column to the messages, or exclude the column by "
                f"data.columns.{UNUSED}{name}={name}"
            )


def _named(row: Mapping[str, Any], names: tuple[str, ...]) -> list[tuple[str, Any]]:
    """Return the non-empty columns with one of these names, ignoring case."""
    return [(name, value) for name, value in row.items() if name.lower() in names and value not in (None, "", [], {})]


def _history(where: str, name: str, value: Any) -> list[Message]:
    turns = parsed(value) or []
    if not isinstance(turns, list):
        raise DataError(f"{where}: expected a list of turns in the column {name!r}, found {value!r:.60}; correct it")
    if all(isinstance(turn, list) and len(turn) == 2 for turn in turns):
        turns = [{"role": r, "content": t} for turn in turns for r, t in zip(("user", "assistant"), turn, strict=True)]
    return read_messages(f"{where}: {name}", turns) if turns else []


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts of a column: the contents of messages, or all values of other lists and objects."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, Mapping):
        content = value.get("content", value.get("value"))
        for item in value.values() if content is None else [content]:
            yield from _texts(item)
    elif isinstance(value, str | int | float) and value == value:  # NaN stands for null in tables
        yield str(value)


def _normalize_spaces(text: str) -> str:
    return " ".join(text.split())
