"""Where the reasoning of an answer ends and its final text begins."""

from __future__ import annotations

import re

CHANNELS = "<|channel|>"
_PROMPTED = (("<reasoning>", "</reasoning>"), ("<thinking>", "</thinking>"), ("<thought>", "</thought>"))
"""Elements for which prompts ask."""
MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
    (CHANNELS, f"{CHANNELS}final<|message|>"),
    ("to=self<|message|>", "to=user<|message|>"),
    *_PROMPTED,
)
"""Marks that open and close reasoning: most families, Mistral, Seed, Kimi, Cohere, Gemma, gpt-oss, Muse, elements."""
_CHANNELS_END = re.compile(
    r"(<\|channel\|>final(?: ?<\|constrain\|>\w+)?<\|message\|>)"
    r"|(?:^|<\|start\|>assistant|(?<=<\|end\|>))(?:<\|channel\|>\w+)? ?to=\w"
)
"""The end of the reasoning of gpt-oss: the final channel, or a message to a tool, which belongs to the final text."""
_CHANNEL_BODY = re.compile(r"<\|message\|>(.*?)(?:<\|(?:end|start|channel)\|>|$)", re.DOTALL)


def split_reasoning(text: str, opening: str = "") -> tuple[str, str]:
    """Reasoning and final text of an answer.

    The prompt or the beginning of the answer opens reasoning, and the first closing mark ends it, unless more reasoning
    follows at once. A closing mark alone is enough, where the prompt does not close reasoning itself: the prompt that
    opened it may not be at hand. Where reasoning is never closed, there is no final text; where no mark is found, there
    is no reasoning.

    Args:
        text: of the answer, in which special tokens stand by their names.
        opening: end of the prompt, from where the assistant's turn begins.

    Returns:
        (reasoning without its marks, final text without the line breaks before it).
    """
    opened = [m for m in MARKS if opening.rfind(m[0]) > opening.rfind(m[1]) or text.lstrip().startswith(m[0])]
    closed = [m for m in MARKS if m[1] in text and m[1] not in opening and not _follows_answer(text, m)]
    start, end = next(iter([*opened, *closed]), ("", ""))
    if not start:
        return "", text
    return _split_channels(text) if start == CHANNELS else _split(text, start, end)


def _follows_answer(text: str, marks: tuple[str, str]) -> bool:
    """Whether an element that the prompt asks for stands behind other text, such as an explanation of the answer."""
    return marks in _PROMPTED and marks[0] in text.partition(marks[1])[0]


def _split(text: str, start: str, end: str) -> tuple[str, str]:
    reasoning = []
    while True:
        before, _, text = text.partition(end)
        reasoning.append(before.strip().removeprefix(start).strip())
        if not text.lstrip().startswith(start):
            break
    return "\n".join(reasoning).strip(), text.lstrip("\n")


def _split_channels(text: str) -> tuple[str, str]:
    end = _CHANNELS_END.search(text)
    before, final = (text, "") if end is None else (text[: end.start()], text[end.end() if end[1] else end.start() :])
    return "\n".join(_CHANNEL_BODY.findall(before)).strip(), final.lstrip("\n")
