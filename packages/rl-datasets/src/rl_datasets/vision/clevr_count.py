"""Data set clevr_count_70k: scenes of CLEVR (Johnson et al., arXiv 1612.06890) with the question how many objects."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from rl_datasets.vision.chat import VisionChat, require_answer

_SYSTEM = (
    "Look at the image and count the objects that the question asks for. You may explain your count. End your reply "
    "with the count in square brackets, as digits without any words, for example [4]."
)
_DIFFERENT = re.compile(r"\bdifferent\s+", re.IGNORECASE)


class ClevrCount70K(VisionChat):
    """Questions about the number of objects in an image, from the columns `images`, `problem` and `answer`.

    The word "different" is removed from the question ("How many different items are there in the image?"), because the
    gold answer counts all objects, also equal ones. Images are scaled to at most 336 * 336 pixels. In RL form the
    system message asks for the number in square brackets. In SFT form there is none, because the assistant's turn is
    the number alone.
    """

    _name = "clevr_count_70k"
    _default_path = "BUAADreamer/clevr_count_70k"
    _default_options: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "rl": {"system": _SYSTEM, "max_pixels": 336 * 336},
        "sft": {"max_pixels": 336 * 336},
    }

    def _edited(self, where: str, row: dict[str, Any]) -> dict[str, Any]:
        row = require_answer(where, row)
        return {**row, "problem": _DIFFERENT.sub("", row["problem"])} if isinstance(row.get("problem"), str) else row

    def gold_completion(self, row: dict[str, Any]) -> str:
        """Return the gold answer of an example in square brackets."""
        return f"[{row['answer']}]"
