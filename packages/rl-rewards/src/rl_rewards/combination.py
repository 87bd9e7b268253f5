"""Weighted sum of reward functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from rl_contracts import registry
from rl_contracts.errors import ConfigError
from rl_contracts.reward import CompositeReward, takes_final_text


class WeightedReward:
    """Reward function that returns the weighted sum of its components.

    A component is named after the registered name or path, or after its function or class. The second component of
    the same name is `NAME#2`.
    """

    def __init__(self, rewards: Iterable[tuple[str | Callable[..., Any], float]]) -> None:
        """Resolve the (reward function, weight) pairs; a name or dotted path may stand for a function.

        Raises:
            ConfigError: there are no pairs, a name is unknown, or a function is asynchronous.
        """
        pairs = list(rewards)
        self.rewards = [(_resolve(reward), float(weight)) for reward, weight in pairs]
        if not self.rewards:
            raise ConfigError("weighted reward: expected at least one (reward, weight) pair, found none")
        names = [_name(reward) for reward, _ in pairs]
        repeats = [names[:index].count(name) for index, name in enumerate(names)]
        self.names = [f"{name}#{repeat + 1}" if repeat else name for name, repeat in zip(names, repeats, strict=True)]

    def __call__(
        self, prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
    ) -> CompositeReward:
        """Return the weighted sum for one completion; an error of a component is not caught."""
        arguments = prompt, completions, prompt_ids, completion_ids
        rest = {name: value for name, value in data.items() if name != "final_text"}
        values = (
            weight * part(*arguments, **(data if takes_final_text(part) else rest)) for part, weight in self.rewards
        )
        return CompositeReward(**dict(zip(self.names, values, strict=True)))


def is_async(reward: Callable[..., Any]) -> bool:
    """Return whether a reward is an asynchronous function, or an object with an asynchronous `__call__`."""
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(getattr(reward, "__call__", None))  # noqa: B004


def _name(part: str | Callable[..., Any]) -> str:
    return part if isinstance(part, str) else getattr(part, "__name__", type(part).__name__)


def _resolve(part: str | Callable[..., Any]) -> Callable[..., float]:
    fn = registry.load("rl.rewards", part) if isinstance(part, str) else part
    if is_async(fn):
        raise ConfigError(
            f"weighted reward: expected plain functions, found the asynchronous {part!r}; "
            f"write an async reward function that awaits its components"
        )
    return fn
