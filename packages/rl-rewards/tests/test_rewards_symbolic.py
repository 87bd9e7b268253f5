import subprocess
import sys
import threading

import pytest

from rl_contracts.errors import RewardError
from rl_contracts.reward_worker import AsyncRewardWrapper
from rl_rewards import math_reward_fn


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"so $\boxed{\frac{1}{2}}$", "1/2", 1.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        (r"The answer is $\sqrt{8}$.", r"2\sqrt{2}", 1.0),
        (r"\boxed{\{2, 1\}}", r"\{1, 2\}", 1.0),
        (r"\boxed{x = 5}", "5", 1.0),
        (r"\boxed{1} or rather \boxed{2}", "2", 1.0),
        (r"\boxed{7}", r"Adding gives $\boxed{7}$.", 1.0),
        ("3 + 4 = 7\n#### 7", "3 + 4 = 7\n#### 7", 1.0),
        ("the answer is 5", 5, 1.0),
        (r"<think>\boxed{5}</think> It is \boxed{6}", "5", 0.0),
        (r"\boxed{(x+1)^2}", "x^2+1", 0.0),
        (r"\boxed{3}", "4", 0.0),
        (r"\boxed{}", "4", 0.0),
        ("I do not know", "4", 0.0),
        ("", "4", 0.0),
    ],
)
def test_math_reward_is_one_exactly_for_equal_expressions(completion, answer, reward):
    assert math_reward_fn("", completion, [], [], answer=answer) == reward


@pytest.mark.parametrize("answer", [None, "", "???"])
def test_math_reward_without_a_readable_gold_answer_raises_reward_error(answer):
    with pytest.raises(RewardError, match="expected `answer`"):
        math_reward_fn("", r"\boxed{5}", [], [], answer=answer)


def test_math_reward_in_a_thread_needs_no_signal():
    rewards: list[float] = []
    thread = threading.Thread(target=lambda: rewards.append(math_reward_fn("", r"\boxed{5}", [], [], answer="5")))

    thread.start()
    thread.join(30)

    assert rewards == [1.0]


@pytest.mark.slow
async def test_math_reward_of_an_endless_comparison_is_an_error_at_the_deadline():
    reward = AsyncRewardWrapper("math", timeout=3.0)

    with pytest.raises(RewardError):
        await reward("", r"\boxed{9^{9^{9^{9}}}}", [], [], answer="5")

    reward.close()


def test_import_of_rl_rewards_loads_neither_torch_nor_sympy():
    code = "import sys, rl_rewards; assert not {'torch', 'sympy', 'math_verify', 'numpy'} & set(sys.modules)"

    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
