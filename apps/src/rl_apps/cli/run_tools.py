"""What `rl status`, `rl logs`, `rl stop` and `rl scale` do, all of it by the directory of a run, on any machine that
sees it. `rl_monitor.watch` has `rl watch`."""

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
from rl_monitor.status import _submitted_to, read_new_lines, require_names, status_of, while_alive

BUSY = 30.0
"""Seconds after which a launcher that has not looked at its processes is called busy."""


def status(directory: Path, as_json: bool) -> int:
    """Print it."""
    found = status_of(directory)
    if as_json:
        print(json.dumps(found, indent=2))
        return 0
    print(f"{found['run']}: {_state_in_words(found)}")
    if found["error"]:
        print(f"  {found['error']}")
    if found["record"]:
        ago = timedelta(seconds=round(found["record_age"]))
        point = f"of step {found['recover_point']}" if found["recover_point"] else "none"
        print(f"step {found['step']}, version {found['version']}, {ago} ago; newest recovery checkpoint: {point}")
    if found["trainer_restarts"]:
        print(f"started again by itself: {found['trainer_restarts']} time(s)")
        print(*(f"  {line}" for line in found["history"]), sep="\n")
    columns = ("name", "node", "host", "port", "pid", "status", "exit_code", "restarts")
    rows = [[str("" if worker[name] is None else worker[name]) for name in columns] for worker in found["workers"]]
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in [columns, *rows] if rows else []:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _state_in_words(found: dict[str, Any]) -> str:
    if found["state"] == "pending":
        return str(found["job"])
    if "launcher" not in found:
        return str(found["state"]) + (f"; its job is {found['job']}" if found.get("job") else "")
    launcher = "process {pid} on {host}".format_map(found["launcher"])
    silent = found["launcher"]["silent"]
    if found["state"] == "lost":
        return (
            f"its launcher, {launcher}, gave no sign of life for {silent:g} s: it was killed, or is stopped. What it "
            "started ends by itself when it is gone; the same command goes on from the last recover point."
        )
    slow = f", busy for {found['busy']:g} s" if found["busy"] > BUSY else ""
    return f"{found['state']} (launcher: {launcher}{slow})"


def logs(directory: Path, worker: str, lines: int, follow: bool) -> int:
    """Print the last lines of each log, and with `follow` what comes after them until the run is over.

    Args:
        worker: `<role>-<index>`, a role, or empty for all.

    Raises:
        ConfigError: there is no such log.
    """
    names, folder = require_names(directory), directory / "logs"
    read: dict[Path, int] = {}

    def chosen() -> list[Path]:
        return [p for p in sorted(folder.rglob("*.log")) if worker in ("", p.stem, p.stem.rpartition("-")[0])]

    if not (found := chosen()):
        there = ", ".join(path.stem for path in sorted(folder.rglob("*.log"))) or "none"
        raise ConfigError(
            f"{folder}: no log of {worker or 'anybody'} is there; there are: {there}. `rl status` says what runs."
        )
    shown: Path | None = None
    for path in found:
        read[path] = path.stat().st_size
        shown = _print(path, tail(path, lines), shown if len(found) > 1 or follow else path)
    for _ in while_alive(names) if follow else ():
        for path in chosen():
            if text := read_new_lines(path, read):
                shown = _print(path, text, shown)
    return 0


def _print(path: Path, text: str, shown: Path | None) -> Path | None:
    if not text:
        return shown
    print(*([] if path == shown else [f"==> {path.stem} <=="]), text, sep="\n", flush=True)
    return path


def stop(directory: Path, now: bool, timeout: float) -> int:
    """Ask a run to stop as SIGTERM does, or at once, and say what became of it.

    Raises:
        StalledError: it did not stop in time.
    """
    names = require_names(directory)
    before = status_of(directory)
    if before.get("job"):  # whose launcher does not hear
        _submitted_to(names).cancel(directory)
        print(f"cancelled; the job was {before['job']}")
        return 0
    if "launcher" not in before or before["state"] == "lost":
        print(f"Nothing to stop: {_state_in_words(before)}")
        return 0
    names.add("control/stop", "now" if now else "gracefully", replace=True)
    usual = f" (usually {seconds:.3g} s)" if (seconds := step_seconds(directory)) else ""
    print(
        "stopping " + ("at once" if now else f"after the current step{usual}, with a recovery checkpoint"), flush=True
    )
    deadline = time.monotonic() + timeout
    for _ in while_alive(names):
        if time.monotonic() > deadline:
            raise StalledError(
                f"{directory} did not stop within --timeout={timeout:g} s: {_state_in_words(status_of(directory))}. "
                "A second `rl stop` abandons the running step, `rl stop --now` kills the processes."
            )
    after = status_of(directory)
    left = resumption(directory)
    print("finished" if after["state"] == "finished" else f"{_state_in_words(after)}. {left}")
    return 0


def scale(directory: Path, role: str, count: str, timeout: float) -> int:
    """Ask for a number of servers, and say what becomes of it.

    Returns:
        0 when there are as many, and all are ready; 1 when it was refused.

    Raises:
        ConfigError: nothing runs there.
        StalledError: it is not done in time, which goes on.
    """
    names = require_names(directory)
    found = status_of(directory)
    if "launcher" not in found or found["state"] == "lost":
        raise ConfigError(
            f"{directory}: expected a run that goes on, found: {_state_in_words(found)}. Start the same "
            "command again with the servers in `allocation` that it is to have."
        )
    names.delete(f"answers/scale/{role}")
    count = str(int(count)) if count.isdecimal() else count
    names.add(f"control/scale/{role}", count, replace=True)
    deadline, shown = time.monotonic() + timeout, ""
    for _ in while_alive(names):
        answer = read_json(names, f"answers/scale/{role}")
        if answer and answer["count"] == count and answer["text"] != shown:
            shown = answer["text"]
            print(f"{role}: {shown}", flush=True, file=sys.stdout if answer["right"] else sys.stderr)
            if answer["done"]:
                return int(not answer["right"])
        if time.monotonic() > deadline:
            raise StalledError(
                f"{role}={count} is not done within --timeout={timeout:g} s; last: {shown or 'no answer yet'}. The run "
                "goes on with it; see `rl status`."
            )
    raise ConfigError(f"{directory} ended meanwhile: {_state_in_words(status_of(directory))}")
