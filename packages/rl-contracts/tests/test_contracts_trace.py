"""Traces: what the viewers accept, tracks that nest, bounded memory, and one clock over processes."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rl_contracts.errors import DataError
from rl_contracts.trace import Trace, merge

REQUIRED = {
    "X": {"name", "ts", "dur", "pid", "tid"},
    "B": {"name", "ts", "pid", "tid"},
    "i": {"name", "ts", "pid", "tid", "s"},
    "C": {"name", "ts", "pid", "args"},
    "M": {"name", "pid", "args"},
}
"""Keys that the trace event format asks for, by phase."""


def _load(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    content = json.loads(path.read_text(), parse_constant=refuse)
    for event in content["traceEvents"]:
        assert REQUIRED[event["ph"]] <= event.keys()
    return content["traceEvents"]


def _spans(events: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {event["name"]: event for event in events if event["ph"] == "X"}


def _assert_tracks_nest(events: list[dict[str, Any]]) -> None:
    """On one track a span lies within another or beside it, which is all that a viewer can draw."""
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


def test_save_file_is_what_viewers_accept(tmp_path: Path) -> None:
    trace = Trace(process="actor/0")
    with trace.span("step", "train", step=3), trace.span("forward", "train"):
        trace.instant("commit", "weights", version=4)
        trace.counter("queue", running=3, waiting=1.5)

    events = _load(trace.save(tmp_path / "run" / "trace.json"))

    spans = _spans(events)
    assert spans["step"]["args"] == {"step": 3}
    assert spans["step"]["cat"] == "train"
    assert spans["step"]["ts"] <= spans["forward"]["ts"]
    assert spans["step"]["dur"] >= spans["forward"]["dur"] >= 0
    assert spans["step"]["tid"] == spans["forward"]["tid"]
    named = {event["name"]: event["args"] for event in events if event["ph"] in "iC"}
    assert named == {"commit": {"version": 4}, "queue": {"running": 3, "waiting": 1.5}}
    labels = [(event["name"], event["args"]["name"]) for event in events if event["ph"] == "M"]
    assert labels == [("process_name", "actor/0"), ("thread_name", threading.current_thread().name)]


def test_save_any_arguments_give_strict_json(tmp_path: Path) -> None:
    trace = Trace()
    with trace.span("a", path=tmp_path, loss=math.nan, shape=(1, [2.0]), nested={"x": {1}}):
        trace.counter("c", good=1, bad=math.inf)

    events = _load(trace.save(tmp_path / "trace.json"))

    args = {"path": str(tmp_path), "loss": "nan", "shape": [1, [2.0]], "nested": {"x": "{1}"}}
    assert _spans(events)["a"]["args"] == args
    assert [event["args"] for event in events if event["ph"] == "C"] == [{"good": 1}]


def test_span_that_raises_is_recorded_with_its_error(tmp_path: Path) -> None:
    trace = Trace()
    with pytest.raises(KeyError), trace.span("reward", answer=7):
        raise KeyError("x")

    assert _spans(_load(trace.save(tmp_path / "t.json")))["reward"]["args"] == {"answer": 7, "error": "KeyError"}


def test_save_open_span_is_shown_as_unfinished(tmp_path: Path) -> None:
    trace = Trace()
    with trace.span("wait", "rollout"):
        events = _load(trace.save(tmp_path / "t.json"))

    assert [(event["ph"], event["name"]) for event in events if event["ph"] != "M"] == [("B", "wait")]
    assert "wait" in _spans(_load(trace.save(tmp_path / "t.json")))


def test_disabled_trace_records_nothing_and_costs_next_to_nothing(tmp_path: Path) -> None:
    trace = Trace(enabled=False)

    assert trace.span("a") is trace.span("b")
    start = time.perf_counter()
    for _ in range(20_000):
        with trace.span("a"):
            pass
    seconds = time.perf_counter() - start
    trace.instant("i")
    trace.counter("c", x=1)

    assert _load(trace.save(tmp_path / "t.json")) == []
    assert seconds / 20_000 < 20e-6  # about 0.2 us; the bound is for a busy machine


def test_ring_full_keeps_the_latest_and_counts_the_dropped(tmp_path: Path) -> None:
    trace = Trace(capacity=10)
    for index in range(25):
        trace.instant(str(index))

    path = trace.save(tmp_path / "t.json")

    assert [event["name"] for event in _load(path) if event["ph"] == "i"] == [str(i) for i in range(15, 25)]
    assert trace.dropped == 15
    assert json.loads(path.read_text())["otherData"]["dropped_events"] == 15


def test_threads_have_tracks_of_their_own_and_lose_no_event(tmp_path: Path) -> None:
    trace = Trace()

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


async def test_tasks_that_overlap_have_tracks_that_nest_and_are_reused(tmp_path: Path) -> None:
    trace = Trace()
    all_open = asyncio.Barrier(4)

    async def child() -> None:
        with trace.span("child"):
            await all_open.wait()

    async def episode() -> None:
        with trace.span("episode"):
            helper = asyncio.create_task(child())
            await all_open.wait()
            with trace.span("reward"):
                trace.instant("scored")
        await helper

    for _ in range(3):
        await asyncio.wait_for(asyncio.gather(episode(), episode()), timeout=10)

    events = _load(trace.save(tmp_path / "t.json"))
    _assert_tracks_nest(events)
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 18
    assert len({span["tid"] for span in spans}) <= 4  # two episodes with a child each, at any time
    assert {e["tid"] for e in events if e["ph"] == "i"} <= {s["tid"] for s in spans if s["name"] == "reward"}


def test_save_leaves_no_temporary_file_and_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")

    Trace().save(path)

    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]
    assert _load(path) == []


def test_merge_processes_share_one_clock(tmp_path: Path) -> None:
    code = (
        "import sys; from rl_contracts.trace import Trace; t = Trace(process='server/0')\n"
        "with t.span('there'): pass\n"
        "t.save(sys.argv[1])"
    )
    trace = Trace(process="actor/0")
    with trace.span("around"):
        subprocess.run([sys.executable, "-c", code, str(tmp_path / "b.json")], check=True, timeout=60)
    trace.save(tmp_path / "a.json")

    events = _load(merge([tmp_path / "b.json", tmp_path / "a.json"], tmp_path / "trace.json"))

    spans = _spans(events)
    assert spans["around"]["ts"] < spans["there"]["ts"]
    assert spans["there"]["ts"] + spans["there"]["dur"] < spans["around"]["ts"] + spans["around"]["dur"]
    assert spans["around"]["pid"] != spans["there"]["pid"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"actor/0", "server/0"}


def test_merge_equal_process_numbers_are_told_apart_and_drops_added(tmp_path: Path) -> None:
    for name in ("a", "b"):
        trace = Trace(process=name, capacity=1)
        trace.instant(name)
        trace.instant(name)
        trace.save(tmp_path / f"{name}.json")

    path = merge([tmp_path / "a.json", tmp_path / "b.json"], tmp_path / "out.json")

    assert len({event["pid"] for event in _load(path) if event["ph"] == "i"}) == 2
    assert json.loads(path.read_text())["otherData"]["dropped_events"] == 2


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"traceEvents": []}'])
def test_merge_file_that_is_no_trace_is_named(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "broken.json"
    if content is not None:
        path.write_text(content)

    with pytest.raises(DataError, match=r"broken\.json"):
        merge([path], tmp_path / "out.json")


def test_merge_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="at least one trace"):
        merge([], tmp_path / "out.json")
