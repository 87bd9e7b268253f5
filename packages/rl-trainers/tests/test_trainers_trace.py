"""Traces: format of the viewers, nested tracks, bounded memory."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from rl_trainers.run_log.trace import Trace

REQUIRED = {
    "X": {"name", "ts", "dur", "pid", "tid"},
    "M": {"name", "pid", "args"},
}
"""Keys that the trace event format requires, by phase."""


def _load(path: Path) -> list[dict[str, Any]]:
    def reject(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    content = json.loads(path.read_text(), parse_constant=reject)
    for event in content["traceEvents"]:
        assert REQUIRED[event["ph"]] <= event.keys()
    return content["traceEvents"]


def _spans(events: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {event["name"]: event for event in events if event["ph"] == "X"}


def _assert_tracks_nest(events: list[dict[str, Any]]) -> None:
    """Check that two spans of a track are nested or disjoint, as viewers require."""
    by_track: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            span = (event["ts"], event["ts"] + event["dur"])
            by_track.setdefault((event["pid"], event["tid"]), []).append(span)
    for spans in by_track.values():
        spans.sort(key=lambda span: (span[0], -span[1]))
        enclosing: list[tuple[float, float]] = []
        for span in spans:
            while enclosing and enclosing[-1][1] <= span[0]:
                enclosing.pop()
            assert not enclosing or span[1] <= enclosing[-1][1] + 1e-3
            enclosing.append(span)


def test_save_writes_format_of_viewers_and_replaces_old_file(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "trace.json").write_text("old")
    trace = Trace(process="actor/0")
    with trace.span("step", "train", step=3), trace.span("forward", "train"):
        pass

    events = _load(trace.save(tmp_path / "run" / "trace.json"))

    assert [path.name for path in (tmp_path / "run").iterdir()] == ["trace.json"]
    spans = _spans(events)
    assert spans["step"]["args"] == {"step": 3}
    assert spans["step"]["cat"] == "train"
    assert spans["step"]["ts"] <= spans["forward"]["ts"]
    assert spans["step"]["dur"] >= spans["forward"]["dur"] >= 0
    assert spans["step"]["tid"] == spans["forward"]["tid"]
    labels = [(event["name"], event["args"]["name"]) for event in events if event["ph"] == "M"]
    assert labels == [("process_name", "actor/0"), ("thread_name", threading.current_thread().name)]


def test_span_with_error_records_error_class(tmp_path: Path) -> None:
    trace = Trace("actor/0")
    with pytest.raises(KeyError), trace.span("reward", number=7):
        raise KeyError("x")

    assert _spans(_load(trace.save(tmp_path / "t.json")))["reward"]["args"] == {"number": 7, "error": "KeyError"}


def test_trace_beyond_capacity_keeps_newest_and_counts_dropped(tmp_path: Path) -> None:
    trace = Trace("actor/0", capacity=10)
    for index in range(25):
        with trace.span(str(index)):
            pass

    path = trace.save(tmp_path / "t.json")

    assert [event["name"] for event in _load(path) if event["ph"] == "X"] == [str(i) for i in range(15, 25)]
    assert json.loads(path.read_text())["otherData"]["dropped_events"] == 15


def test_threads_have_separate_tracks_and_lose_no_event(tmp_path: Path) -> None:
    trace = Trace("actor/0")

    def work() -> None:
        for index in range(200):
            with trace.span("outer"), trace.span("inner", index=index):
                pass

    threads = [threading.Thread(target=work, name=f"worker-{i}") for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)

    events = _load(trace.save(tmp_path / "t.json"))
    assert sum(event["ph"] == "X" for event in events) == 1600
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {f"worker-{i}" for i in range(4)}
    _assert_tracks_nest(events)
