"""Adapters for reward functions of TRL's trainers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rl_contracts.errors import RewardError
from rl_rewards.adapters.examples import Messages, completion_text, convert, example_of, name_of, prompt_text
from rl_rewards.combination import is_async

__all__ = ["for_trl", "from_trl"]


def for_trl(reward: Callable[..., float | Awaitable[float]]) -> Callable[..., Any]:
    """Return a function for `reward_funcs` of TRL's trainers, such as `GRPOTrainer`.

    It accepts plain and conversational data sets. The columns of the data set are the example; the last message of the
    model is the completion. An error of the reward ends the training.

    Args:
        reward: a `RewardFunction`. The result is asynchronous if it is.
    """

    def calls(
        prompts: Sequence[Messages],
        completions: Sequence[Messages],
        completion_ids: Sequence[list[int]] | None = None,
        **columns: Any,
    ) -> list[Any]:
        """Call the reward for each completion. TRL also passes objects that are no column and therefore no list."""
        lists = {name: values for name, values in columns.items() if isinstance(values, list)}
        ids = completion_ids or [[] for _ in completions]
        return [
            reward(
                prompt_text(prompt),
                completion_text(completion),
                [],
                ids[index],
                **example_of({name: values[index] for name, values in lists.items()}),
            )
            for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
        ]

    def score(**batch: Any) -> list[float]:
        return [float(value) for value in calls(**batch)]

    async def score_async(**batch: Any) -> list[float]:
        return [float(value) for value in await asyncio.gather(*calls(**batch))]

    function = score_async if is_async(reward) else score
    function.__name__ = name_of(reward)
    return function


def from_trl(function: Callable[..., Any], conversational: bool = True) -> Callable[..., float | Awaitable[float]]:
    """Return a `RewardFunction` that calls a reward function of TRL.

    The function gets a batch of one completion, and the example as columns.

    Args:
        function: plain or asynchronous reward function, such as `trl.rewards.accuracy_reward`.
        conversational: whether the function expects messages, as TRL's own rewards do, instead of plain texts.

    Raises:
        RewardError: from the reward, if the function returns None because it does not apply to the example.
    """

    def score(
        prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
    ) -> float | Awaitable[float]:
        prompts: list[Any] = [[{"role": "user", "content": prompt}]] if conversational else [prompt]
        replies: list[Any] = [[{"role": "assistant", "content": completions}]] if conversational else [completions]
        columns = {name: [value] for name, value in example_of(data).items()}
        values = function(prompts=prompts, completions=replies, completion_ids=[completion_ids], **columns)
        return convert(values, only_value)

    def only_value(values: Sequence[float | None]) -> float:
        [value] = values
        if value is None:
            raise RewardError(
                f"{name_of(function)}: returned None, which means that it does not apply to this example; remove the "
                "example, or correct its gold answer."
            )
        return float(value)

    score.__name__ = name_of(function)
    return score
