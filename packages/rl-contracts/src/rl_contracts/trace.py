"""What happened when: trace events in Chrome's format, for chrome://tracing and ui.perfetto.dev.

Each process records into its own `Trace` and saves it; `merge` joins the files of a run on one clock.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rl_contracts.errors import DataError

_NULL_SPAN = nullcontext()


@dataclass(slots=True)
class _Event:
    phase: str
    name: str
    category: str
    start_ns: int
    duration_ns: int
    track: int
    args: dict[str, Any]


class Trace:
    """Records spans, instants and counters of one process, from any thread and any asyncio task.

    Spans of tasks that run at the same time overlap, which one track cannot show. So each task with an open span has
    a track of its own, reused by later tasks once it is free.

    Args:
        process: name of this process in the viewer, for example `actor/0`.
        capacity: events that are kept; older ones are dropped and counted (`dropped`).
        enabled: a disabled trace records nothing, at next to no cost. May be switched at any time.
    """

    def __init__(self, process: str = "", capacity: int = 200_000, enabled: bool = True) -> None:
        self.process = process
        self.enabled = enabled
        self._events: deque[_Event] = deque(maxlen=capacity)
        self._recorded = 0
        self._lock = threading.Lock()
        self._tracks = _Tracks()
        self._open: set[_Span] = set()
        # The pair of clocks read together places this process's steady clock on the wall clock that all share.
        self._anchor_wall_ns = time.time_ns()
        self._anchor_ns = time.perf_counter_ns()

    @property
    def dropped(self) -> int:
        """Events that no longer fitted."""
        return self._recorded - len(self._events)

    def span(self, name: str, category: str = "", **args: Any) -> AbstractContextManager[Any]:
        """Record how long the block takes. An error that ends it is noted in its arguments.

        Args:
            name: what is done, for example `generate`.
            category: by which the viewer filters, for example `rollout`.
            **args: shown when the span is selected.
        """
        if not self.enabled:
            return _NULL_SPAN
        return _Span(self, name, category, args)

    def instant(self, name: str, category: str = "", **args: Any) -> None:
        """Record that something happened now."""
        if self.enabled:
            self._add(_Event("i", name, category, time.perf_counter_ns(), 0, self._tracks.current(), args))

    def counter(self, name: str, **values: float) -> None:
        """Record the values of a counter now, for example `counter("queue", running=3, waiting=1)`.

        Values that are not finite are left out: the format has no way to write them.
        """
        if self.enabled:
            finite = {key: value for key, value in values.items() if math.isfinite(value)}
            self._add(_Event("C", name, "", time.perf_counter_ns(), 0, 0, finite))

    def save(self, path: str | Path) -> Path:
        """Write the events so far to `path`, whole or not at all. Spans still open are shown as unfinished."""
        with self._lock:
            events = list(self._events)
            open_spans = list(self._open)
            dropped = self.dropped
        events += [_Event("B", s.name, s.category, s.start_ns, 0, s.track, s.args) for s in open_spans]
        content = [self._json(event) for event in events]
        content += _metadata(os.getpid(), self.process, self._tracks.names())
        return _write(Path(path), content, {"wall_clock_us": self._anchor_wall_ns // 1000, "dropped_events": dropped})

    def _add(self, event: _Event) -> None:
        with self._lock:
            self._record(event)

    def _record(self, event: _Event) -> None:
        """Keep an event; the lock is held."""
        self._events.append(event)
        self._recorded += 1

    def _json(self, event: _Event) -> dict[str, Any]:
        written: dict[str, Any] = {
            "name": event.name,
            "ph": event.phase,
            "ts": (event.start_ns - self._anchor_ns) / 1000,
            "pid": os.getpid(),
            "tid": event.track,
        }
        if event.category:
            written["cat"] = event.category
        if event.phase == "X":
            written["dur"] = event.duration_ns / 1000
        if event.phase == "i":
            written["s"] = "t"  # drawn on its own track, not over the whole process
        if event.args:
            written["args"] = _plain(event.args)
        return written


class _Span:
    """One block being timed. Entered once."""

    def __init__(self, trace: Trace, name: str, category: str, args: dict[str, Any]) -> None:
        self.trace, self.name, self.category, self.args = trace, name, category, args
        self.start_ns = 0
        self.track = 0
        self._lane: _Lane | None = None

    def __enter__(self) -> Self:
        self._lane = self.trace._tracks.enter()
        self.track = self._lane.track if self._lane is not None else self.trace._tracks.of_thread()
        self.start_ns = time.perf_counter_ns()
        with self.trace._lock:
            self.trace._open.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        duration = time.perf_counter_ns() - self.start_ns
        if kind is not None:
            self.args = {**self.args, "error": kind.__name__}
        event = _Event("X", self.name, self.category, self.start_ns, duration, self.track, self.args)
        with self.trace._lock:
            self.trace._open.discard(self)
            self.trace._record(event)
        if self._lane is not None:
            self.trace._tracks.leave(self._lane)


@dataclass(slots=True)
class _Lane:
    """The track that a task holds while it has open spans."""

    task: asyncio.Task[Any]
    thread_track: int
    track: int
    depth: int = 1


class _Tracks:
    """Which track (`tid`) an event belongs to: one per thread, and one per task with open spans."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread = threading.local()
        self._names: list[str] = []
        self._lanes: dict[asyncio.Task[Any], _Lane] = {}
        self._free: dict[int, list[int]] = {}
        self._made: dict[int, int] = {}

    def of_thread(self) -> int:
        """The track of the current thread."""
        track: int | None = getattr(self._thread, "track", None)
        if track is None:
            with self._lock:
                track = self._new(threading.current_thread().name)
            self._thread.track = track
        return track

    def current(self) -> int:
        """The track of the current task if it has one, else of the thread."""
        task = _current_task()
        with self._lock:
            lane = self._lanes.get(task) if task is not None else None
        return lane.track if lane is not None else self.of_thread()

    def enter(self) -> _Lane | None:
        """Give the current task a track, or note that one more of its spans is open; None outside of tasks."""
        task = _current_task()
        if task is None:
            return None
        thread_track = self.of_thread()
        with self._lock:
            lane = self._lanes.get(task)
            if lane is not None:
                lane.depth += 1
                return lane
            free = self._free.setdefault(thread_track, [])
            if not free:
                number = self._made[thread_track] = self._made.get(thread_track, 0) + 1
                free.append(self._new(f"{self._names[thread_track]} task {number}"))
            lane = self._lanes[task] = _Lane(task, thread_track, free.pop())
            return lane

    def leave(self, lane: _Lane) -> None:
        """One span of the lane's task is closed; with the last one the track is free."""
        with self._lock:
            lane.depth -= 1
            if lane.depth == 0:
                del self._lanes[lane.task]
                self._free[lane.thread_track].append(lane.track)

    def names(self) -> list[str]:
        """Names of all tracks, by their number."""
        with self._lock:
            return list(self._names)

    def _new(self, name: str) -> int:
        self._names.append(name)
        return len(self._names) - 1


def merge(paths: Iterable[str | Path], out: str | Path) -> Path:
    """Join the traces of several processes on one clock, which starts with the earliest of them.

    Clocks are aligned by the wall clock, so across machines no better than those agree. Process numbers that occur
    in several files (on different machines, say) are told apart.

    Raises:
        DataError: no files, or one that no `Trace` has saved; it is named.
    """
    traces = [_read(Path(path)) for path in paths]
    if not traces:
        raise DataError("expected at least one trace to merge, found none")
    base = min(trace["otherData"]["wall_clock_us"] for trace in traces)
    events: list[dict[str, Any]] = []
    taken: set[int] = set()
    for trace in traces:
        shift = trace["otherData"]["wall_clock_us"] - base
        pids: dict[int, int] = {}
        for pid in sorted({event["pid"] for event in trace["traceEvents"]}):
            pids[pid] = pid if pid not in taken else max(taken) + 1
            taken.add(pids[pid])
        for event in trace["traceEvents"]:
            event["pid"] = pids[event["pid"]]
            if "ts" in event:
                event["ts"] += shift
        events += trace["traceEvents"]
    dropped = sum(trace["otherData"].get("dropped_events", 0) for trace in traces)
    return _write(Path(out), events, {"wall_clock_us": base, "dropped_events": dropped})


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs in this thread
        return None


def _metadata(pid: int, process: str, tracks: list[str]) -> list[dict[str, Any]]:
    def name(kind: str, tid: int, value: str) -> dict[str, Any]:
        return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": value}}

    label = [name("process_name", 0, process)] if process else []
    return label + [name("thread_name", tid, value) for tid, value in enumerate(tracks)]


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it: numbers that are not finite and unknown objects become text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


def _write(path: Path, events: list[dict[str, Any]], other: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}
    try:
        temporary.write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _read(path: Path) -> dict[str, Any]:
    try:
        trace: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(trace["traceEvents"], list) and isinstance(trace["otherData"]["wall_clock_us"], int):
            return trace
        problem = "its clock or its list of events is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise DataError(f"expected a trace saved by `Trace.save` in {path}, found something else ({problem})")
