"""Data set Geometry3K (Lu et al., arXiv 2105.04165): problems of plane geometry with a diagram."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rl_datasets.vision.chat import VisionChat, require_answer

_SYSTEM = (
    "Solve the geometry problem with the help of the diagram. First write your reasoning between <think> and </think>. "
    "After it, write the final answer inside \\boxed{}."
)


class Geometry3K(VisionChat):
    """Problems with a diagram, from the columns `images`, `problem` and `answer`.

    Images are scaled to at most 448 * 448 pixels in RL form, 512 * 512 in SFT form. In RL form the system message asks
    for reasoning in <think> tags and the final answer in `\\boxed{}`. In SFT form there is none, because the
    turn of the assistant is the answer alone. A reward gets all other columns, such as `choices` and `ground_truth`.
    """

    _name = "geometry3k"
    _default_path = "hiyouga/geometry3k"
    _default_options: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "rl": {"system": _SYSTEM, "max_pixels": 448 * 448},
        "sft": {"max_pixels": 512 * 512},
    }
    _reward_columns = ("choices",)

    def _edited(self, where: str, row: dict[str, Any]) -> dict[str, Any]:
        return require_answer(where, row)

    def gold_completion(self, row: dict[str, Any]) -> str:
        """Return the gold answer of an example in a box."""
        return f"\\boxed{{{row['answer']}}}"
