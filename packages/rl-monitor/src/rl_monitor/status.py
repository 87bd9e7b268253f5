"""Status of a run, read from its directory on any machine that can access it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_contracts import registry
from rl_contracts.errors import ConfigError
from rl_contracts.runtime.name_service import NameService
from rl_contracts.runtime.run_files import FINAL_STATES, read_json, seconds_since_heartbeat
from rl_contracts.scheduler import SchedulerConfig
from rl_monitor.run_directory import FINISHED, JOB, NAMES, last_record, names_of, progress_of

POLL_SECONDS = 0.5
"""Seconds between two polls of a file."""
ALIVE_EVERY = 5.0
"""Seconds between two heartbeat checks of a launcher."""


def status_of(directory: Path) -> dict[str, Any]:
    """Return the status of a run.

    The keys include `state`, `launcher` (host, process, seconds since its last heartbeat), `busy` (seconds since the
    launcher's last poll), `step`, `version`, the last `record` and its age, `recover_point` (step of the newest
    recovery checkpoint), `trainer_restarts` with their `history`, and `workers`.

    `state` is `pending` while the job of the run waits (`job`: description by its scheduler). Otherwise it is
    `preparing`, `starting`, `running`, `restarting`, `stopping`, `stopped`, `finished`, `failed`, `unknown`, or `lost`:
    the launcher missed three heartbeats, so all processes of the run end.

    Raises:
        ConfigError: the directory contains no run.
    """
    names = require_names(directory)
    status = read_json(names, "status") or {"state": "unknown"}
    record, metrics = last_record(directory), directory / "metrics.jsonl"
    info = {"run": str(directory), "state": status["state"], "error": status.get("error", "")}
    if (directory / FINISHED).exists() and status["state"] in (*FINAL_STATES, "unknown"):
        info |= {"state": "finished", "error": ""}
    elif status["state"] not in (*FINAL_STATES, "unknown"):
        silent = seconds_since_heartbeat(names, status)
        info |= {"state": "lost"} if silent > 3 * status["beat_seconds"] else {}
        info |= {"launcher": {"host": status["host"], "pid": status["pid"], "silent": round(silent, 1)}}
        info |= {"busy": status["looked"]}
    if "launcher" not in info or info["state"] == "lost":
        info |= {"job": _job_scheduler(names).job_state(directory)}
        info |= {"state": "pending"} if info["job"].startswith("pending") else {}
    age = round(time.time() - metrics.stat().st_mtime, 1) if record else None
    return info | {
        "step": record.get("step", 0),
        "version": record.get("version", 0),
        "recover_point": progress_of(directory)[1],
        "record": record,
        "record_age": age,
        "trainer_restarts": status.get("trainer_restarts", 0),
        "history": status.get("history", []),
        "workers": read_json(names, "workers") or [],
    }


def _job_scheduler(names: NameService) -> SchedulerConfig:
    """Return settings of the scheduler to which the run was submitted, or of a scheduler without jobs."""
    kind = read_json(names, JOB)
    settings: SchedulerConfig = registry.settings("rl.schedulers", kind)() if kind else SchedulerConfig()
    return settings


def read_new_lines(path: Path, read: dict[Path, int]) -> str:
    """Return the complete lines appended to a file since the last call, and update its offset in `read`."""
    with path.open("rb") as file:
        file.seek(read.get(path, 0))
        lines, newline, _ = file.read().rpartition(b"\n")
    read[path] = read.get(path, 0) + len(lines + newline)
    return lines.decode(errors="replace")


def while_alive(names: NameService) -> Iterator[None]:
    """Yield repeatedly while the launcher of a run is alive, and once more after its end."""
    next_check, is_alive = 0.0, True
    while is_alive:
        status = read_json(names, "status")
        is_alive = status is not None and status["state"] not in FINAL_STATES
        if is_alive and time.monotonic() > next_check:
            is_alive = seconds_since_heartbeat(names, status) <= 3 * status["beat_seconds"]
            next_check = time.monotonic() + ALIVE_EVERY
        yield
        time.sleep(POLL_SECONDS if is_alive else 0)


def require_names(directory: Path) -> NameService:
    """Return the name service of an existing run.

    Raises:
        ConfigError: the directory contains no run.
    """
    if not (directory / NAMES).is_dir() and not (directory / "config.yaml").is_file():
        raise ConfigError(
            f"{directory}: expected the directory of a run (run_dir), found none of its files. Commands print it at "
            "their end; the default is runs/<experiment>/<trial>."
        )
    return names_of(directory)
