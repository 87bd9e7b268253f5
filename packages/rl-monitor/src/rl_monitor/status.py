"""The status of a run, from its directory, on any machine that sees it."""

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

LOOK_EVERY = 0.5
"""Seconds between two looks at a file."""
ALIVE_EVERY = 5.0
"""Seconds between two looks at whether a launcher lives that is waited for."""


def status_of(directory: Path) -> dict[str, Any]:
    """What is known of a run: `state`, `launcher` (host, process, seconds since its last sign of life), `step`,
    `version`, `total_steps`, `record` and its age, `recover_point`, `trainer_restarts` with their `history`, `workers`.

    `state` is `pending` where the run's job waits (`job`: in its scheduler's words); else `preparing`, `starting`,
    `running`, `restarting`, `stopping`, `stopped`, `finished`, `failed`, or `lost`: the launcher gave no sign of life
    for three beats, and so nothing runs any more.

    Raises:
        ConfigError: no run was ever started there.
    """
    names = require_names(directory)
    status = read_json(names, "status") or {"state": "unknown"}
    record, metrics = last_record(directory), directory / "metrics.jsonl"
    found = {"run": str(directory), "state": status["state"], "error": status.get("error", "")}
    if (directory / FINISHED).exists() and status["state"] in (*FINAL_STATES, "unknown"):
        found |= {"state": "finished", "error": ""}
    elif status["state"] not in (*FINAL_STATES, "unknown"):
        silent = seconds_since_heartbeat(names, status)
        found |= {"state": "lost"} if silent > 3 * status["beat_seconds"] else {}
        found |= {"launcher": {"host": status["host"], "pid": status["pid"], "silent": round(silent, 1)}}
        found |= {"busy": status["looked"]}
    if "launcher" not in found or found["state"] == "lost":
        found |= {"job": _submitted_to(names).job_state(directory)}
        found |= {"state": "pending"} if found["job"].startswith("pending") else {}
    age = round(time.time() - metrics.stat().st_mtime, 1) if record else None
    return found | {
        "step": record.get("step", 0),
        "version": record.get("version", 0),
        "recover_point": progress_of(directory)[1],
        "record": record,
        "record_age": age,
        "trainer_restarts": status.get("trainer_restarts", 0),
        "history": status.get("history", []),
        "workers": read_json(names, "workers") or [],
    }


def _submitted_to(names: NameService) -> SchedulerConfig:
    """The settings of the scheduler that was given a run as a job; of one that has no jobs, if none was."""
    kind = read_json(names, JOB)
    settings: SchedulerConfig = registry.settings("rl.schedulers", kind)() if kind else SchedulerConfig()
    return settings


def read_new_lines(path: Path, read: dict[Path, int]) -> str:
    """The whole lines of a file behind what was read of it, which is counted in bytes."""
    with path.open("rb") as file:
        file.seek(read.get(path, 0))
        whole, end, _ = file.read().rpartition(b"\n")
    read[path] = read.get(path, 0) + len(whole + end)
    return whole.decode(errors="replace")


def while_alive(names: NameService) -> Iterator[None]:
    """Again and again as long as a run's launcher lives, and once more."""
    due, alive = 0.0, True
    while alive:
        status = read_json(names, "status")
        alive = status is not None and status["state"] not in FINAL_STATES
        if alive and time.monotonic() > due:
            alive = seconds_since_heartbeat(names, status) <= 3 * status["beat_seconds"]
            due = time.monotonic() + ALIVE_EVERY
        yield
        time.sleep(LOOK_EVERY if alive else 0)


def require_names(directory: Path) -> NameService:
    """The names of a run that was started at some time."""
    if not (directory / NAMES).is_dir() and not (directory / "config.yaml").is_file():
        raise ConfigError(
            f"{directory}: expected the directory of a run (run_dir), found none of its files. A command names it at "
            "its end; where nothing is said it is runs/<experiment>/<trial>."
        )
    return names_of(directory)
