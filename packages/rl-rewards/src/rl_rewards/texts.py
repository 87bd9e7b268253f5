r"""Comparison of answers as texts.

A symbolic parser reads a word as a product of its letters, `12:00` as a division by zero and `1001_2` as 1001.
Therefore two answers with the same text are equal without parsing. Words, times of day, dates, ratios and numerals with
a base are compared only as texts.
"""

from __future__ import annotations

import re

from rl_rewards.latex import canonical

_NOT_WORD = re.compile(
    "and|or|(?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|log|ln|lg|exp|max|min|sup|lim|gcd|lcm|det|mod|deg|dim|ker|arg|sqrt|inf"
    "(?:ini)?(?:ty)?|[abcdxyz]*"
)
_WRAPPER = re.compile(
    r"\\(?:text[a-z]{0,8}|math(?:rm|bf|it|sf)|operatorname\*?|[mh]box|emph|underline)\s{0,2}\{([^{}]*)\}"
)
_SPACING = re.compile(r"\\(?:[,;:! ]|q?quad(?![A-Za-z]))")
_DELIMITER = re.compile(r"\\(?:left|right|displaystyle|bigl?|bigr)(?![A-Za-z])|\\[()\[\]]|\$|\*\*|`")
_AND = re.compile(r",?\s{1,2}(?:and|or)\s{1,2}")
_SCRIPT = re.compile(r"([\^_])\{([^{}\\])\}")
_CLOCK = re.compile(r"(?:[01]?[0-9]|2[0-4]):[0-5][0-9](?::[0-5][0-9])?(?:[ap]\.?m)?", re.IGNORECASE)
_RATIO = re.compile(r"[0-9.]{1,9}(?::[0-9.]{1,9}){1,9}")
_BASED = re.compile(r"[0-9]_\{?[0-9]")
_DATE = re.compile(r"[0-9]{1,4}/[0-9]{1,2}/[0-9]{2,4}")
_CHOICE = re.compile(
    r"\s*(?:(?:[Oo]ption|[Cc]hoice)\s)?(?:\(([A-J])\)(?=\s*$|\s?[.:,;]|\s+\w)|\(([a-j])\)(?=\s*$|[.:])"
    r"|([A-J])(?=\s*$|\s?[.:,;)]|\s(?:because|since|as|is\scorrect)\b))(?!\)?\s*(?:[,;&]|and|or)\s*(?:and\s|or\s)?\(?[A-J]\b)"
)


def same_text(gold: str, candidate: str) -> bool:
    """Return whether two answers have the same text or choice letter.

    The comparison ignores the case of words, LaTeX markup, and spaces that are not between digits.
    """
    letter = choice(gold)
    return text_key(gold) == text_key(candidate) or (letter is not None and letter == choice(candidate))


def only_text(gold: str, candidate: str) -> bool:
    """Return whether two answers can only be equal as texts: words, times, dates, ratios, numerals with a base."""
    if is_words(gold) or is_words(candidate):
        return True
    named_time = _is_named_time(gold)
    gold, candidate = text_key(gold), text_key(candidate)
    if any(pattern.search(gold) or pattern.search(candidate) for pattern in (_BASED, _DATE)):
        return True
    if ":" in gold and ":" in candidate:
        return named_time or _CLOCK.fullmatch(gold) is not None
    if _RATIO.fullmatch(gold) or _RATIO.fullmatch(candidate):  # may equal a fraction, but not a decimal or an integer
        return not any(mark in gold + candidate for mark in ("/", r"\frac"))
    return False


def is_words(text: str) -> bool:
    """Return whether an answer consists of words, not of variables and functions."""
    text = without_markup(text)
    return all(c.isalpha() or c.isspace() or c in "'.,;!?-" for c in text) and any(map(_is_word, _runs(text)))


def has_words(text: str) -> bool:
    r"""Return whether a text has words outside of `\text{...}`."""
    return any(map(_is_word, _runs(re.sub(r"\\[A-Za-z]+", " ", _WRAPPER.sub(" ", text)))))


def choice(text: str) -> str | None:
    r"""Return the letter of a choice such as `C`, `(c)`, `C. 12 m` or `\textbf{(C)}\ 12`, or None."""
    match = _CHOICE.match(without_markup(text).rstrip())
    return "".join(filter(None, match.groups())).upper() if match else None


def without_markup(text: str) -> str:
    """Return a text converted by `canonical`, without text commands, delimiters and spacing commands."""
    text = canonical(text)
    for _ in range(3):  # \textbf{\text{...}}
        text = _WRAPPER.sub(r"\1", text)
    return _DELIMITER.sub("", _SPACING.sub(" ", text))


def _is_named_time(text: str) -> bool:
    """Return whether a text has a time of day and words: `12:00 noon`."""
    text = without_markup(text)
    return re.search(r"[0-9]:[0-9]", text) is not None and not set(text) & set("=_^\\") and has_words(text)


def text_key(text: str) -> str:
    """Return the form of an answer in which `same_text` compares it."""
    folded = text.casefold() if is_words(text) or _is_named_time(text) else text
    text = re.sub(r"(?<!\d) | (?!\d)", "", " ".join(_AND.sub(",", without_markup(folded)).split()))
    text = re.sub(r"\\[dtc]frac", r"\\frac", _SCRIPT.sub(r"\1\2", text))
    if _CLOCK.fullmatch(text.rstrip(".")):
        text = text.casefold().replace(".", "").lstrip("0")
    return text.rstrip(".,;")


def _runs(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+", text)


def _is_word(run: str) -> bool:
    """Return whether letters form a word rather than a product of variables (`xy`, `abc`, `mgh`).

    A product has at most three letters and no e, i, o or u, or consists only of the letters `abcdxyz`.
    """
    run = run.casefold()
    if not run.isascii():
        return len(run) > 1 or ord(run) > 0x2E80
    if len(run) < 2 or _NOT_WORD.fullmatch(run):
        return False
    return len(run) > 3 or bool(set(run) & set("eiou")) or (len(run) == 3 and "a" in run)
