r"""Conversion of LaTeX, Markdown and typographic characters around numbers to plain text.

`plain` never changes the value of a number. It converts the many notations of numbers (`1{,}234`, `\frac{3}{4}`, `−5`,
`1½`, `1.5 \times 10^6`) to the few that `rl_rewards.numbers` reads. Every expression here takes time linear in the
text.
"""

from __future__ import annotations

# ruff: noqa: RUF001 (look-alike characters are this file's subject)
import re
import unicodedata
from collections.abc import Callable

_VULGAR = "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"

_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("−–‐‑﹣－", "-"),
        **{chr(0xFF10 + d): str(d) for d in range(10)},  # full-width digits
        **{c: unicodedata.normalize("NFKC", c).replace("⁄", "/") for c in _VULGAR},
        "—": " ",  # an em dash separates; it is never a sign
        "⁄": "/",
        "∕": "/",
        "，": ",",
        "．": ".",
        "：": ":",
        "＝": "=",
        "＄": "$",
        "％": "%",
        "\u200b": "",
        "\ufeff": "",
    }
)


def _fraction(match: re.Match[str]) -> str:
    top, bottom = (part.strip(" {}") for part in match.groups())
    return f"{top}/{bottom}"


# Repetitions are bounded, so that no input makes an expression scan the rest of the text repeatedly.
_BEFORE_FRACTION = re.compile(rf"(?<=[0-9])[ ]{{0,2}}(?=[{_VULGAR}]|\\[dtc]?frac)")
_PART = r"(\{[ ]{0,2}[-+]?[0-9.,]{1,32}[ ]{0,2}\}|[0-9])"
_STEPS: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"\\\\"), "\n"),
    (re.compile(r"\\([$%#&_])"), r"\1"),
    (re.compile(r"\{,\}|,\\!"), ","),
    # \frac{3}{4} and \dfrac34 become 3/4
    (re.compile(rf"\\[dtc]?frac[ ]{{0,2}}{_PART}[ ]{{0,2}}{_PART}"), _fraction),
    (re.compile(r"(?<=[0-9])[ ]?(?:\\times|×|\*|x)[ ]?10[ ]?\^[ ]?\{?(-?[0-9]{1,3})\}?"), r"e\1"),
    (re.compile(r"\^[ ]?\{?[ ]?\\circ[ ]?\}?"), " "),
    # thin spaces between groups of three digits are thousands separators
    (re.compile(r"(?<=[0-9])(?:\\[,;:]|[\u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9]))"), ","),
    # ... and so are spaces and apostrophes, starting with the first group
    (
        re.compile(r"(?<![0-9A-Za-z.,_^/:])(?<![0-9] )[1-9][0-9]{0,2}(?:[ '’][0-9]{3}(?![0-9])){1,5}(?![ ]?/)"),
        lambda match: re.sub(r"[ '’]", ",", match.group()),
    ),
    (re.compile(r"\\[,;:!()\[\] ]|[\u00a0\u2009\u202f~]"), " "),
    # commands that only display their argument, and commands without a value
    (
        re.compile(
            r"\\(?:boxed|fbox|[hm]box|text[a-z]{0,8}|math[a-z]{1,8}|operatorname|bm|left|right|big|Big"
            r"|displaystyle|quad|qquad|pounds|euro|yen)(?![a-zA-Z])"
        ),
        " ",
    ),
    (re.compile(r"\*\*|__|`|[{}]"), " "),
]


def plain(text: str) -> str:
    """Return `text` without LaTeX, Markdown and typographic characters; its numbers keep their values and order."""
    text = _BEFORE_FRACTION.sub(" ", text).translate(_CHARACTERS)
    for pattern, replacement in _STEPS:
        text = pattern.sub(replacement, text)
    return text
