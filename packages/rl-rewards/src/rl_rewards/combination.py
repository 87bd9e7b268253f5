"""A weighted sum of reward functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from rl_contracts import registry
from rl_contracts.errors import ConfigError
from rl_contracts.reward import CompositeReward, takes_final_text


class WeightedReward:
    """The sum of weight times reward over its parts, itself a reward function.

    A part of the sum has the given name, or that of its function or class; the second of a name is `NAME#2`.
    """

    def __init__(self, parts: Iterable[tuple[str | Callable[..., Any], float]]) -> None:
        """Take (reward function, weight) pairs; a function may be given by its name or dotted path.

        Raises:
            ConfigError: there are no parts, a name is unknown, or a part is asynchronous.
        """
        given = list(parts)
        self.parts = [(_resolve(part), float(weight)) for part, weight in given]
        if not self.parts:
            raise ConfigError("weighted reward: expected at least one (reward, weight) pair, found none")
        names = [_name(part) for part, _ in given]
        repeats = [names[:index].count(name) for index, name in enumerate(names)]
        self.names = [f"{name}#{repeat + 1}" if repeat else name for name, repeat in zip(names, repeats, strict=True)]

    def __call__(
        self, prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
    ) -> CompositeReward:
        """Return the weighted sum for one sample; an error of a part is an error of the whole."""
        given = prompt, completions, prompt_ids, completion_ids
        rest = {name: value for name, value in data.items() if name != "final_text"}
        values = (weight * part(*given, **(data if takes_final_text(part) else rest)) for part, weight in self.parts)
        return CompositeReward(**dict(zip(self.names, values, strict=True)))


def _name(part: str | Callable[..., Any]) -> str:
    return part if isinstance(part, str) else getattr(part, "__name__", type(part).__name__)


def _resolve(part: str | Callable[..., Any]) -> Callable[..., float]:
    fn = registry.load("rl.rewards", part) if isinstance(part, str) else part
    if inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None)):  # noqa: B004
        raise ConfigError(
            f"weighted reward: expected plain functions, found the asynchronous {part!r}; "
            f"write an async reward function that awaits its parts"
        )
    return fn
