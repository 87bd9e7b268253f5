"""The process of one tracker: `python -m rl_trainers.tracking_process`, told of its run in the first line of its input.

It follows `metrics.jsonl` until its input ends, as it does with the command that started it. `trackers/<name>.json` in
the run directory keeps the tracker's id of the run, and how far it has come: the last step, and how many of its lines.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from rl_contracts.registry import load_parts
from rl_contracts.tracking import TrackedRun, Tracker
from rl_trainers.tracking import TrackersConfig

LOOK_EVERY = 0.5
"""Seconds between two looks at the file."""
NOTHING = (-1, 0)
"""Before the first line."""
LABELS = ("step", "timestamp", "evaluation")
"""Entries of a record that are no figures."""

Place = tuple[int, int]
"""A line of `metrics.jsonl`: its step, and the how manieth of that step it is."""


def main() -> int:
    """Follow the run; the exit code is 0 when all figures were sent."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends with the command, and after it
    with open(0, "rb", buffering=0, closefd=False) as line:  # nothing of what follows may wait in a buffer
        told = json.loads(line.readline())
    sys.path.insert(0, "") if "" not in sys.path else None
    tracker: Tracker = load_parts(TrackersConfig(**told["config"]))[told["index"]]
    followed = Followed(tracker, Path(told["run_dir"]), told)
    while not followed.session():
        pass
    return 0


class Followed:
    """A tracker, and how far it has come with a run.

    Args:
        tracker: not open.
        run_dir: of the run.
        told: `tracker` (its name), `name`, `project` and `settings` of the run, and `lines`, those that its file had
            when the command began.
    """

    def __init__(self, tracker: Tracker, run_dir: Path, told: dict[str, Any]) -> None:
        self._tracker, self._metrics, self._told = tracker, run_dir / "metrics.jsonl", told
        self._directory = run_dir / "trackers" / told["tracker"]
        self._directory.mkdir(parents=True, exist_ok=True)
        self._state = self._directory.with_name(f"{told['tracker']}.json")

    def session(self) -> bool:
        """Send what is written until the run is over, or until its trainers start anew, which cut off what was lost.

        Returns:
            whether it is over.
        """
        run_id, sent = self._read()
        file = Following(self._metrics)
        found = list(numbered(file.records()))
        kept = found[: self._told.pop("lines", len(found))]  # the trainers of the command may be faster than this
        last = kept[-1][0] if kept else NOTHING
        if self._tracker.rewinds:
            sent = min(sent, last)
        run_id = self._tracker.open(self._run(run_id, last[0]))
        self._write(run_id, sent)
        over = replaced = False
        while True:
            for place, record in found:
                last = place
                if place > sent:
                    self._tracker.log(figures_of(record), place[0], record.get("timestamp", time.time()))
                    sent = place
                    self._write(run_id, sent)
            if over or replaced:
                break
            over = bool(select.select([sys.stdin], [], [], LOOK_EVERY)[0])
            replaced = file.replaced()
            found = list(numbered(file.records(), last))
        self._tracker.close()
        return over and not replaced

    def _run(self, run_id: str, step: int) -> TrackedRun:
        told = self._told
        return TrackedRun(told["name"], told["project"], self._directory, told["settings"], run_id, step)

    def _read(self) -> tuple[str, Place]:
        if not self._state.exists():
            return "", NOTHING
        state = json.loads(self._state.read_text())
        return state["id"], (state["step"], state["lines"])

    def _write(self, run_id: str, sent: Place) -> None:
        scratch = self._state.with_suffix(".partial")
        scratch.write_text(json.dumps({"id": run_id, "step": sent[0], "lines": sent[1]}))
        os.replace(scratch, self._state)


class Following:
    """Reads a file of JSON lines while it grows.

    Args:
        path: which need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def records(self) -> Iterator[dict[str, Any]]:
        """Those of the whole lines that were not read yet; what is no JSON is passed over."""
        if self._file is None and self._path.exists():
            self._file = self._path.open("rb")
        while self._file is not None:
            place = self._file.tell()
            line = self._file.readline()
            if not line.endswith(b"\n"):
                self._file.seek(place)
                return
            with suppress(ValueError):
                yield json.loads(line)

    def replaced(self) -> bool:
        """Whether another file stands in the place of the one that is read."""
        if self._file is None:
            return False
        there = self._path.stat().st_ino if self._path.exists() else None
        return there != os.fstat(self._file.fileno()).st_ino


def numbered(records: Iterable[dict[str, Any]], after: Place = NOTHING) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Records with their places.

    Args:
        after: the place of the record before them.
    """
    step, count = after
    for record in records:
        count = count + 1 if record["step"] == step else 1
        step = record["step"]
        yield (step, count), record


def figures_of(record: dict[str, Any]) -> dict[str, float]:
    """The figures of a record that could be measured."""
    return {name: float(value) for name, value in record.items() if name not in LABELS and value is not None}


if __name__ == "__main__":
    sys.exit(main())
