"""Reward for programs."""

import json
import time

import pytest

from rl_contracts.conformance.reward import RewardConformance
from rl_contracts.errors import RewardError
from rl_contracts.reward_worker import AsyncRewardWrapper
from rl_contracts.runtime.metrics import collect
from rl_contracts.sandbox.sandbox import Sandbox, SandboxLimits
from rl_rewards.code import CodeReward, code_reward_fn
from rl_rewards.program_tests import read_tests, same_output, same_value
from rl_rewards.programs import find_program

TESTS = {"tests": [{"input": "2 3\n", "output": "5"}, {"input": "1 -1\n", "output": "0"}]}
ADDS = "```python\nprint(sum(map(int, input().split())))\n```"
CALLS = {"tests": {"inputs": [[[3, 1, 2]]], "outputs": [[1, 2, 3]], "fn_name": "ordered"}}
ORDERED = "```python\ndef ordered(values: List[int]):\n    print('in ordered')\n    return tuple(sorted(values))\n```"


class TestCodeReward(RewardConformance):
    target = "code"
    gold_key = "tests"
    right = [  # noqa: RUF012
        (f"So:\n{ADDS}", TESTS),
        (f"```\nprint(1)\n```\nno, rather\n{ADDS}", TESTS),
        (f"<think>```python\nprint(1)\n```</think>{ADDS}", TESTS),
        (ADDS, {"tests": json.dumps({"inputs": ["2 3\n"], "outputs": ["5"]})}),
        (ORDERED, CALLS),
    ]
    wrong = [  # noqa: RUF012
        ("```python\nprint(5)\n```", TESTS),
        ("print(sum(map(int, input().split())))", TESTS),
        ("```python\nopen('/etc/passwd')\n```", TESTS),
        (f"{ADDS}\n```python\nimport os\nos._exit(0)\n```", TESTS),
        ("```python\ndef ordered(values):\n    return values\n```", CALLS),
    ]


FENCE = "```"
PROGRAM = "print(int(input()) + 1)\n"


FENCED = [
    f"{FENCE}\n{PROGRAM}{FENCE}",
    f"{FENCE} py3.11\n{PROGRAM}{FENCE}",
    f'{FENCE}Python title="a.py"\n{PROGRAM}{FENCE}',
    f"{FENCE}{{.python .numberLines}}\n{PROGRAM}{FENCE}",
    f"{FENCE}main.py\n{PROGRAM}{FENCE}",
    f"{FENCE}python\r\n{PROGRAM[:-1]}\r\n{FENCE}\r\n",
    f"~~~python\n{PROGRAM}~~~",
    f"{FENCE}python\n{PROGRAM}",
    f"- Code:\n\n    {FENCE}python\n    {PROGRAM}    {FENCE}",
    f"Code:\n\n    {FENCE}python\n    {PROGRAM}    {FENCE}",
    f"<answer>\n{FENCE}python\n{PROGRAM}{FENCE}\n</answer>",
    f"{FENCE}python\n{PROGRAM}{FENCE}\nRun:\n{FENCE}bash\npython a.py\n{FENCE}",
    f"{FENCE}python\nprint(0)\n{FENCE}\nbetter:\n{FENCE}python\n{PROGRAM}{FENCE}",
    f"{FENCE}python\n{PROGRAM}{FENCE}\nOutput:\n{FENCE}\n2\n{FENCE}",
    f"{FENCE}\n{PROGRAM}{FENCE}\nOutput:\n{FENCE}\n2\n{FENCE}",
    f"<answer>{FENCE}python\n{PROGRAM}{FENCE}</answer>",
    f"{FENCE}python\n{PROGRAM}{FENCE} This adds one.",
    f"{FENCE}\n{PROGRAM}{FENCE}<|im_end|>",
    f"The code is: {FENCE}python\n{PROGRAM}{FENCE}",
    f"**Code** (O(n)){FENCE}py3\r\n{PROGRAM}{FENCE}",
    f"- Code: {FENCE}python\n  {PROGRAM}  {FENCE}",
    f"> Code: {FENCE}python\n> {PROGRAM}> {FENCE}",
    f"{FENCE}python\nprint(0){FENCE}\nbetter:\n{FENCE}python\n{PROGRAM}{FENCE}",
    f"{FENCE}python\n{PROGRAM}{FENCE}\nExample:\n{FENCE}python\n# Input: 1\n# Output: 2\n{FENCE}",
    f"{FENCE}python\n{PROGRAM}{FENCE}\nExample:\n{FENCE}python\n>>> 1+2\n3\n{FENCE}",
    f"Use {FENCE}python{FENCE} here.\n{FENCE}python\n{PROGRAM}{FENCE}",
]


def test_find_program_with_a_fenced_block_returns_its_content():
    assert {text: find_program(text) for text in FENCED} == dict.fromkeys(FENCED, PROGRAM)


def test_find_program_with_blocks_without_calls_returns_the_last():
    assert find_program(f"{FENCE}python\nx = 1\n{FENCE}\n{FENCE}python\nx = 2\n{FENCE}") == "x = 2\n"


@pytest.mark.parametrize("program", [PROGRAM.strip(), f"{PROGRAM}    "])
def test_find_program_with_a_closing_fence_after_code_ends_there(program):
    assert find_program(f"So:\n{FENCE}python\n{program}{FENCE}\nExplanation: it's short.") == program


def test_find_program_with_many_fences_takes_bounded_time():
    started = time.process_time()
    find_program(f"{FENCE}python\nprint(0){FENCE}\n" * 4000 + f"x {FENCE}" * 20_000)

    assert time.process_time() - started < 20.0  # about 2 s


@pytest.mark.parametrize("completion", [PROGRAM, f"{FENCE}cpp\n{PROGRAM}{FENCE}"])
def test_find_program_without_a_python_block_returns_none(completion):
    assert find_program(completion) is None


def test_find_program_with_a_fence_in_a_string_returns_the_whole_block():
    for code in (f"s = '''{FENCE}'''\n{PROGRAM}", f"s = '''\n{FENCE}\nx\n{FENCE}\n'''\n{PROGRAM}"):
        assert find_program(f"So:\n{FENCE}python\n{code}{FENCE}\nOutput:\n{FENCE}\n2\n{FENCE}") == code


def test_find_program_for_a_function_returns_its_definition():
    defines, uses = "def f(x):\n    return x\n", "print(f(3))\n"
    completion = f"{FENCE}python\n{defines}{FENCE}\nFor example:\n{FENCE}python\n{uses}{FENCE}"

    assert find_program(completion, "f") == defines
    assert find_program(completion) == uses


OUTPUTS = [
    ("1\n2", "1 \n\n  2\n\n", True),
    ("0.5 x", "0.500000001 x", True),
    ("2", "2.0", True),
    ("0.5", "0.51", False),
    ("1000000007", "1000000008", False),
    ("1 2", "1\n2", False),
    ("YES", "yes", False),
    ("inf", "5", False),
    ("5", "", False),
]


def test_same_output_compares_words_of_lines_within_tolerance():
    assert [(a, b, same_output(a, b)) for a, b, _ in OUTPUTS] == OUTPUTS


def test_same_value_compares_floats_within_tolerance():
    assert same_value([{"a": 0.1 + 0.2}, "x", None], [{"a": 0.3}, "x", None])
    assert not same_value([1, 2], [1, 2, 3])
    assert not same_value(1_000_000_007, 1_000_000_008)


@pytest.mark.parametrize(
    "row",
    [
        {"tests": {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}},
        {"tests": {"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "add"}},
        {"tests": '{"inputs": ["1\\n2"], "outputs": ["3"], "fn_name": "add"}'},
        {"tests": [{"input": "1\n2", "output": "3", "testtype": "functional"}], "fn_name": "add"},
        {"tests": [{"input": "1\n2", "output": "3", "metadata": {"func_name": "add"}}]},
        {"tests": '[{"input": "1\\n2", "output": "3"}]', "metadata": '{"func_name": "add"}'},
    ],
)
def test_read_tests_for_a_function_accepts_its_result(row):
    (test,) = read_tests(row["tests"], row.get("fn_name"), row.get("metadata"))

    assert (test.function, test.arguments) == ("add", [1, 2])
    assert test.accepts("\n3")
    assert not test.accepts("\n4")
    assert not test.accepts("")


def test_read_tests_with_json_text_reads_the_result_as_json():
    (test, listed) = read_tests([{"input": "1", "output": "true"}, {"input": "1", "output": "[1]"}], "f")

    assert test.accepts("\ntrue")
    assert not test.accepts('\n"true"')
    assert listed.accepts("\n[1]")
    assert not listed.accepts("\n1")


@pytest.mark.parametrize(
    "tests",
    [
        [{"input": "1\n2", "output": "3"}],
        '[{"input": "1\\n2", "output": "3", "testtype": "stdin"}]',
        {"inputs": ["1\n2"], "outputs": ["3\n"]},
        {"input": ["1\n2"], "output": ["3\n"]},
        {"input": "1\n2", "output": "3\n"},
        {"inputs": [["1", "2"]], "outputs": [["3"]], "fn_name": None},
    ],
)
def test_read_tests_for_a_script_compares_its_output(tests):
    (test,) = read_tests(tests, metadata="from a contest")

    assert test.script("code") == ("code", "1\n2")
    assert test.accepts("3.0\n")


def test_read_tests_with_an_input_of_zero_keeps_it():
    assert [test.arguments for test in read_tests([{"input": value, "output": 0} for value in (0, None)])] == ["0", ""]


def test_read_tests_keeps_text_that_is_listed_or_is_not_json():
    (plain,) = read_tests([{"input": "hello\n2", "output": "hellohello"}], "f")
    (listed,) = read_tests({"inputs": [["a"]], "outputs": ["1"], "fn_name": "f"})

    assert plain.arguments == ["hello", 2]
    assert plain.accepts('\n"hellohello"')
    assert listed.accepts('\n"1"')
    assert not listed.accepts("\n1")


@pytest.mark.parametrize(
    "tests",
    [
        [],
        "no JSON",
        5,
        [5],
        [{"input": "1"}],
        [{"input": "1", "output": None}],
        {"inputs": ["1", "2"], "outputs": ["1"]},
        {"inputs": "12", "outputs": ["3", "4"]},
        [{"input": "1", "output": "1", "testtype": "functional"}],
    ],
)
def test_code_reward_with_unreadable_tests_raises_reward_error(tests):
    with pytest.raises(RewardError, match="expected `tests`"):
        code_reward_fn("", ADDS, [], [], tests=tests)


SOLUTION = """class Solution:
    def twice(self, counts: Dict[int, int], name: str = "") -> Dict[int, int]:
        return {key + 1: 2 * value for key, value in counts.items()}

if __name__ == "__main__":
    print(Solution().twice(eval(input())))
"""


def test_code_reward_calls_a_method_of_class_solution():
    tests = {"inputs": [[{"1": 2}, "x"]], "outputs": [[{"2": 4}]], "fn_name": "twice"}

    assert code_reward_fn("", f"{FENCE}python\n{SOLUTION}{FENCE}", [], [], tests=tests) == 1.0


def test_code_reward_without_own_definition_of_the_function_is_zero():
    tests = {"inputs": [[4, 6]], "outputs": [4096], "fn_name": "pow"}  # a function of `builtins` and of `math`
    defines = "def pow(*values):\n    return 4096"

    assert code_reward_fn("", f"{FENCE}python\ndef other(): pass\n{FENCE}", [], [], tests=tests) == 0.0
    assert code_reward_fn("", f"{FENCE}python\n{defines}\n{FENCE}", [], [], tests=tests) == 1.0


def test_code_reward_fraction_is_the_fraction_of_passed_tests():
    sandbox = Sandbox()
    completion = f"{FENCE}python\nprint(max(0, sum(map(int, input().split())) - 4))\n{FENCE}"
    tests = [{"input": "1 -1", "output": "0"}, {"input": "2 3", "output": "5"}]

    with collect() as metrics:
        rewards = [CodeReward(sandbox, fraction=fraction)("", completion, [], [], tests=tests) for fraction in (0, 1)]

    assert rewards == [0.0, 0.5]
    assert metrics.results() == {"code/passed": 0.5, "reward/timeouts": 0.0}


ENDLESS = f"{FENCE}python\na, b = map(int, input().split())\nwhile b < 0: pass\nprint(a + b)\n{FENCE}"


def test_code_reward_timeout_skips_remaining_tests_and_scores_zero():
    tests = [{"input": "2 3", "output": "5"}, *({"input": f"{n} -1", "output": f"{n - 1}"} for n in range(50))]
    reward = CodeReward(Sandbox(SandboxLimits(seconds=2)), fraction=True)

    with collect() as metrics:
        assert reward("", ENDLESS, [], [], tests=tests) == 0.0

    assert metrics.results() == {"code/passed": 1 / 51, "reward/timeouts": 1.0}


def test_code_reward_with_many_slow_tests_has_one_deadline():
    completion = f"{FENCE}python\nimport time\ntime.sleep(0.4)\nprint(input())\n{FENCE}"
    reward = CodeReward(Sandbox(SandboxLimits(seconds=2)), seconds=2)

    with collect() as metrics:
        assert reward("", completion, [], [], tests=[{"input": "1", "output": "1"}] * 20) == 0.0

    assert metrics.results()["reward/timeouts"] == 1.0


@pytest.mark.slow
async def test_code_reward_in_a_worker_scores_a_timeout_before_its_deadline():
    async with AsyncRewardWrapper("code", timeout=5.0) as reward:
        with collect() as metrics:
            assert await reward("", ENDLESS, [], [], tests=[{"input": "1 -1", "output": "0"}]) == 0.0

    assert metrics.results()["reward/timeouts"] == 1.0
