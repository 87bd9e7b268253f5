"""A reward that records a metric."""

from __future__ import annotations

from typing import Any

from rl_contracts.errors import RewardError
from rl_contracts.runtime.metrics import record


def vowels_reward_fn(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
) -> float:
    """Return the fraction of characters in the completion that are among the letters in `answer`.

    Raises:
        RewardError: the example has no `answer`.
    """
    letters = data.get("answer")
    if not letters:
        raise RewardError("vowels: expected letters in the field `answer`, found none.")
    matches = sum(character in letters for character in completions)
    record("vowels/any", float(matches > 0))
    return matches / len(completions) if completions else 0.0
