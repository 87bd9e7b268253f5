"""The contract of a reward function. `rl_contracts.reward_worker` runs plain ones in processes that can be killed."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

__all__ = [
    "MAX_REWARD",
    "RESERVED_KEYS",
    "CompositeReward",
    "RewardFunction",
    "components_of",
    "is_valid_reward",
    "set_time_limit",
    "takes_final_text",
    "time_limit",
]

_time_limit: float | None = None


def time_limit() -> float | None:
    """Return the seconds that a call may take in this reward worker, or None outside of a worker."""
    return _time_limit


def set_time_limit(seconds: float) -> None:
    """Set the result of `time_limit`, in a new reward worker before it imports its function."""
    global _time_limit
    _time_limit = seconds


class CompositeReward(float):
    """The sum of named rewards, such as `CompositeReward(right=1.0, format=0.5)`: a number that keeps them, for an
    advantage that treats them separately (`algorithm.advantage.kind=gdpo`)."""

    components: dict[str, float]

    def __new__(cls, /, **components: float) -> CompositeReward:
        reward = super().__new__(cls, sum(components.values()))
        reward.components = {name: float(value) for name, value in components.items()}
        return reward

    def __mul__(self, factor: float) -> CompositeReward:
        return CompositeReward(**{name: value * factor for name, value in self.components.items()})

    __rmul__ = __mul__


def components_of(reward: float) -> dict[str, float]:
    """The named rewards that a reward is the sum of; none of a plain number."""
    return reward.components if isinstance(reward, CompositeReward) else {}


MAX_REWARD = (2 - 2.0**-23) * 2.0**127
"""Largest number of float32, in which batches hold rewards."""


def is_valid_reward(reward: Any) -> bool:
    """Whether a number, and each of its parts if it is a `CompositeReward`, is finite in float32."""
    values = (reward, *components_of(reward).values())
    return all(abs(value) <= MAX_REWARD and math.isfinite(value) for value in values)


class RewardFunction(Protocol):
    """Scores one sample. Plain or async.

    A function with the attribute `scores_gold`, True, gives the text of a row's `answer` the reward 1: commands try
    this on all rows before a run.
    """

    def __call__(
        self,
        prompt: str,
        completions: str,
        prompt_ids: list[int],
        completion_ids: list[int],
        **data: Any,
    ) -> float | Awaitable[float]:
        """Reward of one completion: a number, or a `CompositeReward`, with the same names for every completion.

        Args:
            prompt: text of the prompt.
            completions: text of this one sample; the field's customary name.
            prompt_ids: token ids of the prompt.
            completion_ids: generated token ids.
            **data: the data row's other entries, for example `answer`, and `final_text`: what follows the completion's
                reasoning, empty where that does not end. A function without such an argument is called without it.

        Raises:
            RewardError: the reward cannot be computed. Never return 0 for that.
        """


def takes_final_text(function: Callable[..., Any]) -> bool:
    """Whether a reward function is to be given the keyword `final_text`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a built-in function
        return False
    return any(p.kind is p.VAR_KEYWORD or p.name == "final_text" for p in parameters)


RESERVED_KEYS = frozenset(
    ("messages", "prompt_id", "epoch", "prompt", "completions", "prompt_ids", "completion_ids", "final_text")
)
"""Keys of a data row that a reward function gets in another form, or not at all."""
