r"""Exact reading of numbers as people and models write them.

Supported: signs, thousands separators (`1,234`, `1 234`, `1'234`), decimals, scientific notation, fractions (`3/4`) and
mixed numbers (`1 3/4`), with a currency symbol before, or a percent sign, unit or magnitude (`1.5 million`) after.
A comma is a separator between groups of three digits and otherwise ends a number: the decimal comma is not supported.
A percent sign is a unit: `50%` is 50. Times and ratios (`3:30`) are not numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from rl_rewards.markup import plain

MAX_NUMBER_CHARS = 64
"""Maximum length of a number in characters; rejecting longer ones bounds the arithmetic."""

_MAGNITUDES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}

_CURRENCY = r"[$€£¥₹₩₽₦]"
# A number neither continues a word or a number (`x2`, `H2O`) nor a version or a time (`1.2.3`, `3:30`).
_START = r"(?<![0-9A-Za-z_])(?<![0-9][.:])"
# Quantifiers are possessive: a run of digits is never split or tried again, so a search is linear in the text.
_UNSIGNED = (
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3}(?![0-9]))++|[0-9]++)(?:\.[0-9]++)?+(?:[eE][-+]?[0-9]{1,3}(?![0-9A-Za-z]))?+"
    r"|(?<!\.)\.[0-9]++)"
)
_NUMBER = re.compile(
    rf"(?P<sign>(?<![0-9A-Za-z_)\]%])[-+])?(?:{_CURRENCY}\s?){{0,3}}+(?P<inner_sign>[-+])?(?:{_CURRENCY}\s?)?+"
    rf"{_START}(?:"
    rf"(?:(?P<whole>[0-9]{{1,12}})(?:\s{{1,2}}|\sand\s)(?=[0-9.,]{{1,32}}/[0-9]))?"
    rf"(?P<top>{_UNSIGNED})\s?/\s?{_CURRENCY}?(?P<bottom>{_UNSIGNED})"
    rf"|(?P<plain>{_UNSIGNED})"
    r")(?![.:][0-9])"
    rf"(?:\s{{0,2}}(?P<magnitude>{'|'.join(_MAGNITUDES)})\b)?",
    re.IGNORECASE,
)
_AROUND_A_NUMBER = " \t\n.,;!?$€£¥()[]*\"'%°"


@dataclass(frozen=True, slots=True)
class WrittenNumber:
    """Number in a text."""

    value: Fraction
    """Number without its magnitude: 3/2 for `1.5 million`."""
    magnitude: int
    """Power of ten written as a word, else 1: 1000000 for `1.5 million`."""
    start: int
    """Start position in the searched text."""
    end: int
    """End position in the searched text, exclusive."""

    def equals(self, gold: Fraction) -> bool:
        """Return whether the number equals `gold` exactly, with or without its magnitude.

        `2 million` equals 2000000, and also 2, because the question may ask for millions.
        """
        return self.value == gold or self.value * self.magnitude == gold


def find_numbers(text: str) -> Iterator[WrittenNumber]:
    """Return all numbers in `text`, from left to right. `text` must be a result of `plain`."""
    return filter(None, map(_read, _NUMBER.finditer(text)))


def last_number(text: str) -> WrittenNumber | None:
    """Return the last number in `text`, or None. `text` must be a result of `plain`."""
    return next(filter(None, map(_read, reversed(list(_NUMBER.finditer(text))))), None)


def parse_number(text: str) -> Fraction | None:
    """Return the value of a text that is one number, also with markup (`$1,234.50`, `\\frac{3}{4}`), else None."""
    if len(text) > 4 * MAX_NUMBER_CHARS:
        return None
    cleaned = plain(text)
    numbers = list(find_numbers(cleaned))
    if len(numbers) != 1:
        return None
    number = numbers[0]
    if cleaned[: number.start].strip(_AROUND_A_NUMBER) or cleaned[number.end :].strip(_AROUND_A_NUMBER):
        return None
    return number.value * number.magnitude


def _read(match: re.Match[str]) -> WrittenNumber | None:
    if match.end() - match.start() > MAX_NUMBER_CHARS:
        return None
    value, start = _unsigned_value(match), match.start()
    if value is None:
        return None
    if (match["sign"] == "-") != (match["inner_sign"] == "-"):
        value = -value
    magnitude = _MAGNITUDES[match["magnitude"].lower()] if match["magnitude"] else 1
    return WrittenNumber(value, magnitude, start, match.end())


def _unsigned_value(match: re.Match[str]) -> Fraction | None:
    if match["plain"]:
        return _fraction(match["plain"])
    top, bottom = _fraction(match["top"]), _fraction(match["bottom"])
    if bottom == 0:
        return None
    if match["whole"] and top < bottom:
        return _fraction(match["whole"]) + top / bottom
    return top / bottom


def _fraction(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))
