"""Rewards for questions about images."""

import time

import pytest

from rl_contracts.conformance.reward import RewardConformance
from rl_contracts.errors import RewardError
from rl_contracts.reward import components_of
from rl_contracts.reward_worker import AsyncRewardWrapper
from rl_rewards import clevr_count_70k_reward_fn, geometry3k_reward_fn

CHOICES = ["21", r"\sqrt { 221 }", r"2 \sqrt { 221 }", "30"]


class TestClevrCount70k(RewardConformance):
    target = "clevr_count_70k"
    right = [("[3]", {"answer": "3"}), ("two or [3.0]", {"answer": 3})]  # noqa: RUF012
    wrong = [("[4]", {"answer": "3"}), ("3", {"answer": "3"}), (r"\boxed{3}", {"answer": "3"})]  # noqa: RUF012


class TestGeometry3k(RewardConformance):
    target = "geometry3k"
    right = [  # noqa: RUF012
        (r"\boxed{2\sqrt{221}}", {"answer": r"2 \sqrt { 221 }"}),
        (r"\boxed{60^\circ}", {"answer": "60", "choices": ["30", "60"], "ground_truth": "B"}),
    ]
    wrong = [  # noqa: RUF012
        (r"\boxed{2\sqrt{221}}", {"answer": r"\sqrt { 221 }", "choices": CHOICES, "ground_truth": "B"}),
        ("2", {"answer": "2"}),
    ]


def check(reward, table, prompt="", **data):
    """Compare the rewards of (completion, gold answer, reward)."""
    assert [(text, gold, reward(prompt, text, [], [], answer=gold, **data)) for text, gold, _ in table] == table


def test_clevr_reward_compares_last_bracketed_number_by_value():
    check(
        clevr_count_70k_reward_fn,
        [
            *[(f"[{text}]", "3", 1.0) for text in ("3", " 3.0 ", "03", "+3", "$3$")],
            *[(f"[{text}]", "3", 0.0) for text in ("-3", "30", "3.1", "3 items", "three", "3, 4", "")],
            ("[4], no: [3]", "3", 1.0),
            ("[3], no: [4]", "3", 0.0),
            ("[3], with the boxes [1, 2, 3, 4] and [note]", "3", 1.0),
            ("[[3]]", "3", 1.0),
            (r"\[3\]", "3", 0.0),
            ("[3", "3", 0.0),
            ("[0]", 0, 1.0),
        ],
    )


@pytest.mark.parametrize("answer", ["three", "3 or 4", "", None, float("nan"), True])
def test_clevr_reward_of_gold_answer_without_number_raises(answer):
    with pytest.raises(RewardError, match="expected `answer`"):
        clevr_count_70k_reward_fn("", "[3]", [], [], answer=answer)


def test_geometry_reward_with_a_box_ignores_all_brackets():
    check(
        geometry3k_reward_fn,
        [
            (r"\boxed{5}, not [6]", "5", 1.0),
            (r"\boxed{6}, not [5]", "5", 0.0),
            (r"\boxed{\sqrt[3]{5}}", r"\sqrt[3]{5}", 1.0),
            (r"\boxed{\sqrt[3]{5}}", "3", 0.0),
            (r"\boxed{}, or [5]", "5", 0.0),
            (r"[5] \boxed{5", "5", 0.0),
            (r"\boxed{4} or \boxed{5}", "5", 0.0),
        ],
    )


def test_geometry_reward_without_a_box_reads_the_last_brackets():
    check(
        geometry3k_reward_fn,
        [
            ("[AB] and [CD] are equal: [5 cm]", "5", 1.0),
            (r"[x = \frac{5}{2}]", "2.5", 1.0),
            (r"[2\sqrt[3]{5}]", r"2 \sqrt[3]{5}", 1.0),
            (r"[2\sqrt[3]{5}]", "3", 0.0),
            ("[5], then [6]", "5", 0.0),
            (r"\[5\]", "5", 0.0),
            (r"\sqrt[5]{x}", "5", 0.0),
            ("The answer is 5.", "5", 0.0),
        ],
    )


def test_geometry_reward_counts_a_letter_as_the_choice_it_names():
    gold = r"2 \sqrt { 221 }"
    letters = ["C", r"\text{(C)}", "(c)", r"C. $2\sqrt{221}$"]
    question = f"Find x. Choices: {CHOICES[0]}, {CHOICES[1]}, {CHOICES[2]}, {CHOICES[3]}"
    listed = {"prompt": question, "choices": CHOICES}

    check(geometry3k_reward_fn, [(rf"\boxed{{{letter}}}", gold, 1.0) for letter in letters], **listed)
    check(geometry3k_reward_fn, [("[C]", gold, 1.0), ("[B]", gold, 0.0), ("[E]", gold, 0.0)], **listed)
    check(geometry3k_reward_fn, [("[C]", gold, 0.0), ("[C]", "C", 1.0)], prompt=question, choices=None)


def test_geometry_reward_of_a_letter_is_0_if_the_prompt_lists_no_choices():
    check(geometry3k_reward_fn, [("[C]", CHOICES[2], 0.0), (r"\boxed{C}", CHOICES[2], 0.0)], "Find x.", choices=CHOICES)


@pytest.mark.parametrize("unit", ["[", "[3", "[]", r"[\sqrt[3]", r"\[[", r"[3\]"])
def test_bracket_search_in_adversarial_text_takes_linear_time(unit):
    text = unit * (200_000 // len(unit))

    started = time.process_time()
    clevr_count_70k_reward_fn("", text, [], [], answer=3)
    geometry3k_reward_fn("", text, [], [], answer=3)

    assert time.process_time() - started < 10.0  # at most about 1 s


REASONED = r"""
from rl_rewards import FormatReward, FormatRewardConfig, WeightedReward

reasoned = FormatReward(FormatRewardConfig(r"(?s)<think>.*</think>.*\\boxed\{.*\}.*"))
geometry = WeightedReward([("geometry3k", 0.9), (reasoned, 0.1)])
"""


@pytest.mark.slow
async def test_geometry_reward_in_a_file_adds_a_tenth_for_the_format(tmp_path):
    file = tmp_path / "my_reward.py"
    file.write_text(REASONED)
    completions = [rf"{thought}\boxed{{{n}}}" for thought in ("<think>a\nb</think>\n", "") for n in (5, 6)]

    async with AsyncRewardWrapper(f"{file}:geometry") as reward:  # as a command does for rollout.reward=FILE:NAME
        rewards = [await reward("", completion, [], [], answer="5") for completion in [*completions, "[5]"]]

    assert [list(components_of(value).values()) for value in rewards] == [
        [0.9, 0.1],
        [0.0, 0.1],
        [0.9, 0.0],
        [0.0, 0.0],
        [0.9, 0.0],
    ]
    assert rewards[0] == 1.0
