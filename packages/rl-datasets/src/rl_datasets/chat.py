"""Conversations of any kind: rows with `messages`, for supervised learning and, with a reward, for reinforcement
learning."""

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
    """What may be set beyond path, split and form."""

    subset: str | None = None
    """Configuration name on the hub, and the folder of that name in a local copy of the hub's repository."""
    system: str = ""
    """A system message that is put before each conversation which has none."""
    instruction: str = ""
    """Appended to the last question after a blank line, for example how to end the answer."""


_ANSWERS = (("answer", "content"), ("tool_calls", "tool_calls"))
"""Entries of a row in RL form, and those of its last message that they are."""


class Chat(Rows[dict[str, Any]]):
    """The rows of one split, in the order of the file.

    A row's `messages` are a list of `{"role", "content"}` (or of ShareGPT's `{"from", "value"}`), or a text: the
    user's question, or a dialogue. See `rl_datasets.conversations.read_messages`, and
    `rl_datasets.questions.read_question` for the columns `system`, `history` and `input`.

    RL form: `{"prompt_id": row index, "messages": up to the answer, "answer": ..., ...}`. A last message of the
    assistant's is no part of the prompt; where the row has no `answer`, its text is, and its `tool_calls` are an entry
    of the row. All further columns that JSON can hold go along, and a reward is given them as keyword arguments.

    SFT form: `{"prompt_id": row index, "messages": all of them}`. Where they end with a question, the row's `answer`
    comes behind them: a text, messages, or, in a row with tools, a list of calls `{"name", "arguments"}`.

    Both have `tools` where the row has any, see `rl_datasets.tools.read_tools`.
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
        """Read and check all rows.

        Args:
            path: directory, file or hub id; see `rl_datasets.files.read_records`.
            split: `train` or `test`, for example.
            form: `rl` or `sft`.
            seed: part of every data set's signature; nothing is generated.
            columns: our names (`messages`, `answer`, arguments of the reward) to those in the file.
            **options: fields of `ChatOptions`.

        Raises:
            ConfigError: no path, or an unknown form or option.
            DataError: nothing can be read there, or a row lacks its messages or the text to learn, or has text that is
                not UTF-8.
        """
        require(bool(path), "data.path of chat data", "a directory, a .jsonl or .parquet file, or a hub id", str(path))
        require_form("chat", form, ("rl", "sft"))
        made, chosen = (_prompt if form == "rl" else _conversation), read_options(ChatOptions, "chat", options)
        records = read_records(path, split, chosen.subset, columns)
        super().__init__(
            [
                checked(record[0], made(record, _messages(record, chosen, columns)) | read_tools(record), chosen)
                for record in records
            ]
        )
        if not self._items:
            raise DataError(
                f"{path}: expected rows in the split {split!r}, found none; is its file empty? (Commands need no "
                "test rows with evaluation.rows=0.)"
            )

    def _row(self, index: int, item: dict[str, Any]) -> dict[str, Any]:
        return {**item, "prompt_id": index, "messages": [dict(message) for message in item["messages"]]}


def _prompt(record: Record, messages: list[Message]) -> dict[str, Any]:
    """Return the RL form of a row."""
    where, row = record
    rest = {name: value for name, value in row.items() if name != "messages" and not is_tools(name) and _plain(value)}
    if messages[-1]["role"] == "assistant":
        *messages, last = messages
        if rest.get("answer") is None:
            _require_learned(where, [last])
            reject_empty(where, [last])
            rest |= {name: last[key] for name, key in _ANSWERS if last.get(key)}
    if isinstance(rest.get("answer"), str) and not rest["answer"].strip():
        raise DataError(f"{where}: expected text in the column 'answer', found {rest['answer']!r}; remove the row")
    reject_empty(where, messages)
    if not any(message["role"] != "system" for message in messages):
        raise DataError(f"{where}: expected messages with a question before the answer, found none; remove the row")
    return {**rest, "messages": messages}


def _conversation(record: Record, messages: list[Message]) -> dict[str, Any]:
    """Return the SFT form of a row."""
    where, row = record
    reject_row_weight(where, row)
    if messages[-1]["role"] != "assistant":
        messages = [*messages, *_answer(record, messages[-1]["role"])]
    _require_learned(where, messages)
    reject_empty(where, messages)
    return {"messages": messages}


def _answer(record: Record, role: str) -> list[Message]:
    """Return the turns of the column `answer`: text, messages, or calls in a row that has tools."""
    where, row = record
    if "answer" not in row:
        raise missing(f"{where}: the messages end with a turn of {role!r}", row, "answer")
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
    """Whether a value is a tool call or a list of tool calls."""
    calls = value if isinstance(value, list) else [value]
    return bool(calls) and all(isinstance(call, Mapping) and {"name", "arguments"} <= call.keys() for call in calls)


def _require_learned(where: str, messages: list[Message]) -> None:
    if not any(map(is_learned, messages)):
        raise DataError(
            f"{where}: expected an assistant turn to learn from, found that all have the weight 0; remove the row"
        )


def _messages(record: Record, options: ChatOptions, columns: Mapping[str, str] | None) -> list[Message]:
    """The conversation of a row, with the options' system message and instruction."""
    where, row = record
    if "messages" not in row:
        raise missing(where, {(columns or {}).get(name, name): value for name, value in row.items()}, "messages")
    messages = read_question(record, "messages", row["messages"])
    reject_unread(record, "messages", messages)
    if options.system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": options.system})
    asked = next((message for message in reversed(messages) if message["role"] == "user"), None)
    if options.instruction and asked is not None:
        asked["content"] = f"{asked['content']}\n\n{options.instruction}"
    return messages


def _plain(value: Any) -> bool:
    """Whether JSON can hold a value, as what goes to a reward's process must be."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _plain(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(map(_plain, value))
    return value is None or isinstance(value, str | int | float)
