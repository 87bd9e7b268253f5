"""Events of a run other than steps: failures, restarts and warnings, from its records, status and logs."""

from __future__ import annotations

import json
import math
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl_contracts.runtime.run_files import read_json
from rl_monitor.progress import warnings_of
from rl_monitor.run_directory import names_of

EVENTS = 200
"""Maximum number of events shown. Repeated events of a kind count once."""
TEXT = 500
"""Maximum characters shown per event."""
LOG_BYTES = 4 << 20
"""Maximum bytes to read from the end of each log."""

_LINE = re.compile(rb"^(?:=+ )?(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.\d+)? (?:(WARNING|ERROR|CRITICAL) )?(.*)$", re.M)
_NUMBER = re.compile(r"\d[\d.,e+-]*")

Event = dict[str, Any]
"""Event with `level` (`note`, `warning` or `error`), `text`, `where` and `times`, and with `step` or `at` (a date) of
the first occurrence."""


def events_of(directory: Path, records: Sequence[dict[str, Any]]) -> list[Event]:
    """Return events with repeated ones merged: of the launcher, then errors, then steps, failed groups and logs."""
    events = [
        *merge_repeated(_record_events(records)),
        *_failed_groups(directory),
        *merge_repeated(_log_events(directory)),
    ]
    events.sort(key=lambda event: event["level"] != "error")
    return [*_launcher_events(directory), *events][:EVENTS]


def status_of_launcher(directory: Path) -> dict[str, Any]:
    """Return the last status that the launcher wrote, or an empty dictionary."""
    with suppress(OSError, ValueError):
        status: dict[str, Any] = read_json(names_of(directory), "status") or {}
        return status
    return {}


def restarts_of(
    records: Sequence[dict[str, Any]], status: dict[str, Any], commands: Sequence[dict[str, Any]]
) -> list[int]:
    """Return the steps after which the run was resumed: automatically by its last command, or by another command.

    Args:
        records: records of `metrics.jsonl`.
        status: last status of the launcher.
        commands: commands that started or resumed the run, oldest first.
    """
    steps = set(status.get("restart_steps", []))
    for command in commands[1:]:
        steps.add(max((r["step"] for r in records if r.get("timestamp", 0) < command["started"]), default=0))
    return sorted(steps - {0})


def merge_repeated(events: Iterator[Event]) -> list[Event]:
    """Merge events that differ only in numbers into the first of them, and count them."""
    kinds: dict[tuple[str, str], Event] = {}
    for event in events:
        text = event["text"][:TEXT]
        kind = (event.get("where", ""), event.get("kind") or _NUMBER.sub("#", text))
        merged = kinds.setdefault(kind, event | {"text": text, "times": 0})
        merged["times"] += 1
        if "step" in event:
            merged["last_step"] = event["step"]
    return list(kinds.values())


def _launcher_events(directory: Path) -> Iterator[Event]:
    status = status_of_launcher(directory)
    if status.get("error"):
        yield {"level": "error", "where": "launcher", "text": status["error"][:TEXT], "times": 1}
    for line in status.get("history", []):
        text = f"the run was restarted: {line}"
        yield {"level": "warning", "where": "launcher", "text": text[:TEXT], "times": 1}


def _record_events(records: Sequence[dict[str, Any]]) -> Iterator[Event]:
    rejoins = 0.0
    for record in records:
        where = {"where": "training", "step": record["step"]}
        for kind, text in warnings_of({"groups/trained": 0, **record}).items():
            yield {"level": "warning", "kind": kind, "text": text, **where}
        for name, value in record.items():
            if isinstance(value, float) and not math.isfinite(value):
                yield {"level": "error", "text": f"{name} was {value}", **where}
        total = record.get("server/rejoins") or 0.0
        if total > rejoins:
            yield {"level": "warning", "text": "a lost server rejoined", **where}
        rejoins = total


def _failed_groups(directory: Path) -> Iterator[Event]:
    """Yield the reasons of failed groups with their counts."""
    reasons: Counter[str] = Counter()
    with suppress(OSError), (directory / "groups.jsonl").open("rb") as file:
        for line in file:
            if b'"failed"' in line:
                with suppress(ValueError):
                    reasons[str(json.loads(line).get("reason"))[:TEXT]] += 1
    for reason, times in reasons.most_common(20):
        yield {"level": "warning", "where": "groups", "text": f"a group failed: {reason}", "times": times}


def _log_events(directory: Path) -> Iterator[Event]:
    """Yield warnings and errors in logs, and restarts of processes."""
    for path in sorted((directory / "logs").rglob("*.log")):
        with suppress(OSError), path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_BYTES))
            for at, level, text in _LINE.findall(file.read()):
                if level or text.endswith(b"========"):
                    message = text.decode(errors="replace").strip("= ")
                    kind = (level.decode().lower() or "note").replace("critical", "error")
                    yield {"level": kind, "where": path.stem, "at": at.decode(), "text": message}


def when(seconds: float | None) -> str:
    """Format seconds since the epoch as a date in local time, or None as an empty string."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else ""
