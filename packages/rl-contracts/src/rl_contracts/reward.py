"""The contract of a reward function. `rl_contracts.reward_worker` runs plain ones in processes that can be killed."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Protocol


class RewardFunction(Protocol):
    """Scores one sample. Plain or async."""

    def __call__(
        self,
        prompt: str,
        completions: str,
        prompt_ids: list[int],
        completion_ids: list[int],
        **data: Any,
    ) -> float | Awaitable[float]:
        """Reward of one completion.

        Args:
            prompt: text of the prompt.
            completions: text of this one sample; the field's customary name.
            prompt_ids: token ids of the prompt.
            completion_ids: generated token ids.
            **data: the data row's other entries, for example `answer`.

        Raises:
            RewardError: the reward cannot be computed. Never return 0 for that.
        """
