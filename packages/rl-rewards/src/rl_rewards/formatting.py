"""Rewards for the form of a completion, regardless of its answer."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from rl_contracts.errors import ConfigError
from rl_rewards.numbers import parse_number


@dataclass(frozen=True)
class FormatRewardConfig:
    """Settings of `FormatReward`: the form of a well-formed completion, and the rewards."""

    pattern: str | None = None
    """Regular expression (inline flags, `(?s)...`) that the whole completion must match, without whitespace around it.
    If None, the completion must end with its only line `#### n`, where n is a number."""
    reward: float = 1.0
    """Reward of a well-formed completion."""
    penalty: float = 0.0
    """Reward of any other completion, below `reward`."""

    def __post_init__(self) -> None:
        if self.reward <= self.penalty:
            raise ConfigError(
                f"format reward: expected reward > penalty, found reward={self.reward}, penalty={self.penalty}; "
                f"otherwise training discourages the required form"
            )
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise ConfigError(
                f"format reward: pattern {self.pattern!r} is not a regular expression: {error}; "
                f"escape literal special characters"
            ) from error


@dataclass(frozen=True)
class FormatReward:
    """Reward function that depends only on the form of the completion.

    A custom pattern may take exponential time on an adversarial completion; run it, like any reward, under a deadline.
    """

    config: FormatRewardConfig = field(default_factory=FormatRewardConfig)
    """Required form, reward and penalty."""

    def __call__(
        self, prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **_: Any
    ) -> float:
        """Return the configured reward or penalty; only `completions`, the text of one completion, is used."""
        pattern = self.config.pattern
        text = completions.strip()
        good = _ends_with_answer(text) if pattern is None else re.fullmatch(pattern, text) is not None
        return self.config.reward if good else self.config.penalty


format_reward_fn = FormatReward()
"""Reward 1.0 for a completion that ends with its only line `#### n`, else 0.0."""


def _ends_with_answer(text: str) -> bool:
    before, hashes, answer = text.partition("####")
    own_line = not before or before.endswith("\n")
    return bool(hashes) and own_line and "\n" not in answer and parse_number(answer) is not None
