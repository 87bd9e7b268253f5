"""Preference pairs in the form of Anthropic's HH-RLHF (Bai et al., arXiv 2204.05862), or any set of pairs like it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_contracts.errors import ConfigError, DataError
from rl_datasets.columns import Record, missing, require_known
from rl_datasets.files import read_records
from rl_datasets.rows import Rows, require_form

_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


class HHRLHF(Rows[dict[str, Any]]):
    """The pairs of one split, in the order of the file: `{"prompt_id": row index, "chosen": messages, "rejected":
    messages}`.

    A side is either one text with turns marked `\\n\\nHuman:` and `\\n\\nAssistant:`, as in HH-RLHF, or a list of
    messages `{"role", "content"}`; with a `prompt` (text or messages) beside them, the sides may be the answers alone.
    """

    def __init__(
        self,
        path: str | Path = "Anthropic/hh-rlhf",
        split: str = "train",
        form: str = "pairs",
        seed: int = 0,
        columns: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        """Read and check all rows.

        Args:
            path: hub id, directory or file; see `rl_datasets.files.read_records`.
            split: `train` or `test`.
            form: `pairs`.
            seed: part of every data set's signature; nothing is generated.
            columns: `chosen`, `rejected` and `prompt` to what they are called in the file.

        Raises:
            ConfigError: another form, an unknown column, or an option (there are none).
            DataError: nothing can be read there, a row lacks a side, a side does not end with an assistant turn, or
                both are the same.
        """
        require_form("hh-rlhf", form, ("pairs",))
        if options:
            raise ConfigError(f"hh-rlhf data: expected no options, found {', '.join(sorted(options))}")
        require_known("hh-rlhf", columns, ("chosen", "rejected", "prompt"))
        records = read_records(path, split, columns=columns)
        super().__init__([_pair(index, record) for index, record in enumerate(records)])
        if not self._items:
            raise DataError(f"{path}: expected pairs in the split {split!r}, found none")

    def _row(self, index: int, item: dict[str, Any]) -> dict[str, Any]:
        return {**item, **{side: [dict(message) for message in item[side]] for side in ("chosen", "rejected")}}


def _pair(index: int, record: Record) -> dict[str, Any]:
    where, row = record
    prompt = _messages(row["prompt"], f"{where}: prompt", "user") if row.get("prompt") else []
    sides: dict[str, list[dict[str, str]]] = {}
    for side in ("chosen", "rejected"):
        if side not in row:
            raise missing(where, row, side)
        if not row[side]:
            raise DataError(f"{where}: expected text or messages in {side!r}, found {row[side]!r}; complete the row")
        sides[side] = prompt + _messages(row[side], f"{where}: {side}", "assistant")
        if sides[side][-1]["role"] != "assistant" or not sides[side][-1]["content"].strip():
            raise DataError(f"{where}: expected {side!r} to end with an assistant turn, found {row[side]!r:.60}")
    if sides["chosen"] == sides["rejected"]:
        raise DataError(f"{where}: chosen and rejected are the same; there is nothing to prefer. Remove the row")
    return {"prompt_id": index, **sides}


def _messages(value: Any, where: str, role: str) -> list[dict[str, str]]:
    """Messages of a side; plain text without marks is one turn of `role`."""
    if isinstance(value, str):
        return parse_dialogue(value) or [{"role": role, "content": value}]
    if isinstance(value, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value):
        return [{"role": str(m["role"]), "content": str(m["content"])} for m in value]
    raise DataError(f"{where}: expected text or a list of messages with role and content, found {value!r:.60}")


def parse_dialogue(text: str) -> list[dict[str, str]]:
    """The turns of a text marked `\\n\\nHuman:` and `\\n\\nAssistant:`; none if it has no marks.

    Turns that follow each other with the same role are joined by a blank line, as chat templates ask for alternation.
    """
    parts = _TURN.split(text if text.startswith("\n\n") else f"\n\n{text}")
    turns: list[dict[str, str]] = []
    for mark, content in zip(parts[1::2], parts[2::2], strict=True):
        role = _ROLES[mark]
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] = f"{turns[-1]['content']}\n\n{content.strip()}".strip()
        else:
            turns.append({"role": role, "content": content.strip()})
    return turns
