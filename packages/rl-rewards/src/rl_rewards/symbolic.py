r"""The reward for mathematical answers, equal as texts or, through math-verify, as expressions.

math-verify limits its own time with SIGALRM, which works in the main thread only, and turns a time-out into "not
equal". Here its limits are off: the caller's deadline (a reward runs in a worker process that can be killed) is the
only one, and an answer that takes too long is a reward error rather than a silent zero.
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
from rl_rewards.latex import canonical
from rl_rewards.places import MAX_CHARS, hashed_lines, leading_number, marked_answer, read_part, stated_answers
from rl_rewards.texts import has_words, is_words, only_text, same_text

RELATIVE = 1e-3
"""Tolerance of numbers that are equal to six decimals: those of 0.001 and more always meet it."""
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
    r"""1.0 if the answer that `completions` gives is equal to `answer`, as a text or as mathematics, else 0.0.

    `rl_rewards.places` lists the places of an answer. If none has one, math-verify searches the last `MAX_CHARS`
    characters. `rl_rewards.texts` describes the comparison as texts. A percent sign on one side only counts as `/100`
    or as a unit. Comparing two expressions may take unbounded time: run this function under a deadline.

    Args:
        prompt: not read.
        completions: the text of one sample.
        prompt_ids: not read.
        completion_ids: not read.
        answer: the gold answer: a solution with a marked answer, or a bare text, LaTeX or plain expression.
        final_text: what follows the reasoning of the sample; None: found in `completions`.

    Raises:
        RewardError: `answer` is missing, not finite, or neither a text nor an expression.
    """
    gold = _gold(answer)
    final = split_reasoning(completions)[1] if final_text is None else final_text
    text = read_part(final)
    given = marked_answer(text)
    if given is not None:
        return float(_equal(gold, given))
    hashed = hashed_lines(text)
    stated = hashed or stated_answers(text)
    if stated and (same_text(gold, stated[0]) or (is_words(gold) and same_text(gold, _CLAUSE.split(stated[0])[0]))):
        return 1.0
    for slot in stated:
        given = slot
        if has_words(_body(slot)):
            given = leading_number(slot) if hashed or text != final else ""
        if given and (only_text(gold, given) or _values(given)):
            return float(_equal(gold, given))
    search = not hashed and not is_words(gold)
    return float(search and _verify(_values(gold, percent_as_fraction=True), _search(text)))


math_reward_fn.scores_gold = True  # type: ignore[attr-defined]


def _gold(answer: str | int | float | None) -> str:
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
            f"expected `answer` to be a text or a finite mathematical expression, found {shown}; check the data row's "
            "'answer'"
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


def _equal(gold: str, given: str) -> bool:
    if same_text(gold, given):
        return True
    if only_text(gold, given):
        return False
    differ = (_PERCENT.search(gold) is None) != (_PERCENT.search(given) is None)
    return _verify(_values(gold, percent_as_fraction=differ), _values(given, percent_as_fraction=differ))


def _verify(gold: list[Any], given: list[Any]) -> bool:
    """Whether one of the gold values equals one of the given ones."""
    if not gold or not given:
        return False
    from math_verify import verify

    return any(verify(one, other, timeout_seconds=None) and _near(one, other) for one in gold for other in given)


def _near(one: Any, other: Any) -> bool:
    """Whether the numbers of two values that are equal to six decimals differ by a small part of them."""
    left, right = _numbers(one), _numbers(other)
    # as many for values of the same form
    return len(left) != len(right) or all(abs(a - b) <= RELATIVE * abs(a) for a, b in zip(left, right, strict=True))


def _numbers(value: Any) -> list[Any]:
    """Return the sorted real numbers of a number, set, interval, tuple or matrix, or of the right side of `x = ...`."""
    if getattr(value, "is_Relational", False) or type(value).__name__ == "And":
        return _numbers(value.rhs) if value.is_Relational and value.lhs.is_Symbol else []
    if hasattr(value, "as_coeff_Mul"):  # a number or a formula
        return [value.evalf()] if value.is_number and value.is_real else []
    parts = value.flat() if hasattr(value, "flat") else getattr(value, "args", ())
    return sorted(number for part in parts for number in _numbers(part))


def _body(text: str) -> str:
    """Return an expression in LaTeX, without percent signs, markup and unit."""
    body = _PERCENT.sub("", canonical(text))
    body = re.sub(r"\\[()\[\]]|\\?[$\"]|\*\*", "", body).strip().rstrip(" \n.,;:")
    unit = _UNIT.search(body)
    return body[: unit.start()] if unit and (unit["words"] is None or has_words(unit["words"])) else body


def _values(text: str, percent_as_fraction: bool = False) -> list[Any]:
    """Return the parsed expression, without its percent sign, or [] if it cannot be parsed.

    Args:
        text: the expression.
        percent_as_fraction: append a percentage divided by 100.
    """
    body = _FUNCTION.sub(r"\\\1 ", _body(text))
    forms = [body, rf"\frac{{{body}}}{{100}}"] if percent_as_fraction and _PERCENT.search(text) else [body]
    return [value for form in forms for value in _parse(rf"$\boxed{{{form}}}$")]


def _search(text: str) -> list[Any]:
    return _parse(canonical(text[-MAX_CHARS:]))


@functools.lru_cache(maxsize=256)
def _parse(text: str) -> list[Any]:
    """Expressions found in `text`; empty if there is none that can be read. Completions of a group share a gold."""
    # imported here: sympy takes most of a second, and rewards of other kinds do not need it
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    # it warns, once per process, that its time limit is off; that is what is wanted here
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    config = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    return list(parse(text, config, fallback_mode="no_fallback", parsing_timeout=None))
