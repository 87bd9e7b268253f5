"""A reward of programs: 1.0 where a completion's Python code passes its tests, in a sandbox."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rl_contracts.errors import RewardError
from rl_contracts.metrics import record
from rl_contracts.sandbox import Sandbox

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


class CodeReward:
    """Runs the last code block of a completion once for each test, and compares what it prints with what it should.

    Args:
        sandbox: None: one with the default limits. The reward's deadline (`rollout.reward_timeout`) holds for all tests
            of a completion together.

    Raises:
        ConfigError: the kernel cannot confine a process.
    """

    def __init__(self, sandbox: Sandbox | None = None) -> None:
        self._sandbox = sandbox or Sandbox()

    def __call__(
        self,
        prompt: str,
        completions: str,
        prompt_ids: list[int],
        completion_ids: list[int],
        tests: Sequence[dict[str, str]] | None = None,
        **_: Any,
    ) -> float:
        """1.0 if all tests pass, else 0.0; the fraction that did is recorded as `code/passed`.

        Args:
            tests: each with `input`, which the program reads from stdin, and `output`, what it must print, but for
                blanks at the ends of lines.

        Raises:
            RewardError: no tests.
            LaunchError: the sandbox's process could not be started.
        """
        if not tests:
            raise RewardError("code: expected `tests`, each with `input` and `output`, found none; check the data row.")
        blocks = _BLOCK.findall(completions.rpartition("</think>")[2])
        passed = sum(self._passes(blocks[-1], test) for test in tests) if blocks else 0
        record("code/passed", passed / len(tests))
        return float(passed == len(tests))

    def _passes(self, code: str, test: dict[str, str]) -> bool:
        run = self._sandbox.run(code, test.get("input", ""))
        return run.code == 0 and _lines(run.output) == _lines(test["output"])


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


code_reward_fn = CodeReward()
"""With the default limits. Its module can be imported only where the kernel confines processes."""
