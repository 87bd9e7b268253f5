"""Reasoning and final text of completions by several model families."""

import pytest

from rl_contracts.chat.reasoning import split_reasoning

THINK, GPT_OSS = "<think>\n", "<|start|>assistant"
ANALYSIS = "<|channel|>analysis<|message|>so 5<|end|><|start|>assistant"

TO_TOOL = "<|channel|>commentary to=functions.add<|message|>{}"
FINAL = "<|channel|>final<|message|>It is 5."

MARKS = [
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
    ("to=self<|message|>", "to=user<|message|>"),
    ("<reasoning>", "</reasoning>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
]
"""Marks of each family. They are not read from the source, so that a pair that it loses fails the test."""


def test_split_reasoning_finds_the_marks_of_each_family():
    for start, end in MARKS:
        assert split_reasoning(f"{start}\nso 5\n{end}\n\nIt is 5.") == ("so 5", "It is 5."), start


@pytest.mark.parametrize(
    ("opening", "text", "expected"),
    [
        ("", "It is 5.\n", ("", "It is 5.\n")),
        (THINK, "so 5\n</think>\n\nIt is 5.", ("so 5", "It is 5.")),
        ("", "so 5\n</think>It is 5.", ("so 5", "It is 5.")),
        ("", "<think>a</think>\n<think>b</think>It is 5.", ("a\nb", "It is 5.")),
        ("<think>\n\n</think>\n\n", "print('</think>')", ("", "print('</think>')")),
        ("", "<think>a</think>print('</think>')", ("a", "print('</think>')")),
        (GPT_OSS, f"{ANALYSIS}<|channel|>final<|message|>It is 5.", ("so 5", "It is 5.")),
        (f"{GPT_OSS}<|channel|>final<|message|>", "It is 5.", ("", "It is 5.")),
        (GPT_OSS, f'{ANALYSIS}<|channel|>final <|constrain|>json<|message|>{{"a": 5}}', ("so 5", '{"a": 5}')),
        ("", "It is 5. <reasoning>so 5</reasoning>", ("", "It is 5. <reasoning>so 5</reasoning>")),
        (GPT_OSS, f"{ANALYSIS}{TO_TOOL}", ("so 5", f"<|start|>assistant{TO_TOOL}")),
        (GPT_OSS, f"{ANALYSIS.replace('so', 'to=functions.so')}{FINAL}", ("to=functions.so 5", "It is 5.")),
    ],
)
def test_split_reasoning_closed_returns_the_text_after_it(opening, text, expected):
    assert split_reasoning(text, opening) == expected


@pytest.mark.parametrize(
    ("opening", "text"),
    [
        (THINK, "It is 5."),
        ("", " <think>It is 5."),
        ("", "<think>It is $5$.</think>\n"),
        (GPT_OSS, f"{ANALYSIS}<|channel|>commentary<|message|>It is 5."),
    ],
)
def test_split_reasoning_unclosed_has_no_final_text(opening, text):
    assert split_reasoning(text, opening)[1] == ""
