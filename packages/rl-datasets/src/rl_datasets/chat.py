"""Data set of conversations: examples with `messages`, for supervised learning or, with a reward, for RL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_contracts.config import require
from rl_contracts.errors import DataError
from rl_datasets.columns import Record, missing
from rl_datasets.conversations import Message, decoded, is_learned, parsed, read_messages, reject_row_weight
from rl_datasets.files import read_records
from rl_datasets.questions import read_question, reject_unread
from rl_datasets.rows import Rows, read_options, require_form
from rl_datasets.texts import FileOptions, checked, reject_empty, require_finite
from rl_datasets.tools import is_tools, read_tools


@dataclass(frozen=True)
class ChatOptions(FileOptions):
    """Options of `chat` in addition to path, split and form."""

    subset: str | None = None
    """Configuration name on the hub, and the folder of that name in a local copy of the hub's repository."""
    system: str = ""
    """System message to insert before each conversation without one."""
    instruction: str = ""
    """Text to append to the last question after a blank line, for example the required form of the answer."""


_ANSWER_ENTRIES = (("answer", "content"), ("tool_calls", "tool_calls"))
"""Entries of an example in RL form, each with the entry of the last message that it is copied from."""


class Chat(Rows[dict[str, Any]]):
    """Examples of one split, in the order of the file.

    The `messages` of an example are a list of `{"role", "content"}` (or of ShareGPT's `{"from", "value"}`), or a text:
    the user's question, or a dialogue. See `rl_datasets.conversations.read_messages`, and
    `rl_datasets.questions.read_question` for the columns `system`, `history` and `input`.

    RL form: `{"prompt_id": index, "messages": up to the answer, "answer": ..., ...}`. A last message of the assistant
    is removed from the prompt. If the record has no `answer`, the text of this message becomes the `answer`, and its
    `tool_calls` become an entry of the example. All other columns that JSON can represent are kept, and a reward gets
    them as keyword arguments.

    SFT form: `{"prompt_id": index, "messages": all messages}`. If the messages end with a question, the record's
    `answer` is appended: a text, messages, or, in a record with tools, a list of calls `{"name", "arguments"}`.

    Both forms include `tools` if the record has tools; see `rl_datasets.tools.read_tools`.
    """

    reads_files = True

    def __init__(
        self,
        path: str | Path = "",
        split: str = "train",
        form: str = "rl",
        seed: int = 0,
        columns: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        """Read and check all examples.

        Args:
            path: directory, file or hub id; see `rl_datasets.files.read_records`.
            split: `train` or `test`, for example.
            form: `rl` or `sft`.
            seed: ignored, because nothing is generated; every data set accepts it.
            columns: map from expected names (`messages`, `answer`, arguments of the reward) to columns of the file.
            **options: fields of `ChatOptions`.

        Raises:
            ConfigError: `path` is empty, or `form` or an option is unknown.
            DataError: the data cannot be read, or a record lacks its messages or the text to learn, or has text that
                is not UTF-8.
        """
        require(bool(path), "data.path of chat data", "a directory, a .jsonl or .parquet file, or a hub id", str(path))
        require_form("chat", form, ("rl", "sft"))
        build, chat_options = (rl_example if form == "rl" else sft_example), read_options(ChatOptions, "chat", options)
        records = read_records(path, split, chat_options.subset, columns)
        super().__init__(
            [
                checked(
                    record[0],
                    build(record, prompt_messages(record, chat_options, columns)) | read_tools(record),
                    chat_options,
                )
                for record in records
            ]
        )
        if not self._items:
            raise DataError(
                f"{path}: expected examples in the split {split!r}, found none; check whether its file is empty, or "
                "set evaluation.examples=0 if you need no test data"
            )

    def _row(self, index: int, item: dict[str, Any]) -> dict[str, Any]:
        return {**item, "prompt_id": index, "messages": [dict(message) for message in item["messages"]]}


def rl_example(record: Record, messages: list[Message]) -> dict[str, Any]:
    """Return the RL form of an example."""
    where, row = record
    rest = {name: value for name, value in row.items() if name != "messages" and not is_tools(name) and _plain(value)}
    if messages[-1]["role"] == "assistant":
        *messages, last = messages
        if rest.get("answer") is None:
            _require_learned(where, [last])
            reject_empty(where, [last])
            rest |= {name: last[key] for name, key in _ANSWER_ENTRIES if last.get(key)}
    if isinstance(rest.get("answer"), str) and not rest["answer"].strip():
        raise DataError(f"{where}: expected text in the column 'answer', found {rest['answer']!r}; remove the example")
    reject_empty(where, messages)
    if not any(message["role"] != "system" for message in messages):
        raise DataError(f"{where}: expected messages with a question before the answer, found none; remove the example")
    return {**rest, "messages": messages}


def sft_example(record: Record, messages: list[Message]) -> dict[str, Any]:
    """Return the SFT form of an example."""
    where, row = record
    reject_row_weight(where, row)
    if messages[-1]["role"] != "assistant":
        messages = [*messages, *_answer(record, messages[-1]["role"])]
    _require_learned(where, messages)
    reject_empty(where, messages)
    return {"messages": messages}


def _answer(record: Record, role: str) -> list[Message]:
    """Return the turns of the column `answer`: text, messages, or calls if the record has tools."""
    where, row = record
    if "answer" not in row:
        raise missing(f"{where}: the last message has role {role!r} instead of 'assistant'", row, "answer")
    answer = decoded(row["answer"])
    if _has_calls(calls := parsed(answer)) and read_tools(record):
        answer = {"role": "assistant", "tool_calls": calls}
    if isinstance(answer, list | Mapping):
        turns = read_messages(f"{where}: answer", answer)
        if turns[0]["role"] == turns[-1]["role"] == "assistant":
            return turns
    require_finite(where, answer)
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
        raise DataError(f"{where}: expected text in the column 'answer', found {answer!r:.60}; complete or remove it")
    return [{"role": "assistant", "content": str(answer)}]


def _has_calls(value: Any) -> bool:
    """Return whether a value is a tool call or a list of tool calls."""
    calls = value if isinstance(value, list) else [value]
    return bool(calls) and all(isinstance(call, Mapping) and {"name", "arguments"} <= call.keys() for call in calls)


def _require_learned(where: str, messages: list[Message]) -> None:
    if not any(map(is_learned, messages)):
        raise DataError(f"{where}: expected an assistant turn to learn from, but all have weight 0; remove the example")


def prompt_messages(record: Record, options: ChatOptions, columns: Mapping[str, str] | None) -> list[Message]:
    """Return the conversation of an example, with the system message and instruction of the options."""
    where, row = record
    if "messages" not in row:
        raise missing(where, {(columns or {}).get(name, name): value for name, value in row.items()}, "messages")
    messages = read_question(record, "messages", row["messages"])
    reject_unread(record, "messages", messages)
    if options.system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": options.system})
    question = next((message for message in reversed(messages) if message["role"] == "user"), None)
    if options.instruction and question is not None:
        question["content"] = f"{question['content']}\n\n{options.instruction}"
    return messages


def _plain(value: Any) -> bool:
    """Return whether JSON can represent a value, which is required to send it to a reward worker."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _plain(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(map(_plain, value))
    return value is None or isinstance(value, str | int | float)
