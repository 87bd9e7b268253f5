"""Reward with two components, for `algorithm=gdpo`."""

from rl_contracts.registry import load
from rl_contracts.reward import CompositeReward


def correct_and_short(prompt, completions, prompt_ids, completion_ids, **data):
    correct = load("rl.rewards", "gsm8k")(prompt, completions, prompt_ids, completion_ids, **data)
    return CompositeReward(correct=correct, short=float(len(completion_ids) < 24))
