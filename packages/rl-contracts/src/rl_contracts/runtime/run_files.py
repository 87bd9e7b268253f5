"""Files of a run directory that writers (trainers, apps) and readers (rl-monitor) share."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rl_contracts.runtime.name_service import NameService, UnknownNameError

MANIFEST = "manifest.json"
"""Last file written to a checkpoint directory: the size of each other file, and the CRC-32 of small files."""
SMALL = 1 << 20
"""Largest size in bytes of a file whose CRC-32 is compared. For larger files only the size is compared."""
GROUPS_FILE = "groups.jsonl"
"""File of a run with one line per prompt: its outcome (`RolloutRuntime.outcomes`) and the step that recorded it."""
TAIL_BYTES = 256 * 1024
"""Maximum number of bytes read from the end of a log, which bounds the cost of a huge log."""
FINAL_STATES = ("finished", "stopped", "failed")
"""States in which a run writes nothing more."""
REPORT_FILE = "report.html"
"""Name of a run's HTML report; see `rl_monitor.report`."""
STAGE_FILE = "stage.json"
"""Stage of the trainer; exists during its first step and its evaluations, while the run writes no record."""
WRITE_SECONDS = 1.0
"""Seconds between two writes of the progress of a stage."""
_progress: list[int] | None = None
"""Finished and total items of the stage that this process shows; empty if unknown, None without a stage."""


def steps_in(directory: Path) -> list[int]:
    """Return the steps `n` of the entries `step_<n>` in a directory, ascending. Other entries are ignored."""
    matches = (re.fullmatch(r"step_(\d+)", path.name) for path in directory.glob("step_*"))
    return sorted(int(match[1]) for match in matches if match)


def find_damage(directory: Path) -> str:
    """Describe how a directory differs from its manifest; empty if it is complete and undamaged."""
    try:
        files = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__}: {error})"
    for name, expected in files.items():
        try:
            actual = _size_and_crc(directory / name)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if actual != expected:
            return f"{name}: expected [bytes, checksum] {expected}, found {actual}"
    return ""


def _size_and_crc(file: Path) -> list[int | None]:
    """Return the size in bytes and the CRC-32 of a file; None instead of the CRC-32 of a large file."""
    size = file.stat().st_size
    return [size, zlib.crc32(file.read_bytes()) if size <= SMALL else None]


def recovery_checkpoint_steps(run_dir: Path) -> list[int]:
    """Return the steps of a run's recovery checkpoints, ascending, including incomplete ones."""
    return steps_in(run_dir / "recover")


def last_recovery_checkpoint(directory: Path) -> int | None:
    """Return the step of the latest undamaged checkpoint in a `recover` directory, or None."""
    steps = reversed(recovery_checkpoint_steps(directory.parent))
    return next((step for step in steps if not find_damage(directory / f"step_{step}")), None)


def tail(log: Path, lines: int, offset: int = 0) -> str:
    """Return the last lines of a log, starting at byte `offset` at the earliest; empty if it cannot be read."""
    if lines < 1:
        return ""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(offset, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def read_json(names: NameService, key: str) -> Any:
    """Return the decoded value of a key that holds JSON, or None if the key does not exist."""
    try:
        return json.loads(names.get(key))
    except UnknownNameError:
        return None


def seconds_since_heartbeat(names: NameService, status: Mapping[str, Any]) -> float:
    """Return the seconds since the last heartbeat of a run's launcher.

    The launcher is alive if the result is below three heartbeat intervals. On the launcher's host, the function returns
    at once if the heartbeat is recent. Otherwise the age may be wrong: clocks of hosts differ, and the machine may have
    been suspended. The function then waits up to three intervals for another heartbeat.
    """
    interval = float(status["beat_seconds"])
    age = max(0.0, time.time() - status["time"])
    if status["host"] == socket.gethostname() and age <= 3 * interval:
        return age
    deadline = time.monotonic() + 3 * interval
    while time.monotonic() < deadline:
        now = read_json(names, "status") or status
        if (now["beat"], now["pid"], now["state"]) != (status["beat"], status["pid"], status["state"]):
            return 0.0
        time.sleep(interval / 4)
    return max(4 * interval, age)


def report_progress(done: int, total: int) -> None:
    """Report the finished and the total items of the current stage, such as examples. Cheap, and safe on any thread."""
    if _progress is not None:
        _progress[:] = done, total


class StageFile:
    """Writer of `stage.json`, for the rank that writes the records of a run.

    A full or unavailable disk is ignored, because only displays read the file.

    Args:
        run_dir: run directory.
        ranks: number of ranks that share the items of a stage equally; this rank reports its own.
    """

    def __init__(self, run_dir: Path, ranks: int = 1) -> None:
        self._file, self._ranks = run_dir / STAGE_FILE, ranks
        self._remove()  # of a killed trainer

    @contextmanager
    def show(self, stage: str) -> Iterator[None]:
        """Write a stage and its progress in a thread while the block runs, and remove the file afterwards."""
        global _progress
        _progress, ended = [], threading.Event()
        thread = threading.Thread(target=self._write, args=(stage, _progress, ended), name="stage", daemon=True)
        thread.start()
        try:
            yield
        finally:
            _progress = None
            ended.set()
            thread.join()
            self._remove()

    def _write(self, stage: str, progress: list[int], ended: threading.Event) -> None:
        content, written = {"stage": stage, "since": time.time()}, None
        while written is None or not ended.wait(WRITE_SECONDS):
            items = [self._ranks * number for number in progress]
            if items != written:
                written = items
                scratch = self._file.with_suffix(".partial")
                with suppress(OSError):
                    scratch.write_text(json.dumps(content | {"progress": items}))
                    scratch.replace(self._file)

    def _remove(self) -> None:
        with suppress(OSError):
            self._file.unlink()


def read_stage(run_dir: Path) -> dict[str, Any] | None:
    """Return `stage`, `since` (seconds since the epoch) and `progress` (empty, or finished and total items) of a run.

    None if no stage is shown.
    """
    with suppress(OSError, ValueError):
        content: dict[str, Any] = json.loads((run_dir / STAGE_FILE).read_text())
        return content
    return None
