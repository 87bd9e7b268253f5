r"""Reward for mathematical answers, compared as texts or, through math-verify, as expressions.

math-verify limits its time with SIGALRM, which works in the main thread only, and reports a timeout as "not equal".
This module turns these limits off. Only the deadline of the caller applies: a reward runs in a worker process that can
be killed. An answer that takes too long is then a reward error rather than a silent zero.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import re
from typing import Any

from rl_contracts.chat.reasoning import split_reasoning
from rl_contracts.errors import RewardError
from rl_rewards.answer_forms import MAX_CHARS, hashed_lines, leading_number, marked_answer, read_part, stated_answers
from rl_rewards.latex import canonical
from rl_rewards.texts import has_words, is_words, only_text, same_text, text_key

RELATIVE = 1e-3
"""Relative tolerance for numbers that are equal to six decimals; numbers of at least 0.001 always meet it."""
_PERCENT = re.compile(r"\\?%|\\text\s?\{\s?(?:percent(?:age)?|pct)\s?\}|\b(?:percent(?:age)?|pct)\b", re.IGNORECASE)
_UNIT = re.compile(
    r"(?:(?<=[0-9}])|(?<=\\pi))\s{1,3}(?:(?P<words>[A-Za-z]{3,20}(?:[\s/][A-Za-z]{1,20}){0,4})"
    r"|(?:[kc]?m|ft|mi)/(?:s|h|hr|min)(?:\^\{?2\}?)?|(?:[kcm]?m|ft|in|mi)\^\{?[23]\}?)$"
    r"|(?:(?<=\\circ)|(?<=\\circ\}))\s{0,3}[CF]$"
)
_CLAUSE = re.compile(r"[,;(]|\s(?:because|since|as)\s")
_FUNCTION = re.compile(r"(?<![\\A-Za-z])(sin|cos|tan|cot|sec|csc|ln|log)(?=[\s(])")


def math_reward_fn(
    prompt: str,
    completions: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    answer: str | int | float | None = None,
    final_text: str | None = None,
    **_: Any,
) -> float:
    r"""Return 1.0 if the answer in `completions` equals `answer`, as a text or as an expression, else 0.0.

    `rl_rewards.answer_forms` finds the answer. If it finds none, math-verify searches the last `MAX_CHARS` characters.
    `rl_rewards.texts` describes the comparison as texts. If only one side has a percent sign, the sign may mean `/100`
    or a unit. Comparing two expressions may take unbounded time, so run this function under a deadline.

    Args:
        prompt: ignored.
        completions: text of one completion.
        prompt_ids: ignored.
        completion_ids: ignored.
        answer: the gold answer: a solution with a marked answer, or a bare text, LaTeX or plain expression.
        final_text: the text after the reasoning; None to extract it from `completions`.

    Raises:
        RewardError: `answer` is missing, not finite, or neither a text nor an expression.
    """
    gold = gold_answer(answer)
    final = split_reasoning(completions)[1] if final_text is None else final_text
    text = read_part(final)
    candidate = marked_answer(text)
    if candidate is not None:
        return float(answers_equal(gold, candidate))
    hashed = hashed_lines(text)
    stated = hashed or stated_answers(text)
    if stated and (same_text(gold, stated[0]) or (is_words(gold) and same_text(gold, _CLAUSE.split(stated[0])[0]))):
        return 1.0
    for slot in stated:
        candidate = slot
        if has_words(_body(slot)):
            candidate = leading_number(slot) if hashed or text != final else ""
        if candidate and (only_text(gold, candidate) or _values(candidate)):
            return float(answers_equal(gold, candidate))
    search = not hashed and not is_words(gold)
    return float(search and _verify(_values(gold, percent_as_fraction=True), _search(text)))


def extract_expression(completion: str) -> str | None:
    """Return the answer that a completion marks or states, without markup, or None. Equal values may differ in form."""
    text = read_part(split_reasoning(completion)[1])
    marked = marked_answer(text)
    answer = next(iter(hashed_lines(text) or stated_answers(text)), "") if marked is None else marked
    return text_key(answer) or None


math_reward_fn.scores_gold = True  # type: ignore[attr-defined]
math_reward_fn.extract_answer = extract_expression  # type: ignore[attr-defined]


def gold_answer(answer: str | int | float | None) -> str:
    """Return the text of the gold answer.

    Raises:
        RewardError: the answer is missing, not finite, or neither a text nor an expression.
    """
    text = "" if answer is None else str(answer).strip()
    part = read_part(text)
    marked = marked_answer(part)
    gold = next(iter(hashed_lines(part) or stated_answers(part)), part) if marked is None else marked
    if not _is_gold(gold):
        shown = "no answer" if answer is None else repr(text[-80:])
        raise RewardError(
            f"expected `answer` to be a text or a finite mathematical expression, found {shown}; check the 'answer' of "
            "the example"
        )
    return gold


def _is_gold(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return math.isfinite(float(text))
    if is_words(text) or only_text(text, text):
        return True
    if values := _values(text):
        return not any(str(value) in ("nan", "zoo") for value in values)
    braces = text.replace(r"\{", "").replace(r"\}", "")
    return braces.count("{") == braces.count("}") and any(c.isalnum() for c in text)


def answers_equal(gold: str, candidate: str) -> bool:
    """Return whether two answers are equal as texts or as expressions. The comparison may take unbounded time."""
    if same_text(gold, candidate):
        return True
    if only_text(gold, candidate):
        return False
    differ = (_PERCENT.search(gold) is None) != (_PERCENT.search(candidate) is None)
    return _verify(_values(gold, percent_as_fraction=differ), _values(candidate, percent_as_fraction=differ))


def _verify(gold: list[Any], candidates: list[Any]) -> bool:
    """Return whether one of the gold values equals one of the candidates."""
    if not gold or not candidates:
        return False
    from math_verify import verify

    return any(
        verify(one, other, timeout_seconds=None) and _within_tolerance(one, other)
        for one in gold
        for other in candidates
    )


def _within_tolerance(gold_value: Any, candidate: Any) -> bool:
    """Return whether the numbers of two values are equal within the relative tolerance.

    Values of different forms have different counts of numbers, and are not compared here.
    """
    gold_numbers, candidate_numbers = _numbers(gold_value), _numbers(candidate)
    return len(gold_numbers) != len(candidate_numbers) or all(
        abs(a - b) <= RELATIVE * abs(a) for a, b in zip(gold_numbers, candidate_numbers, strict=True)
    )


def _numbers(value: Any) -> list[Any]:
    """Return the sorted real numbers of a number, set, interval, tuple or matrix, or of the right side of `x = ...`."""
    if getattr(value, "is_Relational", False) or type(value).__name__ == "And":
        return _numbers(value.rhs) if value.is_Relational and value.lhs.is_Symbol else []
    if hasattr(value, "as_coeff_Mul"):  # a number or a formula
        return [value.evalf()] if value.is_number and value.is_real else []
    parts = value.flat() if hasattr(value, "flat") else getattr(value, "args", ())
    return sorted(number for part in parts for number in _numbers(part))


def _body(text: str) -> str:
    """Return an expression in LaTeX, without percent signs, markup and units."""
    body = _PERCENT.sub("", canonical(text))
    body = re.sub(r"\\[()\[\]]|\\?[$\"]|\*\*", "", body).strip().rstrip(" \n.,;:")
    unit = _UNIT.search(body)
    return body[: unit.start()] if unit and (unit["words"] is None or has_words(unit["words"])) else body


def _values(text: str, percent_as_fraction: bool = False) -> list[Any]:
    """Return the parsed expression, without its percent sign, or [] if it cannot be parsed.

    Args:
        text: the expression.
        percent_as_fraction: whether to also return a percentage divided by 100.
    """
    body = _FUNCTION.sub(r"\\\1 ", _body(text))
    forms = [body, rf"\frac{{{body}}}{{100}}"] if percent_as_fraction and _PERCENT.search(text) else [body]
    return [value for form in forms for value in _parse(rf"$\boxed{{{form}}}$")]


def _search(text: str) -> list[Any]:
    return _parse(canonical(text[-MAX_CHARS:]))


@functools.lru_cache(maxsize=256)
def _parse(text: str) -> list[Any]:
    """Return the expressions in `text` that can be parsed; cached, because a group shares its gold answer."""
    # Importing sympy takes most of a second, and other rewards do not need it.
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    # math_verify warns once per process that its time limit is off, which is intended here.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    config = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    return list(parse(text, config, fallback_mode="no_fallback", parsing_timeout=None))
