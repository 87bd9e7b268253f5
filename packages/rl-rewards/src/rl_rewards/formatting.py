"""Rewards for the form of a completion, whatever its answer."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from rl_contracts.errors import ConfigError
from rl_rewards.numbers import parse_number


@dataclass(frozen=True)
class FormatRewardConfig:
    """What a well-formed completion looks like."""

    pattern: str | None = None
    """A regular expression (flags inline, `(?s)...`) that the whole completion must match, white space around it
    apart; None: it ends with a line `#### n`, n a number, gives no other answer, and says nothing after it."""
    reward: float = 1.0
    """Given to a well-formed completion."""
    penalty: float = 0.0
    """Given to any other."""

    def __post_init__(self) -> None:
        if self.reward <= self.penalty:
            raise ConfigError(
                f"format reward: expected reward > penalty, found reward={self.reward}, penalty={self.penalty}; "
                f"a form that is not rewarded would be taught away"
            )
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise ConfigError(
                f"format reward: pattern {self.pattern!r} is no regular expression: {error}; "
                f"escape the characters that stand for themselves"
            ) from error


@dataclass(frozen=True)
class FormatReward:
    """A reward function of the completion's form alone.

    A pattern of the user's may take exponential time on an adverse completion; run it, like any reward, under a
    deadline.
    """

    config: FormatRewardConfig = field(default_factory=FormatRewardConfig)
    """What is rewarded, and by how much."""

    def __call__(
        self, prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **_: Any
    ) -> float:
        """The configured reward or penalty; only `completions`, the text of one sample, is read."""
        pattern = self.config.pattern
        text = completions.strip()
        good = _ends_with_answer(text) if pattern is None else re.fullmatch(pattern, text) is not None
        return self.config.reward if good else self.config.penalty


format_reward_fn = FormatReward()
"""1.0 for a completion that ends with its only line `#### n`, else 0.0."""


def _ends_with_answer(text: str) -> bool:
    before, hashes, answer = text.partition("####")
    own_line = not before or before.endswith("\n")
    return bool(hashes) and own_line and "\n" not in answer and parse_number(answer) is not None
