"""Where the reasoning of an answer ends and its final text begins."""

from __future__ import annotations

import re

CHANNELS = "<|channel|>"
MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
    (CHANNELS, f"{CHANNELS}final<|message|>"),
    ("<reasoning>", "</reasoning>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
)
"""What opens and closes reasoning: most families, Mistral, Seed, Kimi, Cohere, Gemma, gpt-oss, and forms for which
prompts ask."""
_CHANNELS_END = re.compile(
    r"(<\|channel\|>final<\|message\|>)|(?:^|<\|start\|>assistant|(?<=<\|end\|>))(?:<\|channel\|>\w+)? ?to=\w"
)
"""What ends the reasoning of gpt-oss: the final channel, or a message to a tool, which belongs to the final text."""
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
    closed = [m for m in MARKS if m[1] in text and m[1] not in opening]
    for start, end in [*opened, *closed][:1]:
        return _split_channels(text) if start == CHANNELS else _split(text, start, end)
    return "", text


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
