"""`rl status`, `rl logs`, `rl stop` and `rl scale`. They need only the run directory, on any machine that can read it.
See `rl_monitor.watch` for `rl watch`."""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from rl_apps.run.directory import resumption, step_seconds
from rl_contracts.errors import ConfigError, StalledError
from rl_contracts.runtime.run_files import read_json, tail
from rl_contracts.runtime.terminal import colored
from rl_monitor.status import _job_scheduler, read_new_lines, require_names, status_of, while_alive

BUSY = 30.0
"""Seconds without a poll of the processes after which `rl status` reports the launcher as busy."""


def status(directory: Path, as_json: bool) -> int:
    """Print the status of a run."""
    info = status_of(directory)
    if as_json:
        print(json.dumps(info, indent=2))
        return 0
    print(f"{info['run']}: {_describe_state(info)}")
    if info["error"]:
        print(f"  {info['error']}")
    if info["record"]:
        ago = timedelta(seconds=round(info["record_age"]))
        checkpoint = f"of step {info['recover_point']}" if info["recover_point"] else "none"
        print(f"step {info['step']}, version {info['version']}, {ago} ago; newest recovery checkpoint: {checkpoint}")
    if info["trainer_restarts"]:
        print(f"automatic restarts of the run: {info['trainer_restarts']}")
        print(*(f"  {line}" for line in info["history"]), sep="\n")
    columns = ("name", "node", "host", "port", "pid", "status", "exit_code", "restarts")
    rows = [[str("" if worker[name] is None else worker[name]) for name in columns] for worker in info["workers"]]
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in [columns, *rows] if rows else []:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _describe_state(info: dict[str, Any]) -> str:
    if info["state"] == "pending":
        return str(info["job"])
    if "launcher" not in info:
        return str(info["state"]) + (f"; its job is {info['job']}" if info.get("job") else "")
    launcher = "process {pid} on {host}".format_map(info["launcher"])
    silent = info["launcher"]["silent"]
    if info["state"] == "lost":
        return (
            f"its launcher, {launcher}, sent no heartbeat for {silent:g} s: it was killed or is stopped. The workers "
            "of a dead launcher end automatically. Run the same command to resume from the last recovery checkpoint."
        )
    slow = f", busy for {info['busy']:g} s" if info["busy"] > BUSY else ""
    return f"{info['state']} (launcher: {launcher}{slow})"


def logs(directory: Path, worker: str, lines: int, follow: bool) -> int:
    """Print the last lines of each log. With `follow`, print new lines until the run ends.

    Args:
        worker: `<role>-<index>`, a role, or an empty string for all.

    Raises:
        ConfigError: no such log exists.
    """
    names, folder = require_names(directory), directory / "logs"
    read: dict[Path, int] = {}

    def selected() -> list[Path]:
        return [p for p in sorted(folder.rglob("*.log")) if worker in ("", p.stem, p.stem.rpartition("-")[0])]

    if not (paths := selected()):
        available = ", ".join(path.stem for path in sorted(folder.rglob("*.log"))) or "none"
        raise ConfigError(
            f"{folder}: no log of {worker or 'any process'}; available: {available}. `rl status` lists the processes."
        )
    shown: Path | None = None
    for path in paths:
        read[path] = path.stat().st_size
        shown = _print(path, tail(path, lines), shown if len(paths) > 1 or follow else path)
    for _ in while_alive(names) if follow else ():
        for path in selected():
            if text := read_new_lines(path, read):
                shown = _print(path, text, shown)
    return 0


def _print(path: Path, text: str, shown: Path | None) -> Path | None:
    if not text:
        return shown
    headline = colored(f"==> {path.stem} <==", path.stem.rpartition("-")[0], sys.stdout)
    print(*([] if path == shown else [headline]), text, sep="\n", flush=True)
    return path


def stop(directory: Path, now: bool, timeout: float) -> int:
    """Ask a run to stop, gracefully as SIGTERM does or at once, and print the outcome.

    Raises:
        StalledError: the run did not stop in time.
    """
    names = require_names(directory)
    before = status_of(directory)
    if before.get("job"):  # no live launcher reads requests, so cancel the job
        _job_scheduler(names).cancel(directory)
        print(f"canceled; the job was {before['job']}")
        return 0
    if "launcher" not in before or before["state"] == "lost":
        print(f"Nothing to stop: {_describe_state(before)}")
        return 0
    names.add("control/stop", "now" if now else "gracefully", replace=True)
    duration = f" (usually {seconds:.3g} s)" if (seconds := step_seconds(directory)) else ""
    print(
        "stopping " + ("at once" if now else f"after the current step{duration}, with a recovery checkpoint"),
        flush=True,
    )
    deadline = time.monotonic() + timeout
    for _ in while_alive(names):
        if time.monotonic() > deadline:
            raise StalledError(
                f"{directory} did not stop within --timeout={timeout:g} s: {_describe_state(status_of(directory))}. "
                "A second `rl stop` abandons the running step, `rl stop --now` kills the processes."
            )
    after = status_of(directory)
    next_command = resumption(directory)
    print("finished" if after["state"] == "finished" else f"{_describe_state(after)}. {next_command}")
    return 0


def scale(directory: Path, role: str, count: str, timeout: float) -> int:
    """Request a number of servers, and print the outcome.

    Returns:
        0 when that number of servers is ready, 1 if the launcher rejected the request.

    Raises:
        ConfigError: the directory has no active run.
        StalledError: the servers were not ready in time; the launcher continues to start or stop them.
    """
    names = require_names(directory)
    info = status_of(directory)
    if "launcher" not in info or info["state"] == "lost":
        raise ConfigError(
            f"{directory}: expected an active run, found: {_describe_state(info)}. To change the number of servers, "
            "run the same command with another `allocation`."
        )
    names.delete(f"replies/scale/{role}")
    count = str(int(count)) if count.isdecimal() else count
    names.add(f"control/scale/{role}", count, replace=True)
    deadline, shown = time.monotonic() + timeout, ""
    for _ in while_alive(names):
        reply = read_json(names, f"replies/scale/{role}")
        if reply and reply["count"] == count and reply["text"] != shown:
            shown = reply["text"]
            print(f"{role}: {shown}", flush=True, file=sys.stdout if reply["right"] else sys.stderr)
            if reply["done"]:
                return int(not reply["right"])
        if time.monotonic() > deadline:
            raise StalledError(
                f"{role}={count} was not reached within --timeout={timeout:g} s; last report: {shown or 'none yet'}. "
                "The launcher continues; see `rl status`."
            )
    raise ConfigError(f"{directory} ended before it had {role}={count}: {_describe_state(status_of(directory))}")
