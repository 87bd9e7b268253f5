"""Split a completion into its reasoning and its final text."""

from __future__ import annotations

import re

CHANNELS = "<|channel|>"
_PROMPTED_ELEMENTS = (("<reasoning>", "</reasoning>"), ("<thinking>", "</thinking>"), ("<thought>", "</thought>"))
"""Elements that the prompt may ask the model to write, with their closing marks."""
MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
    (CHANNELS, f"{CHANNELS}final<|message|>"),
    ("to=self<|message|>", "to=user<|message|>"),
    *_PROMPTED_ELEMENTS,
)
"""Opening and closing marks of reasoning, by model family.

In this order: most families, Mistral, Seed, Kimi, Cohere, Gemma, gpt-oss, Muse, elements named in the prompt.
"""
_CHANNELS_END = re.compile(
    r"(<\|channel\|>final(?: ?<\|constrain\|>\w+)?<\|message\|>)"
    r"|(?:^|<\|start\|>assistant|(?<=<\|end\|>))(?:<\|channel\|>\w+)? ?to=\w"
)
"""End of the reasoning of gpt-oss: the final channel, or a message to a tool, which is part of the final text."""
_CHANNEL_BODY = re.compile(r"<\|message\|>(.*?)(?:<\|(?:end|start|channel)\|>|$)", re.DOTALL)


def split_reasoning(text: str, opening: str = "") -> tuple[str, str]:
    """Return the reasoning and the final text of a completion.

    An opening mark in the prompt or at the beginning of the completion starts reasoning. The first closing mark ends
    it, unless more reasoning follows immediately. A closing mark without an opening mark also ends reasoning, because
    the caller may not have the prompt. It does not count if `opening` contains it. Without a closing mark, the final
    text is empty. Without any mark, the reasoning is empty.

    Args:
        text: text of the completion, with special tokens written as their names.
        opening: end of the prompt, from the beginning of the assistant's turn.

    Returns:
        (reasoning without its marks, final text without leading line breaks).
    """
    opened = [m for m in MARKS if opening.rfind(m[0]) > opening.rfind(m[1]) or text.lstrip().startswith(m[0])]
    closed = [m for m in MARKS if m[1] in text and m[1] not in opening and not _follows_text(text, m)]
    start, end = next(iter([*opened, *closed]), ("", ""))
    if not start:
        return "", text
    return _split_channels(text) if start == CHANNELS else _split(text, start, end)


def _follows_text(text: str, marks: tuple[str, str]) -> bool:
    """Return whether an element named in the prompt opens inside `text`, after other text such as an explanation.

    The caller has already handled a text that begins with the element.
    """
    return marks in _PROMPTED_ELEMENTS and marks[0] in text.partition(marks[1])[0]


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
