"""Trackers of a run, each in a process of its own that reads `metrics.jsonl` (`rl_trainers.tracking_process`).

The file is the queue: training writes it anyway and waits for nobody, and a tracker that is slow or away for a while
loses nothing. One that fails or hangs is told of once, and ended at the latest when the run is over.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from rl_contracts.config import PartConfig, bounded
from rl_contracts.registry import load_parts
from rl_contracts.scheduler import RUN_KEY_VARIABLE
from rl_contracts.tracking import Tracker


@dataclass
class TrackersConfig(PartConfig):
    """Where the figures of the run are shown besides its own directory."""

    setting: ClassVar[str] = "trackers"
    group: ClassVar[str] = "rl.trackers"
    kind: str = "none"
    """`tensorboard`, `wandb`, `trackio`, `mlflow`, `swanlab`, anybody's as a dotted path, several joined by `+`, or
    `none`. `trackers=NAME` and `trackers=[NAME,NAME]` are short for it."""
    project: str = ""
    """What the run belongs to there; empty: `experiment`."""
    name: str = ""
    """Its name there; empty: that of its directory."""
    close_seconds: float = bounded(30.0, "0 or more", lambda seconds: seconds >= 0)
    """Seconds that trackers have at the end of a run to send what is left; then they are ended, with a warning."""


def load_trackers(config: TrackersConfig) -> list[Tracker]:
    """The trackers of a config, none of them open.

    Raises:
        ConfigError: one is unknown or its library is missing, or an option is none of theirs.
    """
    trackers: list[Tracker] = load_parts(config)
    for tracker in trackers:
        tracker.check()
    return trackers


class Tracking:
    """The trackers of one command, as a context manager: they start with it, and what is left is sent at its end.

    Args:
        config: which.
        run_dir: of the run, whose `metrics.jsonl` they read.
        project: what the run belongs to, unless `config` says.
        settings: of the run, for people to look at.
        say: told what becomes of a tracker that is lost.
    """

    def __init__(
        self, config: TrackersConfig, run_dir: Path, project: str, settings: dict[str, Any], say: Callable[[str], None]
    ) -> None:
        self._config, self._run_dir, self._say = config, run_dir, say
        self._told: dict[str, Any] = {
            "config": asdict(config),
            "run_dir": str(run_dir),
            "project": config.project or project,
            "name": config.name or run_dir.name,
            "settings": settings,
        }
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Tracking:
        metrics = self._run_dir / "metrics.jsonl"
        self._told["lines"] = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        for index, kind in enumerate(self._config.kind.split("+") if self._config.kind != "none" else ()):
            name = re.sub(r"\W+", "-", kind)
            self._running[name] = self._start(name, index)
        return self

    def __exit__(self, *_: object) -> None:
        deadline = time.monotonic() + self._config.close_seconds
        try:
            self.tick()
            for process in self._running.values():
                assert process.stdin is not None
                process.stdin.close()  # the run is over
            for name, process in self._running.items():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(deadline - time.monotonic(), 0))
                if process.returncode is None:
                    self._say(
                        f"warning: tracker {name} had not sent all figures trackers.close_seconds="
                        f"{self._config.close_seconds:g} s after the run, and was ended; {self._where(name)}"
                    )
            self.tick()
        finally:
            for process in self._running.values():
                with suppress(ProcessLookupError):  # with what it has started itself
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def tick(self) -> None:
        """Say which trackers were lost since the last time."""
        for name, process in list(self._running.items()):
            if process.poll():
                del self._running[name]
                lines = self._log(name).read_text(errors="replace").strip().splitlines()
                cause = lines[-1].strip() if lines else f"exit code {process.returncode}"
                self._say(f"warning: tracker {name} is lost, and the run goes on without: {cause}; {self._where(name)}")

    def _start(self, name: str, index: int) -> subprocess.Popen[bytes]:
        self._log(name).parent.mkdir(parents=True, exist_ok=True)
        with self._log(name).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "rl_trainers.tracking_process"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={key: value for key, value in os.environ.items() if key != RUN_KEY_VARIABLE},
                start_new_session=True,  # Ctrl-C is for the run, at whose end it still has something to send
            )
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # lost already, as `tick` will see
            process.stdin.write(json.dumps({**self._told, "tracker": name, "index": index}).encode() + b"\n")
            process.stdin.flush()
        return process

    def _log(self, name: str) -> Path:
        return self._run_dir / "logs" / f"tracker-{name}.log"

    def _where(self, name: str) -> str:
        return f"see {self._log(name)}. The figures are in {self._run_dir / 'metrics.jsonl'}"
