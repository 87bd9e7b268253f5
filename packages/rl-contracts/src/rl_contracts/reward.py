"""Contract of a reward function.

`rl_contracts.reward_worker` runs synchronous reward functions in processes that can be killed.
"""

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
    """Return the maximum duration of a call in this reward worker, in seconds, or None outside a worker."""
    return _time_limit


def set_time_limit(seconds: float) -> None:
    """Set the result of `time_limit`. A new reward worker calls this before it imports its function."""
    global _time_limit
    _time_limit = seconds


class CompositeReward(float):
    """Sum of named rewards that keeps its components, such as `CompositeReward(right=1.0, format=0.5)`.

    An advantage such as `algorithm.advantage.kind=gdpo` treats the components separately.
    """

    components: dict[str, float]
    """Rewards by name."""

    def __new__(cls, /, **components: float) -> CompositeReward:
        reward = super().__new__(cls, sum(components.values()))
        reward.components = {name: float(value) for name, value in components.items()}
        return reward

    def __mul__(self, factor: float) -> CompositeReward:
        return CompositeReward(**{name: value * factor for name, value in self.components.items()})

    __rmul__ = __mul__


def components_of(reward: float) -> dict[str, float]:
    """Return the named components of a reward; empty for a plain number."""
    return reward.components if isinstance(reward, CompositeReward) else {}


MAX_REWARD = (2 - 2.0**-23) * 2.0**127
"""Largest finite float32; batches store rewards in float32."""


def is_valid_reward(reward: Any) -> bool:
    """Return whether a reward, and each component of a `CompositeReward`, is finite in float32."""
    values = (reward, *components_of(reward).values())
    return all(abs(value) <= MAX_REWARD and math.isfinite(value) for value in values)


class RewardFunction(Protocol):
    """Function that scores one completion, synchronous or asynchronous.

    The attribute `scores_gold = True` promises that the text of an example's `answer` has the reward 1. Commands check
    this for all examples before a run.

    The attribute `extract_answer` is a function `(completion) -> answer`: the text of the answer that a completion
    gives, or None. Equal answers should have equal texts. Evaluation uses it for the majority vote of `maj@k`.
    """

    def __call__(
        self,
        prompt: str,
        completions: str,
        prompt_ids: list[int],
        completion_ids: list[int],
        **data: Any,
    ) -> float | Awaitable[float]:
        """Return the reward of one completion.

        It is a number, or a `CompositeReward` with the same names for all completions.

        Args:
            prompt: text of the prompt.
            completions: text of this single completion; the plural is the customary name of the argument.
            prompt_ids: token ids of the prompt.
            completion_ids: generated token ids.
            **data: other entries of the example, for example `answer`, and `final_text`: the text after the reasoning,
                empty if the reasoning does not end. A function without an argument `final_text` does not get it.

        Raises:
            RewardError: the reward cannot be computed. Do not return 0 in this case.
        """


def takes_final_text(function: Callable[..., Any]) -> bool:
    """Return whether a reward function accepts the keyword argument `final_text`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a built-in function
        return False
    return any(p.kind is p.VAR_KEYWORD or p.name == "final_text" for p in parameters)


RESERVED_KEYS = frozenset(
    ("messages", "prompt_id", "epoch", "prompt", "completions", "prompt_ids", "completion_ids", "final_text")
)
"""Keys of an example that a reward function does not get, or gets in another form."""
