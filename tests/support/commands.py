"""Run a command of this project in a test, and read its output, its workers and its records."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rl_contracts.runtime.json_lines import json_lines
from rl_contracts.runtime.run_files import read_json
from rl_contracts.testing.waiting import wait_until
from rl_monitor.run_directory import names_of

BIN = Path(sys.executable).parent


def call(*words: object, seconds: float = 250.0) -> str:
    """Run a command that ends, for example `rl status RUN`, and return its output.

    Raises:
        AssertionError: its exit code is not 0.
    """
    line = [str(BIN / str(words[0])), *map(str, words[1:])]
    result = subprocess.run(line, capture_output=True, text=True, timeout=seconds)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


class Command:
    """A training command in a process, with its output in a file next to the run directory.

    Args:
        name: program name, such as `gsm8k-grpo`.
        run_dir: run directory.
        settings: values by name of the setting.
    """

    def __init__(self, name: str, run_dir: Path, settings: dict[str, Any]) -> None:
        self.run_dir = run_dir
        self.line = [str(BIN / name), f"run_dir={run_dir}", *(f"{key}={value}" for key, value in settings.items())]
        self.restart()

    def restart(self) -> None:
        """Start the same command again."""
        self._log = self.run_dir.with_suffix(f".out{len(list(self.run_dir.parent.glob('*.out*')))}")
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                self.line,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=partial(
                    signal.signal, signal.SIGINT, signal.SIG_DFL
                ),  # a shell ignores it in background jobs
            )

    @property
    def output(self) -> str:
        """Output of the current process so far."""
        return self._log.read_text()

    def wait_for(self, condition: Callable[[], bool], seconds: float = 300.0) -> None:
        """Wait until the condition holds. Fail if the command ends first."""

        def holds() -> bool:
            if condition():
                return True
            assert self.process.poll() is None, self.output
            return False

        wait_until(holds, seconds, what=lambda: f"{inspect.getsource(condition)}\n{self.output}")

    def has_recovery_checkpoint(self) -> bool:
        """Return whether the run has a recovery checkpoint."""
        return bool(list((self.run_dir / "recover").glob("step_*")))

    def workers(self) -> dict[str, dict[str, Any]]:
        """Return the workers by name, with node, host, port and process id."""
        return {worker["name"]: worker for worker in read_json(names_of(self.run_dir), "workers") or []}

    def send_signal(self, worker: str, number: int) -> None:
        os.kill(self.workers()[worker]["pid"], number)

    def finish(self, seconds: float = 250.0, code: int = 0) -> str:
        """Wait for the end of the command and return its output. Fail after `seconds`, or on another exit code."""
        try:
            exit_code = self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds:g} s\n{self.output}") from None
        assert exit_code == code, self.output
        return self.output

    def kill(self) -> None:
        """Terminate the command, and kill it if it does not stop its workers within 60 s."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()

    def records(self) -> list[dict[str, Any]]:
        """Return the records of `metrics.jsonl` so far."""
        file = self.run_dir / "metrics.jsonl"
        return list(json_lines(file)) if file.exists() else []

    def steps(self) -> list[dict[str, Any]]:
        """Return the records of training steps."""
        return [record for record in self.records() if "sequences" in record]

    def trained_completions(self) -> Counter[str]:
        """Return the number of trained completions per prompt."""
        rollouts = (self.run_dir / "rollouts").glob("step_*-*.jsonl")
        completions = (record for path in rollouts for record in json_lines(path))
        return Counter(record["prompt_id"] for record in completions if record["rejected"] is None)
