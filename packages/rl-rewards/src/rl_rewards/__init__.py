"""Reward functions and verifiers."""

from rl_rewards.combination import WeightedReward
from rl_rewards.extraction import find_answer
from rl_rewards.formatting import FormatReward, FormatRewardConfig, format_reward_fn
from rl_rewards.gsm8k import gold_number, gsm8k_reward_fn
from rl_rewards.symbolic import math_reward_fn

__version__ = "0.1.0"

__all__ = [
    "FormatReward",
    "FormatRewardConfig",
    "WeightedReward",
    "find_answer",
    "format_reward_fn",
    "gold_number",
    "gsm8k_reward_fn",
    "math_reward_fn",
]
