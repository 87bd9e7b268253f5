r"""Rewards for questions about images: counts in brackets (`[3]`), and geometry in boxes (`\boxed{2\sqrt{221}}`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from rl_contracts.chat.reasoning import split_reasoning
from rl_rewards.answer_forms import MAX_CHARS
from rl_rewards.extraction import boxed_answer
from rl_rewards.gsm8k import gold_number
from rl_rewards.numbers import parse_number
from rl_rewards.symbolic import answers_equal, gold_answer
from rl_rewards.texts import choice, text_key

_BRACKETS = re.compile(r"(?<!\\)(?<!\\sqrt)\[((?:[^\[\]]|(?<=\\sqrt)\[[^\[\]]*+\])*+)(?<!\\)\]")
r"""Innermost brackets, also around `\sqrt[3]{5}`. LaTeX display math, `\[5\]`, is not in brackets."""


def clevr_count_70k_reward_fn(
    prompt: str,
    completions: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    answer: str | int | float | Fraction | None = None,
    final_text: str | None = None,
    **_: Any,
) -> float:
    """Return 1.0 if the last bracketed number in `completions` equals `answer`, else 0.0.

    Numbers are compared by value: `[3]`, `[ 3.0 ]` and `[03]` are equal. Brackets with other content, such as the
    coordinates `[12, 40, 58, 90]`, are skipped.

    Args:
        prompt: ignored.
        completions: text of one completion.
        prompt_ids: ignored.
        completion_ids: ignored.
        answer: the gold count.
        final_text: the text after the reasoning; None to extract it from `completions`.

    Raises:
        RewardError: `answer` is missing or is not a number.
    """
    gold = gold_number(answer)
    return float(_bracketed_number(split_reasoning(completions)[1] if final_text is None else final_text) == gold)


def _bracketed_number(text: str) -> Fraction | None:
    """Return the last number in brackets, or None."""
    numbers = (parse_number(content) for content in reversed(_BRACKETS.findall(text)))
    return next((number for number in numbers if number is not None), None)


def extract_count(completion: str) -> str | None:
    """Return the last bracketed number of a completion, or None."""
    number = _bracketed_number(split_reasoning(completion)[1])
    return None if number is None else str(number)


clevr_count_70k_reward_fn.extract_answer = extract_count  # type: ignore[attr-defined]


def geometry3k_reward_fn(
    prompt: str,
    completions: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    answer: str | int | float | None = None,
    choices: Sequence[Any] | None = None,
    final_text: str | None = None,
    **_: Any,
) -> float:
    r"""Return 1.0 if the answer in the last `\boxed{...}` of `completions` equals `answer`, else 0.0.

    If there is no box, the last brackets `[...]` count. Answers are compared as in `math_reward_fn`, which may take
    unbounded time, so run this function under a deadline.

    Args:
        prompt: text of the prompt, to determine whether it lists `choices`.
        completions: text of one completion.
        prompt_ids: ignored.
        completion_ids: ignored.
        answer: the gold answer, as for `math_reward_fn`.
        choices: the answers from which to choose. If the prompt lists all of them, the letter of a choice counts as
            that choice. Otherwise a letter is a guess, which would be right in a quarter of the cases.
        final_text: the text after the reasoning; None to extract it from `completions`.

    Raises:
        RewardError: `answer` is missing, not finite, or neither a text nor an expression.
    """
    gold = gold_answer(answer)
    final = split_reasoning(completions)[1] if final_text is None else final_text
    candidate = _boxed_or_bracketed(final)[-MAX_CHARS:]
    listed = [str(each) for each in choices or ()]
    forms = [candidate, *(_chosen(candidate, listed) if all(text in prompt for text in listed) else ())]
    return float(any(answers_equal(gold, form) for form in forms))


def extract_boxed(completion: str) -> str | None:
    """Return the content of the last box of a completion, or else of the last brackets, without markup, or None."""
    return text_key(_boxed_or_bracketed(split_reasoning(completion)[1])[-MAX_CHARS:]) or None


geometry3k_reward_fn.extract_answer = extract_boxed  # type: ignore[attr-defined]


def _boxed_or_bracketed(text: str) -> str:
    """Return the content of the last box, else of the last brackets, else ""."""
    boxed, _ = boxed_answer(text)
    return next(reversed(_BRACKETS.findall(text)), "") if boxed is None else boxed


def _chosen(answer: str, choices: list[str]) -> list[str]:
    """Return the choice that an answer names by its letter, as a list; empty if it names none."""
    letter = choice(answer)
    index = len(choices) if letter is None else ord(letter) - ord("A")
    return choices[index : index + 1]
