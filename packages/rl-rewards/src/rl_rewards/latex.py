r"""Conversion of mathematical text to the LaTeX that math-verify parses.

`canonical` converts Unicode characters (`½`, `√3`, `x²`, `π`, digits of any script) to LaTeX, numbers with separators
(`12\,500`), a trailing point (`42.`) or an exponent (`1.5e3`) to plain numbers, and repeating decimals to fractions.
"""

from __future__ import annotations

# ruff: noqa: RUF001 (look-alike characters are this file's subject)
import re
import unicodedata
from collections.abc import Callable

_GREEK = {chr(code): unicodedata.name(chr(code)).split()[-1].lower() for code in range(0x3B1, 0x3CA) if code != 0x3C2}
_COMMANDS = _GREEK | {
    "∞": "infty",
    "×": "times",
    "·": "cdot",
    "⋅": "cdot",
    "÷": "div",
    "±": "pm",
    "≤": "leq",
    "⩽": "leq",
    "≥": "geq",
    "⩾": "geq",
    "≠": "neq",
    "≈": "approx",
    "∪": "cup",
    "∩": "cap",
    "∈": "in",
    "∅": "emptyset",
    "∠": "angle",
}
_CHARACTERS = str.maketrans(
    {character: rf"\{command} " for character, command in _COMMANDS.items()}
    | dict.fromkeys("−–‐‑﹣", "-")
    | dict.fromkeys("\u00a0\u2009\u202f\u2007", r"\,")
    | dict.fromkeys("\u200b\ufeff", "")
    | dict.fromkeys("⁄∕", "/")
    | {"°": r"^\circ ", "’": "'", "⟨": "(", "⟩": ")"}
    # full-width forms of ASCII
    | {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
)
_RAISED, _LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "₀₁₂₃₄₅₆₇₈₉₊₋ₙ"
_LEVEL = str.maketrans(_RAISED + _LOWERED, "0123456789+-n" * 2)
_VULGAR = "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"


def _vulgar(match: re.Match[str]) -> str:
    top, bottom = unicodedata.normalize("NFKC", match.group()).split("⁄")
    return rf"\frac{{{top}}}{{{bottom}}}"


def _repeating(match: re.Match[str]) -> str:
    """Return a repeating decimal as a fraction: 0.1666... is (16 - 1) / 90."""
    whole, fixed, period = match.groups()
    top = int(whole + fixed + period) - int(whole + fixed)
    return rf"\frac{{{top}}}{{{'9' * len(period)}{'0' * len(fixed)}}}"


def _without_separators(match: re.Match[str]) -> str:
    return re.sub(r"[^0-9]", "", match.group())


# Bounded repetitions keep every search linear in the text.
_SPACE = r"(?:\\[,;:! ]| )"
_STEPS: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"(?<!\\)\\(?:[,;: ]|q?quad(?![A-Za-z]))|~"), " "),
    (re.compile(rf"[{_RAISED}]{{1,20}}"), lambda m: f"^{{{m.group().translate(_LEVEL)}}}"),
    (re.compile(rf"[{_LOWERED}]{{1,20}}"), lambda m: f"_{{{m.group().translate(_LEVEL)}}}"),
    (re.compile(rf"[{_VULGAR}]"), _vulgar),
    (re.compile(r"√\s?\(([^()]{1,200})\)|√\s?([0-9]{1,32}|[A-Za-z])"), lambda m: rf"\sqrt{{{m[1] or m[2]}}}"),
    (re.compile(r"∛\s?\(([^()]{1,200})\)|∛\s?([0-9]{1,32}|[A-Za-z])"), lambda m: rf"\sqrt[3]{{{m[1] or m[2]}}}"),
    (re.compile(r"\\mathrm\{([ei])\}"), r"\1"),
    (re.compile(r"\s?(?:\^\s?\{\s?\\circ\s?\}|(?:\\degree|\^\s?\\circ)(?![A-Za-z]))"), r"^\\circ "),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset "),
    (re.compile(r"\\langle(?![A-Za-z])"), "("),
    (re.compile(r"\\rangle(?![A-Za-z])"), ")"),
    (re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])"), r"\\pi "),
    (re.compile(r"(?<=[0-9A-Za-z)])\*\*(?=[0-9A-Za-z({-])"), "^"),
    (re.compile(r"\\\$|[€£¥₹]|(?<![A-Za-z])US(?=\$)"), ""),
    # 12\,500, 12 500, 12'500 and 1{,}234
    (
        re.compile(
            rf"(?<![0-9A-Za-z.,_^/])[1-9][0-9]{{0,2}}(?:(?:{_SPACE}|'|\{{,\}}|,\\!)[0-9]{{3}}(?![0-9])){{1,5}}(?!\s?/)"
        ),
        _without_separators,
    ),
    # 0.123\,456
    (re.compile(rf"(?<=\.)[0-9]{{3}}(?:{_SPACE}[0-9]{{1,3}}(?![0-9/])){{1,9}}"), _without_separators),
    # 1 1/2 and 1\ 1/2
    (
        re.compile(rf"(?<![0-9A-Za-z.,_^/])([0-9]{{1,9}}){_SPACE}{{1,3}}([0-9]{{1,9}})/([0-9]{{1,9}})(?![0-9./])"),
        r"\1\\frac{\2}{\3}",
    ),
    (re.compile(r"(?<![0-9.])([0-9]{1,9})\.([0-9]{0,9})\\overline\s?\{([0-9]{1,9})\}"), _repeating),
    (re.compile(r"(?<=[0-9])\.(?![0-9.\\])"), ""),
    (re.compile(r"(?<=[0-9])[eE]([-+]?[0-9]{1,3})(?![0-9A-Za-z.])"), r"\\cdot 10^{\1}"),
]


def canonical(text: str) -> str:
    """Return `text` with its numbers, operators and Greek letters in LaTeX. Prose does not change."""
    text = "".join(map(_ascii_digit, text.translate(_CHARACTERS))) if not text.isascii() else text
    for pattern, replacement in _STEPS:
        text = pattern.sub(replacement, text)
    return text


def _ascii_digit(character: str) -> str:
    return str(unicodedata.decimal(character)) if character.isdecimal() else character
