"""The reward of programs."""

import pytest

from rl_contracts.conformance.reward import RewardConformance
from rl_contracts.errors import RewardError
from rl_contracts.metrics import collect
from rl_contracts.sandbox import Sandbox, SandboxLimits
from rl_rewards.code import CodeReward, code_reward_fn

TESTS = {"tests": [{"input": "2 3\n", "output": "5"}, {"input": "1 -1\n", "output": "0"}]}
ADDS = "```python\nprint(sum(map(int, input().split())))\n```"


class TestCodeReward(RewardConformance):
    target = "code"
    gold_key = "tests"
    right = [  # noqa: RUF012
        (f"So:\n{ADDS}", TESTS),
        (f"```\nprint(1)\n```\nno, rather\n{ADDS}", TESTS),
        (f"<think>```python\nprint(1)\n```</think>{ADDS}", TESTS),
    ]
    wrong = [  # noqa: RUF012
        ("```python\nprint(5)\n```", TESTS),
        ("print(sum(map(int, input().split())))", TESTS),
        ("```python\nopen('/etc/passwd')\n```", TESTS),
        (f"{ADDS}\n```python\nimport os\nos._exit(0)\n```", TESTS),
    ]


@pytest.mark.slow
def test_code_reward_tells_the_fraction_and_ends_what_does_not_end():
    reward = CodeReward(Sandbox(SandboxLimits(seconds=4)))
    code = "```python\na, b = map(int, input().split())\nwhile b < 0: pass\nprint(a + b)\n```"

    with collect() as figures:
        assert reward("", code, [], [], **TESTS) == 0.0

    assert figures.results()["code/passed"] == 0.5


def test_code_reward_row_without_tests_is_an_error():
    with pytest.raises(RewardError, match="expected `tests`"):
        code_reward_fn("", ADDS, [], [])
