"""Reasoning is no answer, whatever the reward and the family's marks."""

import pytest

from rl_rewards import WeightedReward, gsm8k_reward_fn, math_reward_fn
from rl_rewards.code import code_reward_fn

TESTS = [{"input": "", "output": "5"}]
PROGRAM = "```python\nprint({})\n```"
REWARDS = [
    pytest.param(gsm8k_reward_fn, {"answer": "5"}, "The answer is {}.", id="gsm8k"),
    pytest.param(math_reward_fn, {"answer": "5"}, r"It is \boxed{{{}}}.", id="math"),
    pytest.param(code_reward_fn, {"tests": TESTS}, PROGRAM, id="code", marks=pytest.mark.slow),
]


def score(reward, completion, data, **more):
    return reward("", completion, [], [], **data, **more)


@pytest.mark.parametrize(("reward", "data", "says"), REWARDS)
@pytest.mark.parametrize(
    "form",
    [
        "<think>{wrong}</think>{right}",
        "{wrong}</think>\n\n{right}",
        "[THINK]{wrong}[/THINK]{right}",
        "<seed:think>{wrong}</seed:think>{right}",
        "◁think▷{wrong}◁/think▷{right}",
        "<|channel>thought\n{wrong}<channel|>{right}",
        "<|channel|>analysis<|message|>{wrong}<|end|><|start|>assistant<|channel|>final<|message|>{right}",
        "<reasoning>{wrong}</reasoning>{right}",
    ],
)
def test_reward_reads_what_follows_the_reasoning(reward, data, says, form):
    wrong, right = says.format(7), says.format(5)

    assert score(reward, form.format(wrong=wrong, right=right), data) == 1.0
    assert score(reward, form.format(wrong=right, right=wrong), data) == 0.0


@pytest.mark.parametrize(("reward", "data", "says"), REWARDS)
@pytest.mark.parametrize(
    "form", ["<think>{}", "<think>{}</think>", "<|channel|>analysis<|message|>{}", "<think>{}</think>Some other text."]
)
def test_reward_of_reasoning_without_an_answer_is_zero(reward, data, says, form):
    assert score(reward, form.format(says.format(5)), data) == 0.0


@pytest.mark.parametrize(("reward", "data", "says"), REWARDS)
def test_reward_final_text_decides_where_it_is_given(reward, data, says):
    assert score(reward, says.format(5), data, final_text="") == 0.0
    assert score(reward, says.format(7), data, final_text=says.format(5)) == 1.0


def test_weighted_reward_hands_final_text_to_the_parts_that_take_it():
    def closed(prompt, completions, prompt_ids, completion_ids, answer):
        return 1.0

    both = WeightedReward([("gsm8k", 1.0), (closed, 10.0)])

    assert score(both, "7", {"answer": "5"}, final_text="5") == 11.0
