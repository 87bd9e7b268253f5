"""Reward for programs: whether the Python code of a completion passes its tests in a sandbox."""

from __future__ import annotations

import time
from typing import Any

from rl_contracts.chat.reasoning import split_reasoning
from rl_contracts.reward import time_limit
from rl_contracts.runtime.metrics import record
from rl_contracts.sandbox.sandbox import Sandbox, SandboxLimits
from rl_rewards.program_tests import ProgramTest, read_tests
from rl_rewards.programs import find_program

REWARD_TIMEOUT = 30.0
"""Seconds assumed for a call outside of a reward worker, equal to the default of `rollout.reward_timeout`."""
TESTS_SHARE = 0.8
"""Fraction of the time of a call that the tests of a program may take."""


class CodeReward:
    """Reward function that runs the program of a completion on each test and compares the results.

    `rl_rewards.programs` describes which code block is the program, `rl_rewards.program_tests` the formats of tests and
    the comparison.

    Args:
        sandbox: sandbox with the limits of each test; None for the default limits.
        fraction: whether the reward is the fraction of passed tests, instead of 1.0 for all of them and 0.0 otherwise.
        seconds: time limit for all tests of a program, at least the sandbox's limit for one test; None for 80 % of
            `rollout.reward_timeout`.

    Raises:
        ConfigError: the kernel cannot confine a process.
    """

    def __init__(self, sandbox: Sandbox | None = None, *, fraction: bool = False, seconds: float | None = None) -> None:
        self._seconds = seconds or TESTS_SHARE * (time_limit() or REWARD_TIMEOUT)
        self._sandbox = sandbox or Sandbox(SandboxLimits(seconds=min(SandboxLimits.seconds, self._seconds)))
        self._fraction = fraction

    def __call__(
        self,
        prompt: str,
        completions: str,
        prompt_ids: list[int],
        completion_ids: list[int],
        tests: Any = None,
        fn_name: str | None = None,
        metadata: Any = None,
        final_text: str | None = None,
        **_: Any,
    ) -> float:
        """Return 1.0 if all tests pass, else 0.0; or with `fraction` the fraction of passed tests.

        When a test exceeds its time, the remaining tests are skipped and the reward is 0.0. The call records the
        fraction of passed tests as `code/passed`, and the number of programs that exceed their time as
        `reward/timeouts`.

        Args:
            prompt: ignored.
            completions: text of one completion.
            prompt_ids: ignored.
            completion_ids: ignored.
            tests: tests in one of the formats of `rl_rewards.program_tests`.
            fn_name: name of the function that tests call; None if `tests` or `metadata` name it, or programs read
                stdin.
            metadata: an object with `func_name`, or its JSON text.
            final_text: the text after the reasoning; None to extract it from `completions`.

        Raises:
            RewardError: there are no tests, or they have another format.
            LaunchError: the sandbox's process could not be started.
        """
        cases = read_tests(tests, fn_name, metadata)
        text = split_reasoning(completions)[1] if final_text is None else final_text
        program = find_program(text, cases[0].function)
        passed, timed_out = (0, False) if program is None else self._count(program, cases)
        record("code/passed", passed / len(cases))
        record("reward/timeouts", timed_out, kind="sum")
        if timed_out:
            return 0.0
        return passed / len(cases) if self._fraction else float(passed == len(cases))

    def _count(self, program: str, cases: list[ProgramTest]) -> tuple[int, bool]:
        """Return the number of passed tests, and whether a test timed out, after which the rest is skipped."""
        deadline, passed = time.monotonic() + self._seconds, 0
        for index, case in enumerate(cases):
            script = case.script(program)
            # The sandbox's own limit suffices for the first test.
            remaining = (max(0.0, deadline - time.monotonic()),) if index else ()
            run = self._sandbox.run(*script, *remaining)
            if run.code == 0:
                passed += case.accepts(run.output)
            elif run.timed_out:
                return passed, True
        return passed, False


code_reward_fn = CodeReward()
"""Code reward with the default limits. Importing this module requires a kernel that can confine processes."""
