"""A command of ours under way, for tests: what it says, what runs where, what it has written."""

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
    """What a command says that ends well by itself, for example `rl status RUN`."""
    line = [str(BIN / str(words[0])), *map(str, words[1:])]
    done = subprocess.run(line, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Command:
    """A command that goes on, or has ended. Its output goes to a file beside the run directory.

    Args:
        name: of the command.
        run_dir: of the run.
        settings: further ones.
    """

    def __init__(self, name: str, run_dir: Path, settings: dict[str, Any]) -> None:
        self.run_dir = run_dir
        self.line = [str(BIN / name), f"run_dir={run_dir}", *(f"{key}={value}" for key, value in settings.items())]
        self.restart()

    def restart(self) -> None:
        """The same command once more."""
        self._log = self.run_dir.with_suffix(f".out{len(list(self.run_dir.parent.glob('*.out*')))}")
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                self.line,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
            )

    @property
    def output(self) -> str:
        """All that it has said so far."""
        return self._log.read_text()

    def wait_for(self, condition: Callable[[], bool], seconds: float = 300.0) -> None:
        """Return once the condition holds; the command must still run."""

        def holds() -> bool:
            if condition():
                return True
            assert self.process.poll() is None, self.output
            return False

        wait_until(holds, seconds, what=lambda: f"{inspect.getsource(condition)}\n{self.output}")

    def has_recovery_checkpoint(self) -> bool:
        """Whether there is a recover point."""
        return bool(list((self.run_dir / "recover").glob("step_*")))

    def workers(self) -> dict[str, dict[str, Any]]:
        """What runs, by name: its node, host, port, process."""
        return {worker["name"]: worker for worker in read_json(names_of(self.run_dir), "workers") or []}

    def send_signal(self, worker: str, number: int) -> None:
        """A signal to a worker."""
        os.kill(self.workers()[worker]["pid"], number)

    def finish(self, seconds: float = 250.0, code: int = 0) -> str:
        """What it said; fails where it did not end in time, or in another way."""
        try:
            ended = self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds:g} s\n{self.output}") from None
        assert ended == code, self.output
        return self.output

    def kill(self) -> None:
        """End it, and let it end what it started."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()

    def records(self) -> list[dict[str, Any]]:
        """What it has written of its steps and evaluations so far."""
        file = self.run_dir / "metrics.jsonl"
        return list(json_lines(file)) if file.exists() else []

    def steps(self) -> list[dict[str, Any]]:
        """Those of its steps."""
        return [record for record in self.records() if "rows" in record]

    def trained_completions(self) -> Counter[str]:
        """How many answers to each prompt it learned from."""
        rollouts = (self.run_dir / "rollouts").glob("step_*-*.jsonl")
        answers = (answer for path in rollouts for answer in json_lines(path))
        return Counter(answer["prompt_id"] for answer in answers if answer["rejected"] is None)
