"""Data set of preference pairs in the format of Anthropic's HH-RLHF (Bai et al., arXiv 2204.05862)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rl_contracts.errors import DataError
from rl_datasets.columns import QUESTION, Record, missing, require_known
from rl_datasets.conversations import (
    Message,
    is_dialogue,
    is_empty,
    is_learned,
    read_messages,
    reject_row_weight,
    without_opening,
)
from rl_datasets.files import read_records
from rl_datasets.questions import read_question, reject_unread, with_system
from rl_datasets.rows import Rows, read_options, require_form
from rl_datasets.texts import FileOptions, checked, reject_empty
from rl_datasets.tools import read_tools

_SIDES = ("chosen", "rejected")
_OPENING = re.compile(r"\n\nAssistant:\s*$")
_COMPARED = ("role", "content", "tool_calls", "reasoning_content", "reasoning", "thinking")
"""Entries of messages that are compared; others (`id`, `name`, `timestamp`) are ignored."""


class HHRLHF(Rows[dict[str, Any]]):
    """Preference pairs of one split, in the order of the file.

    An example is `{"prompt_id": index, "chosen": messages, "rejected": messages}`, and `tools` if the record has any.

    In the file, `chosen` and `rejected` (the sides) are lists of messages `{"role", "content"}` or texts. A text that
    begins with a mark, `\\n\\nHuman:` or `\\n\\nAssistant:` as in HH-RLHF, is a dialogue; any other is one assistant
    turn. If the record has a `prompt` (text or messages), a side either begins with the messages of the prompt or is
    the answer to it. See `rl_datasets.conversations.read_messages`, and `rl_datasets.questions.read_question` for the
    columns `system`, `history` and `input`.
    """

    reads_files = True

    def __init__(
        self,
        path: str | Path = "Anthropic/hh-rlhf",
        split: str = "train",
        form: str = "pairs",
        seed: int = 0,
        columns: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        """Read and check all pairs.

        Args:
            path: hub id, directory or file; see `rl_datasets.files.read_records`.
            split: `train` or `test`.
            form: `pairs`.
            seed: ignored, because nothing is generated; every data set accepts it.
            columns: map from `chosen`, `rejected`, `prompt`, `system`, `history`, `input` and `tools` to columns of
                the file.
            **options: fields of `rl_datasets.texts.FileOptions`.

        Raises:
            ConfigError: `form` is not `pairs`, or a column or an option is unknown.
            DataError: the data cannot be read, or a record lacks a side or its question. Also if a side does not end
                with an assistant turn, both sides are equal, or they answer different questions.
        """
        require_form("hh-rlhf", form, ("pairs",))
        file_options = read_options(FileOptions, "hh-rlhf", options)
        require_known("hh-rlhf", columns, ("chosen", "rejected", "prompt", *QUESTION))
        records = read_records(path, split, columns=columns)
        super().__init__(
            [checked(record[0], _pair(index, record), file_options) for index, record in enumerate(records)]
        )
        if not self._items:
            raise DataError(f"{path}: expected pairs in the split {split!r}, found none; check its file")

    def _row(self, index: int, item: dict[str, Any]) -> dict[str, Any]:
        return {**item, **{side: [dict(message) for message in item[side]] for side in _SIDES}}


def _pair(index: int, record: Record) -> dict[str, Any]:
    where, row = record
    prompt = _prompt(record) if row.get("prompt") else []
    for side in _SIDES:
        if side not in row:
            raise missing(where, row, side)
    reject_row_weight(where, row)
    _reject_repeated_text(where, row)
    sides = {side: _side(record, side, prompt) for side in _SIDES}
    if [*map(_compared_entries, sides["chosen"])] == [*map(_compared_entries, sides["rejected"])]:
        raise DataError(
            f"{where}: expected different chosen and rejected answers, found equal ones; remove the example"
        )
    _require_one_question(where, sides["chosen"], sides["rejected"])
    return {"prompt_id": index, **sides, **read_tools(record)}


def _prompt(record: Record) -> list[Message]:
    """Return the messages of the column `prompt`, without a final mark that opens the answer."""
    prompt = record[1]["prompt"]
    if isinstance(prompt, str) and not is_dialogue(prompt):
        prompt = _OPENING.sub("", prompt)
    return without_opening(read_question(record, "prompt", prompt))


def _side(record: Record, side: str, prompt: list[Message]) -> list[Message]:
    """Return the whole conversation of a side."""
    where, row = record
    messages = read_messages(f"{where}: {side}", row[side], "assistant")
    if prompt:
        if isinstance(row[side], str) and isinstance(row["prompt"], str) and _is_marked(row["prompt"]):
            messages = [{**message, "content": message["content"].strip()} for message in messages]
        messages = _with_prompt(where, side, prompt, messages)
    messages = with_system(record, messages)
    if not is_learned(messages[-1]) or is_empty(messages[-1]):
        raise DataError(
            f"{where}: expected {side!r} to end with an assistant turn to learn from, found {row[side]!r:.60}; "
            "complete the example"
        )
    if not any(message["role"] == "user" for message in messages):
        raise DataError(
            f"{where}: expected a question before the answer in {side!r}, found {row[side]!r:.60}; select its column "
            f"with data.columns.prompt, or complete the example"
        )
    reject_empty(where, [message for message in messages if message["role"] == "user"][-1:])
    reject_unread(record, "prompt", messages)
    return messages


def _is_marked(prompt: str) -> bool:
    return is_dialogue(prompt) or _OPENING.search(prompt) is not None


def _with_prompt(where: str, side: str, prompt: list[Message], messages: list[Message]) -> list[Message]:
    """Return the whole conversation of a side that begins with the prompt or is only the answer."""
    (prompt_system, question), (side_system, turns) = _split_system(prompt), _split_system(messages)
    if prompt_system and side_system and _key(prompt_system[0]) != _key(side_system[0]):
        raise DataError(f"{where}: expected one system message, found another in {side!r} than in the prompt; keep one")
    system = side_system or prompt_system
    if [*map(_key, turns[: len(question)])] == [*map(_key, question)]:
        return [*system, *turns]
    if turns and turns[0]["role"] == "assistant" and question[-1]["role"] != "assistant":
        return [*system, *question, *turns]
    raise DataError(
        f"{where}: expected {side!r} to begin with the messages of the prompt, or to be the answer to it, found "
        f"{turns[0] if turns else messages[0]!r:.60} after a prompt that ends with {question[-1]!r:.60}; correct the "
        "example"
    )


def _split_system(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    count = int(messages[0]["role"] == "system")
    return messages[:count], messages[count:]


def _reject_repeated_text(where: str, row: Mapping[str, Any]) -> None:
    """Reject unmarked answers that both begin with the text of the prompt, because the prompt would appear twice."""
    texts = [row.get("prompt"), *(row[side] for side in _SIDES)]
    if not all(isinstance(text, str) and text and not is_dialogue(text) for text in texts):
        return
    prompt, *sides = texts
    if all(side.startswith(prompt) for side in sides):
        raise DataError(
            f"{where}: expected answers without the prompt, found that chosen and rejected both begin with the text of "
            f"the prompt {prompt!r:.60}; remove the prompt from both"
        )


def _require_one_question(where: str, chosen: list[Message], rejected: list[Message]) -> None:
    """Reject sides whose first difference is not in an assistant turn."""
    for number, (one, other) in enumerate(zip_longest(chosen, rejected)):
        if one is None or other is None or _key(one) != _key(other):
            if one is None or other is None or not one["role"] == other["role"] == "assistant":
                raise DataError(
                    f"{where}: expected chosen and rejected to answer the same question, found that they differ in "
                    f"message {number}, {one!r:.60} and {other!r:.60}; correct or remove the example"
                )
            return


def _key(message: Message) -> Message:
    """Return the entries of a message to compare questions by, with whitespace around its text removed."""
    return {**_compared_entries(message), "content": message["content"].strip()}


def _compared_entries(message: Message) -> Message:
    return {name: message.get(name) for name in _COMPARED}
