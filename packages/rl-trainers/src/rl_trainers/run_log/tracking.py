"""Trackers of a run. For each tracker, the command has a thread that sends it the records of `metrics.jsonl`.

The file is the queue: training writes it in any case and never waits for a tracker. `trackers/<name>.json` in the run
directory stores the tracker's id of the run and the last record sent. A record is identified by its step and its count
within that step.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from rl_contracts.config import ComponentConfig
from rl_contracts.registry import load_components
from rl_contracts.runtime.json_lines import LineReader
from rl_contracts.tracker import TrackedRun, Tracker

POLL_SECONDS = 0.5
"""Seconds between two reads of the file."""
CLOSE_SECONDS = 30.0
"""Seconds that a command waits for its trackers at the end. No record is lost after that time, because the next command
of the run sends the rest."""
LABELS = ("step", "timestamp", "evaluation")
"""Entries of a record that are not metrics."""

Position = tuple[int, int]
"""A record of `metrics.jsonl`: its step, and its number among the records of that step, from 1."""
START: Position = (-1, 0)
"""Position before the first record."""


@dataclass
class TrackersConfig(ComponentConfig):
    """Trackers that show the metrics of a run."""

    setting: ClassVar[str] = "trackers"
    group: ClassVar[str] = "rl.trackers"
    kind: str = "none"
    """`tensorboard`, `wandb`, `trackio`, `mlflow`, `swanlab`, the dotted path of a custom tracker, several joined by
    `+`, or `none`. `trackers=NAME` and `trackers=[NAME,NAME]` are short forms."""


def load_trackers(config: TrackersConfig) -> list[Tracker]:
    """Return the trackers of a config, before they are opened.

    Raises:
        ConfigError: a tracker or an option is unknown, or a library is missing.
    """
    trackers: list[Tracker] = load_components(config)
    for tracker in trackers:
        tracker.check()
    return trackers


class Tracking:
    """Context manager that runs the trackers of one command, and waits for the remaining records at its end.

    Args:
        config: selects the trackers.
        run_dir: run directory with `metrics.jsonl`; its name is the name of the run in the trackers.
        project: project of the run in the trackers.
        settings: settings of the run, sent to each tracker.
        warn: called with a warning when a tracker fails (in its thread) or does not end in time.
    """

    def __init__(
        self, config: TrackersConfig, run_dir: Path, project: str, settings: dict[str, Any], warn: Callable[[str], None]
    ) -> None:
        self._config, self._run_dir, self._settings, self._say = config, run_dir, settings, warn
        self._project = project
        self._finished = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Tracking:
        metrics = self._run_dir / "metrics.jsonl"
        initial_records = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        kinds = self._config.kind.split("+") if self._config.kind != "none" else ()
        for kind, tracker in zip(kinds, load_components(self._config), strict=True):
            name = re.sub(r"\W+", "-", kind)
            run = TrackedRun(self._run_dir.name, self._project, self._directory(name), self._settings)
            thread = _TrackerThread(target=self._follow, args=(tracker, run, initial_records), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        self._finished.set()
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))
            if thread.is_alive():
                self._say(
                    f"warning: tracker {thread.name} has not sent all records within {CLOSE_SECONDS:g} s after the "
                    f"run; {self._remedy()}"
                )

    def _directory(self, name: str) -> Path:
        return self._run_dir / "trackers" / name

    def _follow(self, tracker: Tracker, run: TrackedRun, initial_records: int) -> None:
        try:
            run.directory.mkdir(parents=True, exist_ok=True)
            follower = _Follower(tracker, run, self._run_dir / "metrics.jsonl", self._finished, initial_records)
            while not follower.session():
                pass
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the run continues after any error of a tracker's library
            name = threading.current_thread().name
            cause = f"{type(error).__name__}: {error}"
            self._say(f"warning: tracker {name} failed; the run continues without it: {cause}; {self._remedy()}")
            with suppress(Exception):
                tracker.close()

    def _remedy(self) -> str:
        return f"the next command of the run sends the rest of {self._run_dir / 'metrics.jsonl'}"


class _TrackerThread(threading.Thread):
    """Thread of one tracker."""


def hanging_trackers() -> list[str]:
    """Return the names of trackers of this process whose threads have not ended."""
    return [thread.name for thread in threading.enumerate() if isinstance(thread, _TrackerThread)]


class _Follower:
    """Reader of a metrics file that sends the records to a tracker.

    Args:
        tracker: tracker that is not open.
        run: passed to the tracker, with its id and last step.
        metrics: file of the records.
        finished: set when no more records will be written.
        initial_records: number of records in the file when the command began.
    """

    def __init__(
        self, tracker: Tracker, run: TrackedRun, metrics: Path, finished: threading.Event, initial_records: int
    ) -> None:
        self._tracker, self._run, self._metrics, self._finished = tracker, run, metrics, finished
        self._initial_records: int | None = initial_records
        self._state = run.directory.with_name(f"{run.directory.name}.json")

    def session(self) -> bool:
        """Send records until the run ends, or until restarted trainers replace the file to remove lost steps.

        Returns:
            whether the run has ended.
        """
        run_id, sent = self._read()
        file = LineReader(self._metrics)
        records = list(numbered(file.read()))
        initial = records[: self._initial_records]  # the trainers of this command may have added further records
        self._initial_records = None
        last = initial[-1][0] if initial else START
        if self._tracker.can_rewind:
            sent = min(sent, last)
        run_id = self._tracker.open(replace(self._run, id=run_id, step=last[0]))
        self._write(run_id, sent)
        finished = replaced = False
        while True:
            for position, record in records:
                last = position
                if position > sent:
                    self._tracker.log(metrics_of(record), position[0], record.get("timestamp", time.time()))
                    sent = position
                    self._write(run_id, sent)
            if finished or replaced:
                break
            finished = self._finished.wait(POLL_SECONDS)
            replaced = file.replaced()
            records = list(numbered(file.read(), last))
        self._tracker.close()
        return finished and not replaced

    def _read(self) -> tuple[str, Position]:
        if not self._state.exists():
            return "", START
        state = json.loads(self._state.read_text())
        return state["id"], (state["step"], state["lines"])

    def _write(self, run_id: str, sent: Position) -> None:
        scratch = self._state.with_suffix(".partial")
        scratch.write_text(json.dumps({"id": run_id, "step": sent[0], "lines": sent[1]}))
        os.replace(scratch, self._state)


def numbered(records: Iterable[dict[str, Any]], after: Position = START) -> Iterator[tuple[Position, dict[str, Any]]]:
    """Yield records with their positions.

    Args:
        records: in the order of the file.
        after: position of the record before the first one.
    """
    step, count = after
    for record in records:
        count = count + 1 if record["step"] == step else 1
        step = record["step"]
        yield (step, count), record


def metrics_of(record: dict[str, Any]) -> dict[str, float]:
    """Return the measured metrics of a record."""
    return {name: float(value) for name, value in record.items() if name not in LABELS and value is not None}
