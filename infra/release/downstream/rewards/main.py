"""Score completions with the reward functions, without the training loop of rl."""

from importlib.util import find_spec

from rl_rewards import WeightedReward, format_reward_fn, gsm8k_reward_fn, math_reward_fn

WORKED = "Natalia sold 48/2 = <<48/2=24>>24 clips in May, 48+24 = <<48+24=72>>72 in all.\n#### 72"
COMPLETIONS = ["24 in May, 72 in all.\n#### 72", "She sold 72 clips", "#### 71"]


def scores(reward):
    """Return the reward of each completion."""
    return [reward("How many clips?", completion, [], [], answer=WORKED) for completion in COMPLETIONS]


assert scores(gsm8k_reward_fn) == [1.0, 1.0, 0.0]
assert scores(format_reward_fn) == [1.0, 0.0, 1.0]
assert scores(WeightedReward([("gsm8k", 1.0), ("format", 0.5)])) == [1.5, 1.0, 0.5]
assert math_reward_fn("", r"so it is $\frac{1}{2}$", [], [], answer="0.5") == 1.0
assert math_reward_fn("", r"so it is $\frac{1}{3}$", [], [], answer="0.5") == 0.0

unexpected = [name for name in ("torch", "transformers", "ray", "aiohttp", "rl_trainers") if find_spec(name)]
assert not unexpected, f"this environment must not have {', '.join(unexpected)}"
