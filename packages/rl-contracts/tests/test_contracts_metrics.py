"""Recorded metrics and the metrics file."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_contracts.errors import ConfigError, DataError
from rl_contracts.runtime.metrics import Metrics, MetricsWriter, collect, record, record_all


def test_results_each_kind_combines_values() -> None:
    metrics = Metrics()
    for value in (3.0, -1.0, 2.0):
        for kind in ("mean", "sum", "min", "max"):
            metrics.add(kind, value, kind=kind)
    metrics.add("sum", 2.0, weight=3, kind="sum")
    metrics.add("mean", 6.0, weight=2)

    assert metrics.results() == {"mean": pytest.approx(16 / 5), "sum": 10.0, "min": -1.0, "max": 3.0}


def test_results_without_weight_are_none_or_zero_for_sums() -> None:
    metrics = Metrics()
    for kind in ("mean", "sum", "min", "max"):
        metrics.add(kind, math.nan, weight=0, kind=kind)

    assert metrics.results() == {"mean": None, "sum": 0.0, "min": None, "max": None}


def test_drain_resets_values_and_keeps_names() -> None:
    metrics = Metrics()
    metrics.add("length", 4)
    metrics.add("retries", 2, kind="sum")
    metrics.add("longest", 4, kind="max")

    assert metrics.drain().results() == {"length": 4.0, "retries": 2.0, "longest": 4.0}
    metrics.add("longest", -3, kind="max")
    assert metrics.drain().results() == {"length": None, "retries": 0.0, "longest": -3.0}


def test_add_name_as_second_kind_raises() -> None:
    metrics, other = Metrics(), Metrics()
    metrics.add("x", 1)
    other.add("x", 1, kind="min")

    with pytest.raises(ConfigError, match=r"'x'.*mean.*max"):
        metrics.add("x", 1, kind="max")
    with pytest.raises(ConfigError, match=r"'x'.*mean.*min"):
        metrics.merge(other)
    with pytest.raises(ConfigError, match=r"'y'.*mean, sum, min, max.*'median'"):
        metrics.add("y", 1, kind="median")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["0.5", torch.zeros(2).numpy()])
def test_add_value_not_a_number_raises(value: Any) -> None:
    with pytest.raises(DataError, match="metric 'x'"):
        Metrics().add("x", value)


def test_record_outside_collector_does_nothing() -> None:
    record("x", 1)
    with collect() as metrics:
        pass
    record("x", 1)

    assert metrics.results() == {}


def test_record_nested_collectors_stay_separate_after_error() -> None:
    with collect() as outer:
        with contextlib.suppress(RuntimeError), collect() as inner:
            record("x", 1)
            raise RuntimeError
        record("x", 2)
        record_all(inner)
        with collect(outer):
            record("x", 6)

    assert inner.results() == {"x": 1.0}
    assert outer.results() == {"x": 3.0}


async def test_record_interleaved_tasks_stay_separate_with_their_subtasks() -> None:
    barrier = asyncio.Barrier(2)

    async def episode(value: float) -> Metrics:
        with collect() as metrics:
            await barrier.wait()
            await asyncio.gather(*(asyncio.to_thread(record, "reward", value + i) for i in range(2)))
            await barrier.wait()
        return metrics

    first, second = await asyncio.gather(episode(1), episode(5))

    assert (first.results(), second.results()) == ({"reward": 1.5}, {"reward": 5.5})


def test_add_from_many_threads_counts_every_value() -> None:
    metrics = Metrics()
    barrier = threading.Barrier(4)

    def work(name: str) -> None:
        barrier.wait(5)
        for _ in range(500):
            metrics.add(name, 1, kind="sum")

    threads = [threading.Thread(target=work, args=(f"t{i % 2}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)

    assert metrics.results() == {"t0": 1000.0, "t1": 1000.0}


def test_add_tensors_are_read_only_for_results(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("a tensor was read")

    metrics = Metrics()
    value = torch.tensor(6.0, requires_grad=True)
    with monkeypatch.context() as patch:
        for reader in ("item", "tolist", "__float__", "__bool__", "__int__"):
            patch.setattr(torch.Tensor, reader, fail)
        metrics.add("loss", value / 2, torch.tensor(2))
        metrics.add("loss", 1.0, torch.tensor([2]))
        for extreme in (value, 4.0, torch.tensor(5.0)):
            metrics.add("least", extreme, kind="min")
            metrics.add("greatest", extreme, kind="max")

    assert metrics.results() == {"loss": 2.0, "least": 4.0, "greatest": 6.0}


def test_add_tensor_ignores_entries_with_weight_0() -> None:
    metrics = Metrics()
    values, weights = torch.tensor([[1.0, math.nan, 3.0], [-math.inf, 8.0, 9.0]]), torch.tensor([[1, 0, 1], [0, 2, 0]])
    for kind in ("mean", "sum", "min", "max"):
        metrics.add(kind, values, weights, kind)
        metrics.add(kind, values[:0], weights[:0].bool(), kind)
    metrics.add("share", values > 2, weight=weights > 0)

    assert metrics.results() == {"mean": 5.0, "sum": 20.0, "min": 1.0, "max": 8.0, "share": pytest.approx(2 / 3)}


def test_add_tensor_changed_later_keeps_recorded_value() -> None:
    metrics = Metrics()
    value = torch.tensor(1.0, dtype=torch.float64)
    for kind in ("mean", "max"):
        metrics.add(kind, value, kind=kind)
    value.add_(5)

    assert metrics.results() == {"mean": 1.0, "max": 1.0}


def test_add_float32_sums_keep_small_values() -> None:
    metrics = Metrics()
    metrics.add("x", torch.tensor(2.0**24), kind="sum")
    for _ in range(8):
        metrics.add("x", torch.tensor(1.0), kind="sum")

    assert metrics.results() == {"x": 2.0**24 + 8}


def test_add_nan_stays_in_extreme() -> None:
    metrics = Metrics()
    for value in (1.0, math.nan, 2.0):
        metrics.add("x", value, kind="max")

    assert math.isnan(metrics.results()["x"])  # type: ignore[arg-type]


_RECORDS = st.lists(
    st.tuples(st.sampled_from(["a", "b"]), st.integers(-50, 50), st.integers(0, 5), st.integers(0, 2)), max_size=30
)


@given(_RECORDS)
def test_merge_ranks_through_json_equals_one_process(records: list[tuple[str, int, int, int]]) -> None:
    expected, ranks = Metrics(), [Metrics() for _ in range(3)]
    for name, value, weight, rank in records:
        for metrics in (expected, ranks[rank]):
            for kind in ("mean", "max", "min", "sum"):
                metrics.add(f"{name}/{kind}", value, weight, kind)

    merged = Metrics()
    for rank in ranks:
        merged.merge(Metrics.from_json(json.loads(json.dumps(rank.to_json()))))

    assert merged.results() == expected.results()


def test_write_appends_one_object_per_step(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    MetricsWriter(path).write({"step": 1, "loss": torch.tensor(0.5), "eval/accuracy": None})
    MetricsWriter(path).write({"step": 2, "loss": 0.25})

    lines = path.read_text().splitlines()

    assert [json.loads(line) for line in lines] == [
        {"step": 1, "loss": 0.5, "eval/accuracy": None},
        {"step": 2, "loss": 0.25},
    ]
    assert lines[0].startswith('{"step": 1,')


def test_write_non_finite_value_becomes_null_with_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    with caplog.at_level(logging.WARNING, logger="rl.metrics"):
        writer.write({"step": 1, "loss": math.nan, "gap": torch.tensor(math.inf)})

    record = json.loads(writer.path.read_text())

    assert record == {"step": 1, "loss": None, "gap": None, "metrics/non_finite": 2}
    assert writer.non_finite == 2
    assert "loss=nan, gap=inf" in caplog.text


@pytest.mark.parametrize("value", ["0.5", torch.zeros(2)])
def test_write_value_not_a_number_raises_and_writes_nothing(tmp_path: Path, value: Any) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")

    with pytest.raises(DataError, match="metric 'x'"):
        writer.write({"step": 1, "x": value})
    assert not writer.path.exists()


def test_write_after_kill_removes_unfinished_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')

    MetricsWriter(path).write({"step": 2})

    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_record_non_finite_number_raises(value: float) -> None:
    with collect() as metrics, pytest.raises(DataError, match="'custom'"):
        record("custom", value)

    assert metrics.results() == {}
