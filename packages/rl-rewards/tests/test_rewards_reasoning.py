"""All rewards ignore the reasoning. The tests of `split_reasoning` cover the marks of each model family."""

import pytest

from rl_rewards import (
    WeightedReward,
    clevr_count_70k_reward_fn,
    geometry3k_reward_fn,
    gsm8k_reward_fn,
    math_reward_fn,
)
from rl_rewards.code import code_reward_fn

TESTS = [{"input": "", "output": "5"}]
PROGRAM = "```python\nprint({})\n```"
REWARDS = [
    pytest.param(gsm8k_reward_fn, {"answer": "5"}, "The answer is {}.", id="gsm8k"),
    pytest.param(math_reward_fn, {"answer": "5"}, r"It is \boxed{{{}}}.", id="math"),
    pytest.param(clevr_count_70k_reward_fn, {"answer": "5"}, "It is [{}].", id="clevr_count_70k"),
    pytest.param(geometry3k_reward_fn, {"answer": "5"}, r"It is \boxed{{{}}}.", id="geometry3k"),
    pytest.param(code_reward_fn, {"tests": TESTS}, PROGRAM, id="code", marks=pytest.mark.slow),
]


def score(reward, completion, data, **more):
    return reward("", completion, [], [], **data, **more)


@pytest.mark.parametrize(("reward", "data", "template"), REWARDS)
def test_reward_reads_only_the_text_after_the_reasoning(reward, data, template):
    wrong, right = template.format(7), template.format(5)

    assert score(reward, f"<think>{wrong}</think>{right}", data) == 1.0
    assert score(reward, f"<think>{right}</think>{wrong}", data) == 0.0
    assert score(reward, f"<think>{right}", data) == 0.0
    assert score(reward, f"<think>{right}</think>Some other text.", data) == 0.0


@pytest.mark.parametrize(("reward", "data", "template"), REWARDS)
def test_reward_with_final_text_ignores_the_completion(reward, data, template):
    assert score(reward, template.format(5), data, final_text="") == 0.0
    assert score(reward, template.format(7), data, final_text=template.format(5)) == 1.0


def test_weighted_reward_passes_final_text_only_where_accepted():
    def closed(prompt, completions, prompt_ids, completion_ids, answer):
        return 1.0

    both = WeightedReward([("gsm8k", 1.0), (closed, 10.0)])

    assert score(both, "7", {"answer": "5"}, final_text="5") == 11.0
