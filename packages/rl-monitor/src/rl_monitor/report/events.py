"""What happened in a run besides its steps: failures, restarts, alarms. From its records, its status and its logs."""

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
"""Shown at most: those of each kind are one."""
TEXT = 500
"""Characters of one that are shown."""
LOG_BYTES = 4 << 20
"""Read from the end of each log at most."""

_LINE = re.compile(rb"^(?:=+ )?(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.\d+)? (?:(WARNING|ERROR|CRITICAL) )?(.*)$", re.M)
_NUMBER = re.compile(r"\d[\d.,e+-]*")

Event = dict[str, Any]
"""`level` (`warning`, `error` or `count`), `text`, `times`; `where`, and `step` or `at` (in words), of the first
one."""


def events_of(directory: Path, records: Sequence[dict[str, Any]]) -> list[Event]:
    """All of them, those of a kind together: first what the launcher says, then of steps, then of logs."""
    found = [
        *_said(directory),
        *merge_repeated(_of_records(records)),
        *_endings(directory),
        *merge_repeated(_of_logs(directory)),
    ]
    return found[:EVENTS]


def status_of_launcher(directory: Path) -> dict[str, Any]:
    """What the run's launcher said last; empty where it said nothing."""
    with suppress(OSError, ValueError):
        status: dict[str, Any] = read_json(names_of(directory), "status") or {}
        return status
    return {}


def merge_repeated(events: Iterator[Event]) -> list[Event]:
    """Events that differ in numbers alone as one, the first of them, with how often it came."""
    kinds: dict[tuple[str, str], Event] = {}
    for event in events:
        text = event["text"][:TEXT]
        kind = (event.get("where", ""), event.get("kind") or _NUMBER.sub("#", text))
        known = kinds.setdefault(kind, event | {"text": text, "times": 0})
        known["times"] += 1
        if "step" in event:
            known["last_step"] = event["step"]
    return list(kinds.values())


def _said(directory: Path) -> Iterator[Event]:
    status = status_of_launcher(directory)
    if status.get("error"):
        yield {"level": "error", "where": "launcher", "text": status["error"][:TEXT], "times": 1}
    for line in status.get("history", []):
        text = f"the run was started again: {line}"
        yield {"level": "warning", "where": "launcher", "text": text[:TEXT], "times": 1}


def _of_records(records: Sequence[dict[str, Any]]) -> Iterator[Event]:
    rejoins = 0.0
    for record in records:
        where = {"where": "training", "step": record["step"]}
        for kind, text in warnings_of({"groups/trained": 0, **record}).items():
            yield {"level": "warning", "kind": kind, "text": text, **where}
        for name, value in record.items():
            if isinstance(value, float) and not math.isfinite(value):
                yield {"level": "error", "text": f"{name} was {value}", **where}
        now = record.get("server/rejoins") or 0.0
        if now > rejoins:
            yield {"level": "warning", "text": "a server that was lost came back", **where}
        rejoins = now


def _endings(directory: Path) -> Iterator[Event]:
    """Why groups of answers failed."""
    reasons: Counter[str] = Counter()
    with suppress(OSError), (directory / "groups.jsonl").open("rb") as file:
        for line in file:
            if b'"failed"' in line:
                with suppress(ValueError):
                    reasons[str(json.loads(line).get("reason"))[:TEXT]] += 1
    for reason, times in reasons.most_common(20):
        yield {"level": "warning", "where": "groups", "text": f"a group failed: {reason}", "times": times}


def _of_logs(directory: Path) -> Iterator[Event]:
    """Warnings and errors in logs, and the lives of processes after their first."""
    for path in sorted((directory / "logs").rglob("*.log")):
        with suppress(OSError), path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_BYTES))
            for at, level, text in _LINE.findall(file.read()):
                if level or text.endswith(b"========"):
                    said = text.decode(errors="replace").strip("= ")
                    kind = (level.decode().lower() or "note").replace("critical", "error")
                    yield {"level": kind, "where": path.stem, "at": at.decode(), "text": said}


def when(seconds: float | None) -> str:
    """A moment in words, in this machine's time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else ""
