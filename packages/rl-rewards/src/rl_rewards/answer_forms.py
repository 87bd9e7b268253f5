r"""Search for a mathematical answer in a completion, in this order.

1. the last non-empty `<answer>...</answer>`; the other forms are then searched inside it
2. the last `\boxed{...}`, joined with the boxes before it that belong to the same answer; or, after that box, the
   closing sentences of Minerva's prompt: "The final answer is ... I hope it is correct." The second sentence may be
   missing if the first is at the end of the text and its answer has no prose
3. the first two lines after the last `####`, without a label such as "Answer:"
4. a statement ("the answer is ...", "Answer: ...", "the correct option is ...", "C is correct"), or a text without
   prose
"""

from __future__ import annotations

# ruff: noqa: RUF001 (models write full-width punctuation)
import re

from rl_rewards.extraction import LABEL, STATEMENT, boxed_answer, line_after, number_at_start, tagged_answer
from rl_rewards.markup import plain
from rl_rewards.texts import has_words

MAX_CHARS = 2_000
"""Number of characters of a marked answer that are read, from its end."""

_MINERVA = re.compile(
    r"final answer is:?((?:(?!final answer is).){1,400}?)\.?\s{0,3}(I hope it is correct|\Z)", re.IGNORECASE | re.DOTALL
)
_STATEMENT = re.compile(
    rf"{STATEMENT}|{LABEL}|答案(?:是|为)?\s?[:：]?"
    r"|(?<=\()(?=[A-J]\)\*{0,2}\sis\s(?:the\s)?correct)|\b(?=[A-J]\*{0,2}\sis\s(?:the\s)?correct)",
    re.IGNORECASE | re.MULTILINE,
)
_SENTENCE_END = re.compile(r"\.(?=\s|$)|。|(?<=[A-J])\)?\*{0,2}\sis\s(?:the\s)?correct")
_EMPHASIS = re.compile(r"^[\s*_\"'`]+|(?<!\^)[\s*_\"`]+$")
_SHORT, _SEARCHED = 400, 20_000
"""Maximum length of a text that can be an answer as a whole, and length of the end searched for statements."""


def read_part(text: str) -> str:
    """Return the content of the last non-empty `<answer>` element, or the whole text."""
    return tagged_answer(text) or text


def marked_answer(text: str) -> str | None:
    """Return the answer in a box or in Minerva's closing sentence.

    The result is "" if the last box is empty or unterminated, and None if no answer is marked.
    """
    boxed, end = boxed_answer(text)
    sentences = [match[1] for match in _MINERVA.finditer(text, end) if match[2] or not has_words(match[1])]
    if sentences:
        return sentences[-1]
    return boxed if boxed is None else boxed[-MAX_CHARS:]


def hashed_lines(text: str) -> list[str]:
    """Return the first two lines after the last `####` that have text besides a label. Their labels are removed."""
    _, hashes, after = text.rpartition("####")
    lines = [line[:MAX_CHARS] for line in after[: 2 * MAX_CHARS].split("\n")] if hashes else []
    slots = [_EMPHASIS.sub("", line[max([0, *(m.end() for m in _STATEMENT.finditer(line))]) :]) for line in lines]
    return [slot for slot in slots if any(c.isalnum() for c in slot)][:2]


def leading_number(text: str) -> str:
    """Return the number at the start of a text or after its only `=`, or ""."""
    text = plain(text)
    _, _, after = text.partition("=")
    for part in (text, after if "=" not in after else ""):
        if number := number_at_start(part):
            return part[number.start : number.end] + "%" * part[number.end :].lstrip().startswith("%")
    return ""


def stated_answers(text: str) -> list[str]:
    """Return the answers in statements, the last one first. Without statements, return a short text as a whole."""
    text = text[-_SEARCHED:]
    slots = [line_after(text, match.end()) for match in _STATEMENT.finditer(text)]
    answers = [_EMPHASIS.sub("", _SENTENCE_END.split(slot, maxsplit=1)[0]) for slot in reversed(slots)]
    return answers or ([_EMPHASIS.sub("", text).rstrip(".")] if len(text) <= _SHORT else [])
