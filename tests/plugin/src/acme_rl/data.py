"""A data set whose prompts ask for vowels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_contracts.config import require, require_choice


class Letters(Sequence[dict[str, Any]]):
    """Prompts that ask for a number of vowels.

    Args:
        split: `train` or `test`.
        form: must be `rl`; the data set has no reference solutions.
        seed: number in the first prompt.
        rows: number of examples.
    """

    def __init__(self, split: str = "train", form: str = "rl", seed: int = 0, rows: int = 64) -> None:
        require_choice("data form of letters", form, ("rl",))
        require(rows >= 1, "data.options.rows", "at least 1", rows)
        self._first, self._rows = seed + (split == "test") * 10_000, rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._rows:
            raise IndexError(index)
        question = f"Write vowels, {self._first + index} of them."
        return {"prompt_id": index, "messages": [{"role": "user", "content": question}], "answer": "aeiouAEIOU"}
