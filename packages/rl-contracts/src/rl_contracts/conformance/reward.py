"""Conformance suite for reward functions. Subclass `RewardConformance` and set `target`, `right` and `wrong`."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from rl_contracts.errors import RewardError
from rl_contracts.registry import load
from rl_contracts.reward_worker import AsyncRewardWrapper

__all__ = ["RewardConformance"]


class RewardConformance:
    """Tests of the `RewardFunction` contract."""

    target: ClassVar[str | Callable[..., Any]]
    """Name in the entry-point group `rl.rewards`, dotted path, or the function itself."""
    right: ClassVar[list[tuple[str, dict[str, Any]]]]
    """Pairs of completion and example that get the full reward. Include every format of the gold answer."""
    wrong: ClassVar[list[tuple[str, dict[str, Any]]]]
    """Pairs of completion and example that get less than the full reward."""
    full_reward: ClassVar[float] = 1.0
    """Reward of the completions in `right`."""
    gold_key: ClassVar[str | None] = "answer"
    """Field of an example that must hold the gold answer, or None if the reward needs no gold answer."""

    def score(self, completion: str, data: dict[str, Any]) -> float:
        """Return the reward of one completion."""
        function = load("rl.rewards", self.target) if isinstance(self.target, str) else self.target
        value = function("the question", completion, [1, 2], [3, 4], **data)
        if inspect.isawaitable(value):

            async def wait() -> Any:
                return await value

            value = asyncio.run(wait())
        return value

    def test_reward_right_completions_get_full_reward_and_wrong_ones_less(self) -> None:
        assert self.right
        assert self.wrong
        for completion, data in self.right:
            assert self.score(completion, data) == self.full_reward, (completion, data)
        for completion, data in self.wrong:
            assert self.score(completion, data) < self.full_reward, (completion, data)

    def test_reward_of_unusual_completions_is_a_finite_float(self) -> None:
        unusual = [
            "",
            " ",
            "\n" * 50,
            "####",
            "\\boxed{",
            "1" * 5000,
            "\x00\ud800",
            "{" * 500,
            "答案是 \uff14\uff12",
            "a" * 100_000,
        ]
        for completion, data in [*self.right, *self.wrong, *((text, self.right[0][1]) for text in unusual)]:
            value = self.score(completion, data)

            assert isinstance(value, float), (completion[:80], value)
            assert math.isfinite(value), (completion[:80], value)

    def test_reward_is_deterministic_and_does_not_modify_the_example(self) -> None:
        for completion, data in [*self.right, *self.wrong]:
            before = json.dumps(data)

            assert self.score(completion, data) == self.score(completion, data)
            assert json.dumps(data) == before

    def test_reward_accepts_unrelated_example_fields(self) -> None:
        completion, data = self.right[0]

        assert self.score(completion, {**data, "unrelated_entry": [1, {"a": None}]}) == self.full_reward

    def test_reward_missing_gold_answer_raises(self) -> None:
        if self.gold_key is None:
            pytest.skip("this reward needs no gold answer")
        completion, data = self.right[0]

        for missing in ({self.gold_key: None}, {self.gold_key: ""}):
            with pytest.raises(RewardError):
                self.score(completion, {**data, **missing})
        with pytest.raises((RewardError, TypeError)):
            self.score(completion, {k: v for k, v in data.items() if k != self.gold_key})

    @pytest.mark.asyncio
    async def test_reward_in_worker_process_equals_direct_call(self) -> None:
        samples = [*self.right, *self.wrong]
        async with AsyncRewardWrapper(self.target) as wrapper:
            rewards = await asyncio.gather(*(wrapper("the question", c, [1, 2], [3, 4], **d) for c, d in samples))

        expected = await asyncio.to_thread(lambda: [self.score(c, d) for c, d in samples])
        assert rewards == expected
