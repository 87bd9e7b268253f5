"""Drawn scenes in which each question is about the image of another example."""

import random
from typing import Any

from rl_datasets import DrawnScenes


class ShuffledScenes(DrawnScenes):
    """Drawn scenes whose images are shuffled among the examples."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.image_of = random.Random(0).sample(range(len(self)), len(self))
        """Index of the scene that an example shows."""

    def _row(self, index: int, scene: Any) -> dict[str, Any]:
        row, other = super()._row(index, scene), super()._row(0, self.scenes[self.image_of[index]])
        return {**row, "messages": other["messages"]}
