import pytest

from rl_contracts.errors import ConfigError
from rl_rewards import FormatReward, FormatRewardConfig, format_reward_fn


def test_format_reward_with_a_final_answer_line_is_one():
    for completion in ("She sold 72.\n#### 72", "#### 72\n", "####72", "Sum\n#### $1,234.50"):
        assert format_reward_fn("", completion, [], [], answer="unread") == 1.0, completion


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "72",
        "She sold 72. #### 72",  # not on a separate line
        "#### 72\nThat is all.",
        "#### 72 clips",
        "####",
        "#### 70\n#### 72",
    ],
)
def test_format_reward_with_any_other_ending_is_zero(completion):
    assert format_reward_fn("", completion, [], []) == 0.0


def test_format_reward_with_pattern_requires_the_whole_completion_to_match():
    reward = FormatReward(
        FormatRewardConfig(r"(?s)<think>.*</think>\s*<answer>[^<]*</answer>", reward=0.5, penalty=-0.5)
    )

    assert reward("", "<think>a\nb</think>\n<answer>72</answer>\n", [], []) == 0.5
    assert reward("", "<think>a</think><answer>72</answer> and more", [], []) == -0.5


def test_format_reward_config_with_invalid_values_is_rejected():
    with pytest.raises(ConfigError, match="pattern"):
        FormatRewardConfig("(")
    with pytest.raises(ConfigError, match="reward > penalty"):
        FormatRewardConfig(reward=0.0, penalty=0.0)
