"""Rewards of labeled completions in the formats of ten model families.

A line of `labeled/NAME.jsonl` is a completion with the fields of its example, the model family whose format it has,
and its label. People assigned the labels before they saw the rewards.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from rl_contracts.sandbox.sandbox import Sandbox, SandboxLimits
from rl_rewards import gsm8k_reward_fn, math_reward_fn
from rl_rewards.code import CodeReward

REWARDS = {
    "gsm8k": gsm8k_reward_fn,
    "math": math_reward_fn,
    "code": CodeReward(Sandbox(SandboxLimits(seconds=4))),  # one of the programs never ends
}
NUMBER, DIFFERENT = 60, 1
"""Number of completions per reward, and maximum number whose reward may differ from its label."""


def examples(name):
    path = Path(__file__).parent / "labeled" / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


@pytest.mark.parametrize("name", ["gsm8k", "math", pytest.param("code", marks=pytest.mark.slow)])
def test_reward_of_labeled_completions_is_their_label(name):
    different = []
    for example in examples(name):
        family, completion, label = (example.pop(key) for key in ("family", "completion", "reward"))
        if (reward := REWARDS[name]("", completion, [], [], **example)) != label:
            different.append((family, completion, label, reward))

    assert len(different) <= DIFFERENT, different


@pytest.mark.parametrize("name", REWARDS)
def test_labeled_completions_have_ten_families_and_both_labels(name):
    families = Counter(example["family"] for example in examples(name))

    assert families.total() == NUMBER
    assert len(families) == 10
    assert {example["reward"] for example in examples(name)} == {0.0, 1.0}
