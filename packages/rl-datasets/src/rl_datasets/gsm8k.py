"""Data set GSM8K (Cobbe et al., arXiv 2110.14168), or any questions with worked answers in its format."""

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
    """Options of `gsm8k` in addition to path, split and form."""

    subset: str = "main"
    """Configuration name on the hub, and the folder of that name in a local copy of the hub's repository."""
    instruction: str = ""
    """Text to append to each question after a blank line, for example the required form of the answer."""


class GSM8K(Rows[dict[str, Any]]):
    """Examples of one split, in the order of the file.

    RL form: `{"prompt_id": index, "messages": [the question], "answer": worked answer}`. SFT form:
    `{"prompt_id": index, "messages": [the question, the worked answer]}`. The worked answers keep their calculator
    marks (`<<48/2=24>>`) and end with `#### n`. Columns `system`, `history` and `input` belong to the question (see
    `rl_datasets.questions.read_question`), and `tools` is an entry of the example.
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
        """Read and check all examples.

        Args:
            path: hub id, directory or file; see `rl_datasets.files.read_records`.
            split: `train` or `test`.
            form: `rl` or `sft`.
            seed: ignored, because nothing is generated; every data set accepts it. The loader shuffles.
            columns: map from `question`, `answer`, `system`, `history`, `input` and `tools` to columns of the file.
            **options: fields of `GSM8KOptions`.

        Raises:
            ConfigError: `form`, a column or an option is unknown.
            DataError: the data cannot be read, or a record lacks its question or answer.
        """
        require_form("gsm8k", form, FORMS)
        self.form = form
        self._options = read_options(GSM8KOptions, "gsm8k", options)
        require_known("gsm8k", columns, ("question", "answer", *QUESTION))
        records = read_records(path, split, self._options.subset, columns)
        super().__init__([checked(record[0], _question_and_answer(record), self._options) for record in records])
        if not self._items:
            raise DataError(
                f"{path}: expected examples in the split {split!r}, found none; check whether its file is empty"
            )

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
