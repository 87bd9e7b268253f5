"""The GSM8K reward: 1.0 where the completion's answer is the gold answer, exactly."""

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
    r"""1.0 if the answer that `completions` gives equals `answer`, else 0.0.

    `rl_rewards.extraction` says where the answer is looked for, `rl_rewards.numbers` how it is read. Numbers are
    compared as fractions: 18, 18.00, $18 and 36/2 are equal, 0.33 and 1/3 are not.

    Args:
        prompt: not read.
        completions: the text of one sample.
        prompt_ids: not read.
        completion_ids: not read.
        answer: the gold answer: a worked answer that ends with `#### 72`, or a bare number.
        final_text: what follows the reasoning of the sample; None: found in `completions`.

    Raises:
        RewardError: `answer` is missing or is no number. A reward of zero would hide that from whoever trains.
    """
    gold = gold_number(answer)
    number = find_answer(split_reasoning(completions)[1] if final_text is None else final_text)
    return float(number is not None and number.equals(gold))


gsm8k_reward_fn.scores_gold = True  # type: ignore[attr-defined]


def gold_number(answer: str | int | float | Fraction | None) -> Fraction:
    """The number that a gold answer stands for.

    Raises:
        RewardError: it is missing or is no number.
    """
    if isinstance(answer, str):
        value = parse_number(answer.rpartition("####")[2])
        if value is not None:
            return value
    elif isinstance(answer, float) and math.isfinite(answer):
        return Fraction(repr(answer))  # the decimal that was written, not its binary neighbour
    elif isinstance(answer, int | Fraction) and not isinstance(answer, bool):
        return Fraction(answer)
    raise RewardError(
        f"expected `answer` to be a worked answer that ends with '#### 72' or a bare number, "
        f"found {_shown(answer)}; check the data row's 'answer' (commands: data.columns.answer=NAME, if it is called "
        "otherwise)"
    )


def _shown(answer: object) -> str:
    if answer is None:
        return "no answer"
    text = repr(answer)
    return text if len(text) <= 80 else f"{text[:30]} ... {text[-45:]}"
