"""A reward that records a figure of its own."""

from __future__ import annotations

from typing import Any

from rl_contracts.errors import RewardError
from rl_contracts.runtime.metrics import record


def vowels_reward_fn(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
) -> float:
    """The share of the answer's characters that are among the wanted letters (`answer`).

    Raises:
        RewardError: the row does not say which letters are wanted.
    """
    wanted = data.get("answer")
    if not wanted:
        raise RewardError("vowels: expected the wanted letters as `answer`, found none.")
    found = sum(character in wanted for character in completions)
    record("vowels/any", float(found > 0))
    return found / len(completions) if completions else 0.0
