r"""Search for the answer in a completion.

Forms of an answer, in the order in which they are tried (of each form, the last one with a number counts):

1. a line `#### 72`
2. `\boxed{72}`, braces nested to any depth
3. a statement: "the answer is 72"
4. a label: "Answer: 72", "Final answer" as a heading, "A: 72" at the start of a line
5. the last number of the text

The last non-empty `<answer>...</answer>` is searched first, then the whole text. Boxes are skipped if the last one is
empty or unterminated.

Only the last `MAX_CHARS` characters of the final text, which follows the reasoning, are read. Answers are at the end,
and this bounds the time for any completion.
"""

from __future__ import annotations

import re
from itertools import islice

from rl_rewards.markup import plain
from rl_rewards.numbers import WrittenNumber, find_numbers, last_number
from rl_rewards.texts import without_markup

MAX_CHARS = 20_000
"""Number of characters read, from the end of the completion."""

_SLOT_CHARS = 400
"""Maximum distance in characters between a label or statement and its answer."""

_HASHES = re.compile(r"#{4,}:?")
_BOX = re.compile(r"\\{1,2}(?:boxed|f(?:rame)?box)\s{0,2}(?:\{|(?P<bare>-?[0-9][0-9.,]{0,30}))|\\.|[{}]", re.DOTALL)
_BLANK = re.compile(r"\s*\}")
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.IGNORECASE | re.DOTALL)
# Two boxes form one answer if "and" or "or" directly precedes the second box, ...
_LISTS = re.compile(r"\b(?:and|or)\W*$")
# ... or if the text between the boxes has no words, equals signs, arrows or commands. Before this check, "and", "or",
# names such as `x_2 =` and spacing commands are removed.
_SEPARATES = re.compile(r"[^\W\d_]{2}|[=\u2190-\u21ff]|\\[A-Za-z]")
_CONNECTS = re.compile(
    r"\b(?:and|or)\b|(?:\\[A-Za-z]{1,12}|\b[A-Za-z]{1,2}[0-9]?)(?:_\{?\w{1,3}\}?)?\s{0,3}(?:&\s{0,3})?="
)
# "the answer", "answer (in dollars)", "answer to the question"; not the verb in "to answer this, note that ..."
_ANSWER = (
    r"(?<!\bto )\b(?:answers?|(?:correct|right|best)\s(?:option|choice))\b"
    r"(?:\s?\([^()\n]{0,30}\)|\s(?:to|for|in|of)\s[^\n.:=,]{0,60}?)?"
)
STATEMENT = (
    rf"{_ANSWER}[\s*_\"]{{1,4}}(?:(?:should|would|will|must|could)\s)?(?:therefore\s|thus\s|then\s)?"
    r"(?:is|are|was|be|equals|becomes|comes\sto)\b(?:\s(?:therefore|thus|then))?\s?:?"
)
"""Words before an answer in a sentence."""
LABEL = rf"{_ANSWER}[\"'\s*_]{{0,4}}[:=\u2192\uff1a]|^\W{{0,8}}(?:(?:the|my|final|correct)\s){{0,2}}answers?\W{{0,8}}$"
"""A mark before an answer, or a heading."""
_STATEMENT = re.compile(STATEMENT, re.IGNORECASE)
_LABEL = re.compile(rf"{LABEL}|^\W{{0,4}}A:", re.IGNORECASE | re.MULTILINE)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)")
_LIST_ITEM = re.compile(r"[.)]\s{1,3}[A-Za-z]")
_LOOSE_SIGN = re.compile(r"^[\s$]{0,4}-\s{1,2}(?=[0-9$])")
# Text after a number that makes it the beginning of a formula: `3 + 4`, `5-10`, `2x3`, `10^3`, `2\pi`, `20% of 50`, ...
_FORMULA = re.compile(
    r"%?\s{0,2}(?:\^|\\(?:pi|sqrt)|(?:[-+*/\u00d7÷·xX]|\\(?:times|cdot|div|pm)|times|plus|minus|of|divided\sby)"
    r"\s{0,2}[$(]{0,2}\s?[0-9(])"
)
# ... or of the left side of an equation: `48 clips + 24 clips = 72`, but not `72, since 48 + 24 = 72`.
_EQUATION = re.compile(r"(?:(?!\b(?:because|since|as|so|where|and)\b)[^=,;:(\n]){0,80}+=")


def find_answer(text: str) -> WrittenNumber | None:
    """Return the number that a completion gives as its answer, or None if it has no number."""
    text = text[-MAX_CHARS:]
    tagged = tagged_answer(text)
    return (_find(tagged) if tagged else None) or _find(text)


def _find(text: str) -> WrittenNumber | None:
    cleaned = plain(text)
    last = last_number(cleaned)
    if last is None:
        return None
    return _after_hashes(cleaned) or _in_box(text) or _after_statement(cleaned) or _after_label(cleaned, last) or last


def tagged_answer(text: str) -> str | None:
    """Return the content of the last non-empty `<answer>...</answer>`, or None."""
    return next((m[1].strip() for m in reversed(list(_TAGGED.finditer(text))) if m[1].strip()), None)


def boxed_answer(text: str) -> tuple[str | None, int]:
    r"""Return the content of the last `\boxed{...}` and its end in the text.

    If earlier boxes belong to the same answer, their contents precede it, separated by commas. The content is "" if the
    last box is empty or unterminated. Without a box the result is (None, 0).
    """
    spans = _boxes(text)
    if not spans:
        return None, 0
    start, end = last = spans.pop()
    if end < 0:
        return "", len(text)
    contents = [text[start:end].strip()]
    for start_before, end_before in reversed(spans):
        if end_before > start:  # encloses the current box
            continue
        content = text[start_before:end_before].strip()
        if end_before < 0 or not _joined(text[end_before:start].removeprefix("}")):
            break
        start = start_before
        contents += [content] if content != contents[-1] else []
    return ", ".join(reversed(contents)), last[1] + 1


def _joined(between: str) -> bool:
    """Return whether two boxes form one answer, given the text between them with the command of the second box."""
    between = re.sub(r"\\(?:boxed|f(?:rame)?box)\s{0,2}\{$", "", between)
    between = without_markup(between)
    return _LISTS.search(between) is not None or not _SEPARATES.search(_CONNECTS.sub("", between))


def _boxes(text: str) -> list[tuple[int, int]]:
    """Return the spans of the contents of boxes, sorted by start. The end of an empty or unterminated box is -1.

    The search is a single pass, so its time does not depend on the nesting depth.
    """
    open_braces: list[tuple[bool, int]] = []
    spans: list[tuple[int, int]] = []
    for match in _BOX.finditer(text):
        token = match.group()
        if match["bare"]:
            spans.append(match.span("bare"))
        elif token == "}":
            is_box, start = open_braces.pop() if open_braces else (False, 0)
            if is_box:
                spans.append((start, -1 if _BLANK.match(text, start) else match.start()))
        elif token.endswith("{") and token != r"\{":
            open_braces.append((len(token) > 1, match.end()))
    return sorted(spans + [(start, -1) for is_box, start in open_braces if is_box])


def _after_hashes(text: str) -> WrittenNumber | None:
    for match in reversed(list(_HASHES.finditer(text))):
        slot = _join_sign(line_after(text, match.end()))
        # `#### Step 2: add them` and `#### 2. Add them` are Markdown headings
        number = number_at_start(slot) or (None if ":" in slot else _right_hand_side(slot))
        if number and not _LIST_ITEM.match(slot, number.end):
            return number
    return None


def _in_box(text: str) -> WrittenNumber | None:
    spans = _boxes(text)
    if not spans or spans[-1][1] < 0:
        return None
    numbers = (
        _read_slot(_join_sign(plain(text[start:end][:_SLOT_CHARS]))) for start, end in reversed(spans) if end > 0
    )
    return next(filter(None, numbers), None)


def _after_statement(text: str) -> WrittenNumber | None:
    statements = reversed(list(_STATEMENT.finditer(text)))
    return next(filter(None, (_read_slot(_sentence(text, match.end())) for match in statements)), None)


def _after_label(text: str, last: WrittenNumber) -> WrittenNumber | None:
    """Return the number after the last label that has one.

    A label may also open a worked solution, so only a line with the last number of the text is read in full.
    """
    for match in reversed(list(_LABEL.finditer(text))):
        slot = line_after(text, match.end())
        start = text.find(slot, match.end())
        has_last_number = last.end <= start + len(slot)
        number = (_right_hand_side(slot) if has_last_number else None) or number_at_start(slot)
        number = number or (_only_number(slot) if has_last_number else None)
        opens_list = "\n" in text[match.end() : start] and number and _LIST_ITEM.match(slot, number.end)
        if number and not opens_list:
            return number
    return None


def line_after(text: str, start: int) -> str:
    """Return the first line after `start` with more than punctuation, or ""."""
    lines = text[start : start + _SLOT_CHARS].split("\n")
    return next((line for line in lines if _has_words(line)), "")


def _sentence(text: str, start: int) -> str:
    line = line_after(text, start)
    end = _SENTENCE_END.search(line)
    return line[: end.start()] if end else line


def _join_sign(slot: str) -> str:
    """Replace `- 5` at the start of a slot by `-5`. The dash is a sign, because a slot does not begin with a bullet."""
    return _LOOSE_SIGN.sub("-", slot)


def _read_slot(slot: str) -> WrittenNumber | None:
    return number_at_start(slot) or _right_hand_side(slot) or _only_number(slot)


def number_at_start(slot: str) -> WrittenNumber | None:
    """Return the number at the start of `slot`, unless it opens a formula or an equation."""
    number = next(find_numbers(slot), None)
    if number is None or _has_words(slot[: number.start]):
        return None
    opens = _FORMULA.match(slot, number.end) or _EQUATION.match(slot, number.end)
    return None if opens else number


def _right_hand_side(slot: str) -> WrittenNumber | None:
    """Return the number after the last equals sign: 7 in `x = 3 + 4 = 7`."""
    _, equals, right = slot.rpartition("=")
    return number_at_start(right) if equals else None


def _only_number(slot: str) -> WrittenNumber | None:
    numbers = list(islice(find_numbers(slot), 2))
    return numbers[0] if len(numbers) == 1 else None


def _has_words(text: str) -> bool:
    return any(c.isalnum() for c in text)
