"""GSM8K (Cobbe et al., arXiv 2110.14168), or any set of questions and worked answers of its form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_contracts.errors import DataError
from rl_datasets.columns import QUESTION, Record, missing, require_known
from rl_datasets.conversations import reject_row_weight
from rl_datasets.files import read_records
from rl_datasets.questions import read_question, reject_unread
from rl_datasets.rows import Rows, read_options, require_form
from rl_datasets.texts import FileOptions, checked, require_finite
from rl_datasets.tools import read_tools

FORMS = ("rl", "sft")


@dataclass(frozen=True)
class GSM8KOptions(FileOptions):
    """What may be set beyond path, split and form."""

    subset: str = "main"
    """Configuration name on the hub, and the folder of that name in a local copy of the hub's repository."""
    instruction: str = ""
    """Appended to each question after a blank line, for example how to end the answer."""


class GSM8K(Rows[dict[str, Any]]):
    """The rows of one split, in the order of the file.

    RL form: `{"prompt_id": row index, "messages": [the question], "answer": worked answer}`. SFT form:
    `{"prompt_id": row index, "messages": [the question, the worked answer]}`. The worked answers keep their
    calculator marks (`<<48/2=24>>`) and end with `#### n`. Columns `system`, `history` and `input` belong to the
    question (see `rl_datasets.questions.read_question`), and `tools` is an entry of the row.
    """

    reads_files = True

    def __init__(
        self,
        path: str | Path = "openai/gsm8k",
        split: str = "train",
        form: str = "rl",
        seed: int = 0,
        columns: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        """Read and check all rows.

        Args:
            path: hub id, directory or file; see `rl_datasets.files.read_records`.
            split: `train` or `test`.
            form: `rl` or `sft`.
            seed: part of every data set's signature; this one generates nothing. The loader shuffles.
            columns: `question`, `answer`, `system`, `history`, `input`, `tools` to their names in the file.
            **options: fields of `GSM8KOptions`.

        Raises:
            ConfigError: an unknown form, column or option.
            DataError: nothing can be read there, or a row lacks its question or answer.
        """
        require_form("gsm8k", form, FORMS)
        self.form = form
        self._options = read_options(GSM8KOptions, "gsm8k", options)
        require_known("gsm8k", columns, ("question", "answer", *QUESTION))
        records = read_records(path, split, self._options.subset, columns)
        super().__init__([checked(record[0], _question_and_answer(record), self._options) for record in records])
        if not self._items:
            raise DataError(f"{path}: expected rows in the split {split!r}, found none; is its file empty?")

    def _row(self, index: int, item: dict[str, Any]) -> dict[str, Any]:
        messages = [dict(message) for message in item["messages"]]
        if self._options.instruction:
            messages[-1]["content"] += f"\n\n{self._options.instruction}"
        row = {"prompt_id": index, **item, "messages": messages}
        if self.form == "sft":
            messages.append({"role": "assistant", "content": row.pop("answer")})
        return row


def _question_and_answer(record: Record) -> dict[str, Any]:
    where, row = record
    for key in ("question", "answer"):
        if key not in row:
            raise missing(where, row, key)
        text = row[key]
        require_finite(where, text)
        if isinstance(text, bool) or not isinstance(text, str | int | float) or not str(text).strip():
            raise DataError(f"{where}: expected text in the column {key!r}, found {text!r:.60}; complete or remove it")
    reject_row_weight(where, row)
    messages = read_question(record, "question", str(row["question"]))
    reject_unread(record, "question", messages)
    return {"messages": messages, "answer": str(row["answer"]), **read_tools(record)}
