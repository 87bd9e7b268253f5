"""Files of a run directory that writers (trainers, apps) and readers (rl-monitor) share."""

from __future__ import annotations

import json
import re
import socket
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_contracts.runtime.name_service import NameService, UnknownNameError

MANIFEST = "manifest.json"
"""File of a directory, written last: the size of each other file, and the CRC-32 of small ones."""
SMALL = 1 << 20
"""Bytes up to which a file's content is compared, and not only its size."""
GROUPS_FILE = "groups.jsonl"
"""File of a run: what became of each prompt (`RolloutRuntime.outcomes`), under the step whose record came after it."""
TAIL_BYTES = 256 * 1024
"""Read from the end of a log at most, so that a huge log costs nothing."""
FINAL_STATES = ("finished", "stopped", "failed")
"""States after which nothing more is written."""
REPORT_FILE = "report.html"
"""Page of a run; see `rl_monitor.report`."""


def steps_in(directory: Path) -> list[int]:
    """Steps of the directories `step_<n>` below a directory, ascending; what else lies there is somebody else's."""
    found = (re.fullmatch(r"step_(\d+)", path.name) for path in directory.glob("step_*"))
    return sorted(int(match[1]) for match in found if match)


def find_damage(directory: Path) -> str:
    """What is wrong with a directory that was written with a manifest, in words; empty where nothing is."""
    try:
        files = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__}: {error})"
    for name, expected in files.items():
        try:
            found = _size_and_crc(directory / name)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if found != expected:
            return f"{name}: expected [bytes, checksum] {expected}, found {found}"
    return ""


def _size_and_crc(file: Path) -> list[int | None]:
    """Size in bytes, and of a small file CRC-32 of its content."""
    size = file.stat().st_size
    return [size, zlib.crc32(file.read_bytes()) if size <= SMALL else None]


def recovery_checkpoint_steps(run_dir: Path) -> list[int]:
    """Steps of the recover points of a run, whole or not, ascending."""
    return steps_in(run_dir / "recover")


def last_recovery_checkpoint(directory: Path) -> int | None:
    """Step of the latest whole point in a `recover` directory."""
    steps = reversed(recovery_checkpoint_steps(directory.parent))
    return next((step for step in steps if not find_damage(directory / f"step_{step}")), None)


def tail(log: Path, lines: int, offset: int = 0) -> str:
    """The last lines of a log from byte `offset` on; empty where there are none, or it cannot be read."""
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
    """The value of a name that holds JSON; None where there is none."""
    try:
        return json.loads(names.get(key))
    except UnknownNameError:
        return None


def seconds_since_heartbeat(names: NameService, status: Mapping[str, Any]) -> float:
    """Seconds for which a run's launcher gave no sign of life; less than three beats: it lives.

    On its own host the clock tells that it lives. Clocks elsewhere may differ, and a machine may have slept, so else
    this waits for another beat, for three at most.
    """
    beat = float(status["beat_seconds"])
    age = max(0.0, time.time() - status["time"])
    if status["host"] == socket.gethostname() and age <= 3 * beat:
        return age
    deadline = time.monotonic() + 3 * beat
    while time.monotonic() < deadline:
        now = read_json(names, "status") or status
        if (now["beat"], now["pid"], now["state"]) != (status["beat"], status["pid"], status["state"]):
            return 0.0
        time.sleep(beat / 4)
    return max(4 * beat, age)
