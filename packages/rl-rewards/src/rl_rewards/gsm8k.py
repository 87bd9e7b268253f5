"""Reward for GSM8K: 1.0 if the answer of the completion equals the gold answer exactly."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from rl_contracts.chat.reasoning import split_reasoning
from rl_contracts.errors import RewardError
from rl_rewards.extraction import find_answer
from rl_rewards.numbers import parse_number


def gsm8k_reward_fn(
    prompt: str,
    completions: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    answer: str | int | float | Fraction | None = None,
    final_text: str | None = None,
    **_: Any,
) -> float:
    r"""Return 1.0 if the answer in `completions` equals `answer`, else 0.0.

    `rl_rewards.extraction` finds the answer, and `rl_rewards.numbers` reads its number. Numbers are compared as
    fractions: 18, 18.00, $18 and 36/2 are equal, 0.33 and 1/3 are not.

    Args:
        prompt: ignored.
        completions: text of one completion.
        prompt_ids: ignored.
        completion_ids: ignored.
        answer: the gold answer: a worked answer that ends with `#### 72`, or a bare number.
        final_text: the text after the reasoning; None to extract it from `completions`.

    Raises:
        RewardError: `answer` is missing or is not a number. A reward of zero would hide this error in the data.
    """
    gold = gold_number(answer)
    number = find_answer(split_reasoning(completions)[1] if final_text is None else final_text)
    return float(number is not None and number.equals(gold))


def extract_number(completion: str) -> str | None:
    """Return the number that a completion gives as its answer, in its shortest form, or None."""
    number = find_answer(split_reasoning(completion)[1])
    return None if number is None else str(number.value * number.magnitude)


gsm8k_reward_fn.scores_gold = True  # type: ignore[attr-defined]
gsm8k_reward_fn.extract_answer = extract_number  # type: ignore[attr-defined]


def gold_number(answer: str | int | float | Fraction | None) -> Fraction:
    """Return the number of a gold answer.

    Raises:
        RewardError: the answer is missing or is not a number.
    """
    if isinstance(answer, str):
        value = parse_number(answer.rpartition("####")[2])
        if value is not None:
            return value
    elif isinstance(answer, float) and math.isfinite(answer):
        return Fraction(repr(answer))  # the decimal as written, not its binary approximation
    elif isinstance(answer, int | Fraction) and not isinstance(answer, bool):
        return Fraction(answer)
    raise RewardError(
        f"expected `answer` to be a worked answer that ends with '#### 72' or a bare number, "
        f"found {_shortened(answer)}; check the 'answer' of the example, or set data.columns.answer=NAME if its column "
        "has another name"
    )


def _shortened(answer: object) -> str:
    if answer is None:
        return "no answer"
    text = repr(answer)
    return text if len(text) <= 80 else f"{text[:30]} ... {text[-45:]}"
