"""Spans of one process in Chrome's trace format, for chrome://tracing and ui.perfetto.dev."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Trace:
    """Recorder of spans, from any thread.

    Args:
        process: name of this process in the viewer, for example `trainer-0`.
        capacity: maximum number of spans; older ones are dropped and counted.
    """

    def __init__(self, process: str, capacity: int = 200_000) -> None:
        self.process = process
        self._spans: deque[dict[str, Any]] = deque(maxlen=capacity)
        self._tracks: dict[str, int] = {}
        self._recorded = 0
        self._lock = threading.Lock()
        self._wall_us, self._begin = time.time_ns() // 1000, time.perf_counter()

    @contextmanager
    def span(self, name: str, category: str = "", **args: Any) -> Iterator[None]:
        """Record the duration of the block, and the class of an error that ends it.

        Args:
            name: name of the span, for example `publish`.
            category: filter of the viewer, for example `step`.
            **args: JSON values; the viewer shows them when the span is selected.
        """
        begin = time.perf_counter()
        try:
            yield
        except BaseException as error:
            args["error"] = type(error).__name__
            raise
        finally:
            seconds = time.perf_counter() - begin
            span = {"name": name, "cat": category, "ph": "X", "pid": os.getpid(), "args": args}
            span |= {"ts": 1e6 * (begin - self._begin), "dur": 1e6 * seconds}
            with self._lock:
                span["tid"] = self._tracks.setdefault(threading.current_thread().name, len(self._tracks))
                self._spans.append(span)
                self._recorded += 1

    def save(self, path: str | Path) -> Path:
        """Write the spans that have ended to `path`, atomically."""
        path = Path(path)
        with self._lock:
            spans, tracks = list(self._spans), dict(self._tracks)
            other = {"wall_clock_us": self._wall_us, "dropped_events": self._recorded - len(spans)}
        names = [_metadata_event("process_name", 0, self.process)]
        names += [_metadata_event("thread_name", track, name) for name, track in tracks.items()]
        content = {"traceEvents": [*spans, *names], "displayTimeUnit": "ms", "otherData": other}
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        return path


def _metadata_event(kind: str, track: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": os.getpid(), "tid": track, "args": {"name": name}}
