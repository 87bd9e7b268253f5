import pickle

import pytest

from rl_contracts.errors import ConfigError, RewardError
from rl_contracts.reward import components_of
from rl_rewards import WeightedReward, format_reward_fn, gsm8k_reward_fn


async def slow_reward_fn(prompt, completions, prompt_ids, completion_ids, **_):
    return 1.0


def test_weighted_reward_sums_weighted_components_and_names_them():
    parts = [("gsm8k", 1.0), (gsm8k_reward_fn, 0.5), (format_reward_fn, 0.25), ("gsm8k", 2.0), ("gsm8k", 3.0)]

    reward = WeightedReward(parts)("", "It is 72", [], [], answer=72)

    names = ["gsm8k", "gsm8k_reward_fn", "FormatReward", "gsm8k#2", "gsm8k#3"]
    assert components_of(reward) == dict(zip(names, [1.0, 0.5, 0.0, 2.0, 3.0], strict=True))
    assert reward == 6.5


def test_weighted_reward_pickled_accepts_names_and_dotted_paths():
    reward = pickle.loads(pickle.dumps(WeightedReward([("gsm8k", 1.0), ("rl_rewards:format_reward_fn", 0.5)])))

    assert reward("", "#### 72", [], [], answer=72) == 1.5
    assert reward("", "#### 73", [], [], answer=72) == 0.5


def test_weighted_reward_with_a_failing_component_fails():
    with pytest.raises(RewardError):
        WeightedReward([("gsm8k", 0.0), ("format", 1.0)])("", "#### 72", [], [])


@pytest.mark.parametrize(
    ("parts", "message"),
    [([], "at least one"), ([("gsm9k", 1.0)], "unknown name"), ([(slow_reward_fn, 1.0)], "asynchronous")],
)
def test_weighted_reward_with_invalid_components_is_rejected(parts, message):
    with pytest.raises(ConfigError, match=message):
        WeightedReward(parts)
