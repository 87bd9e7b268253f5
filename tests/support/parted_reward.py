"""A reward with two parts, for `algorithm=gdpo`."""

from rl_contracts.registry import load
from rl_contracts.reward import CompositeReward


def right_and_brief(prompt, completions, prompt_ids, completion_ids, **data):
    right = load("rl.rewards", "gsm8k")(prompt, completions, prompt_ids, completion_ids, **data)
    return CompositeReward(right=right, brief=float(len(completion_ids) < 24))
