"""Rewards of labeled completions in the formats of ten model families.

A line of `labeled/NAME.jsonl` is a completion with the fields of its example, the model family whose format it has,
and its label. The labels were assigned by hand, before the rewards were computed. The prompt lists the choices.
"""

import json
from pathlib import Path

import pytest

from rl_contracts.sandbox.sandbox import Sandbox, SandboxLimits
from rl_rewards import clevr_count_70k_reward_fn, geometry3k_reward_fn, gsm8k_reward_fn, math_reward_fn
from rl_rewards.code import CodeReward

REWARDS = {
    "gsm8k": gsm8k_reward_fn,
    "math": math_reward_fn,
    "clevr_count_70k": clevr_count_70k_reward_fn,
    "geometry3k": geometry3k_reward_fn,
    "code": CodeReward(Sandbox(SandboxLimits(seconds=4))),  # one of the programs never ends
}
NUMBER, FAMILIES = 60, 10
"""Completions and model families per reward."""
DIFFERENT = {"gsm8k": 1, "math": 1, "code": 1, "clevr_count_70k": 0, "geometry3k": 0}
"""Maximum number of completions whose reward differs from its label."""


def examples(name):
    path = Path(__file__).parent / "labeled" / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


@pytest.mark.parametrize(
    "name", ["gsm8k", "math", pytest.param("code", marks=pytest.mark.slow), "clevr_count_70k", "geometry3k"]
)
def test_reward_of_labeled_completions_is_their_label(name):
    different, families, labels, rows = [], set(), set(), examples(name)
    for example in rows:
        family, completion, label = (example.pop(key) for key in ("family", "completion", "reward"))
        families.add(family)
        labels.add(label)
        prompt = " ".join(example.get("choices", ()))
        if (reward := REWARDS[name](prompt, completion, [], [], **example)) != label:
            different.append((family, completion, label, reward))

    assert len(different) <= DIFFERENT[name], different
    assert (len(rows), len(families), labels) == (NUMBER, FAMILIES, {0.0, 1.0})
