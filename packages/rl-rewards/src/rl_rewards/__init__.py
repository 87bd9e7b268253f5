"""Reward functions and verifiers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_contracts.runtime.lazy_imports import lazy_getattr
from rl_rewards.combination import WeightedReward
from rl_rewards.extraction import find_answer
from rl_rewards.formatting import FormatReward, FormatRewardConfig, format_reward_fn
from rl_rewards.gsm8k import gold_number, gsm8k_reward_fn
from rl_rewards.symbolic import math_reward_fn
from rl_rewards.vision import clevr_count_70k_reward_fn, geometry3k_reward_fn

if TYPE_CHECKING:
    __version__: str
else:
    __getattr__ = lazy_getattr(__name__, {})

__all__ = [
    "FormatReward",
    "FormatRewardConfig",
    "WeightedReward",
    "clevr_count_70k_reward_fn",
    "find_answer",
    "format_reward_fn",
    "geometry3k_reward_fn",
    "gold_number",
    "gsm8k_reward_fn",
    "math_reward_fn",
]
