"""Recorded figures and the metrics file."""

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


def test_results_mean_is_sum_over_weight_not_mean_of_means() -> None:
    figures = Metrics()
    figures.add("loss", 3.0, weight=10)
    figures.add("loss", 1.0, weight=2)

    assert figures.results() == {"loss": pytest.approx(32 / 12)}


def test_results_kinds_of_reduction() -> None:
    figures = Metrics()
    for value in (3.0, -1.0, 2.0):
        for kind in ("mean", "sum", "min", "max"):
            figures.add(kind, value, kind=kind)
    figures.add("sum", 2.0, weight=3, kind="sum")

    assert figures.results() == {"mean": pytest.approx(4 / 3), "sum": 10.0, "min": -1.0, "max": 3.0}


def test_results_without_weight_are_none_but_sums_are_zero() -> None:
    figures = Metrics()
    for kind in ("mean", "sum", "min", "max"):
        figures.add(kind, math.nan, weight=0, kind=kind)

    assert figures.results() == {"mean": None, "sum": 0.0, "min": None, "max": None}


def test_take_starts_anew_and_names_stay_known() -> None:
    figures = Metrics()
    figures.add("length", 4)
    figures.add("retries", 2, kind="sum")
    figures.add("longest", 4, kind="max")

    assert figures.drain().results() == {"length": 4.0, "retries": 2.0, "longest": 4.0}
    figures.add("longest", -3, kind="max")
    assert figures.drain().results() == {"length": None, "retries": 0.0, "longest": -3.0}


def test_add_one_name_as_two_kinds_is_refused() -> None:
    figures, other = Metrics(), Metrics()
    figures.add("x", 1)
    other.add("x", 1, kind="min")

    with pytest.raises(ConfigError, match="'x' is a mean, but is now recorded as a max"):
        figures.add("x", 1, kind="max")
    with pytest.raises(ConfigError, match="'x' is a mean, but is now recorded as a min"):
        figures.merge(other)
    with pytest.raises(ConfigError, match="'y': expected a kind of mean, sum, min, max, found 'median'"):
        figures.add("y", 1, kind="median")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["0.5", None, [1.0], torch.zeros(2).numpy()])
def test_add_value_that_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(DataError, match="metric 'x'"):
        Metrics().add("x", value)


def test_record_outside_of_a_collector_does_nothing() -> None:
    record("x", 1)
    with collect() as figures:
        pass
    record("x", 1)

    assert figures.results() == {}


def test_record_nested_collectors_do_not_mix_also_after_an_error() -> None:
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


async def test_record_tasks_that_interleave_do_not_mix_and_their_own_tasks_belong_to_them() -> None:
    barrier = asyncio.Barrier(2)

    async def episode(value: float) -> Metrics:
        with collect() as figures:
            await barrier.wait()
            await asyncio.gather(*(asyncio.to_thread(record, "reward", value + i) for i in range(2)))
            await barrier.wait()
        return figures

    a, b = await asyncio.gather(episode(1), episode(5))

    assert (a.results(), b.results()) == ({"reward": 1.5}, {"reward": 5.5})


def test_add_from_many_threads_loses_nothing() -> None:
    figures = Metrics()
    barrier = threading.Barrier(4)

    def work(name: str) -> None:
        barrier.wait(5)
        for _ in range(500):
            figures.add(name, 1, kind="sum")

    threads = [threading.Thread(target=work, args=(f"t{i % 2}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)

    assert figures.results() == {"t0": 1000.0, "t1": 1000.0}


def test_add_tensors_are_not_read_before_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a tensor was read")

    figures = Metrics()
    value = torch.tensor(6.0, requires_grad=True)
    with monkeypatch.context() as patch:
        for reader in ("item", "tolist", "__float__", "__bool__", "__int__"):
            patch.setattr(torch.Tensor, reader, refuse)
        figures.add("loss", value / 2, torch.tensor(2))
        figures.add("loss", 1.0, torch.tensor([2]))
        for extreme in (value, 4.0, torch.tensor(5.0)):
            figures.add("least", extreme, kind="min")
            figures.add("greatest", extreme, kind="max")

    assert figures.results() == {"loss": 2.0, "least": 4.0, "greatest": 6.0}


def test_add_tensor_of_many_entries_counts_those_with_weight() -> None:
    figures = Metrics()
    values, weights = torch.tensor([[1.0, math.nan, 3.0], [-math.inf, 8.0, 9.0]]), torch.tensor([[1, 0, 1], [0, 2, 0]])
    for kind in ("mean", "sum", "min", "max"):
        figures.add(kind, values, weights, kind)
        figures.add(kind, values[:0], weights[:0].bool(), kind)
    figures.add("share", values > 2, weight=weights > 0)

    assert figures.results() == {"mean": 5.0, "sum": 20.0, "min": 1.0, "max": 8.0, "share": pytest.approx(2 / 3)}


def test_add_tensor_changed_afterwards_keeps_the_value_as_recorded() -> None:
    figures = Metrics()
    value = torch.tensor(1.0, dtype=torch.float64)
    for kind in ("mean", "max"):
        figures.add(kind, value, kind=kind)
    value.add_(5)

    assert figures.results() == {"mean": 1.0, "max": 1.0}


def test_add_many_float32_sums_does_not_lose_small_ones() -> None:
    figures = Metrics()
    figures.add("x", torch.tensor(2.0**24), kind="sum")
    for _ in range(8):
        figures.add("x", torch.tensor(1.0), kind="sum")

    assert figures.results() == {"x": 2.0**24 + 8}


def test_add_nan_in_an_extreme_is_kept() -> None:
    figures = Metrics()
    for value in (1.0, math.nan, 2.0):
        figures.add("x", value, kind="max")

    assert math.isnan(figures.results()["x"])  # type: ignore[arg-type]


_RECORDS = st.lists(
    st.tuples(st.sampled_from(["a", "b"]), st.integers(-50, 50), st.integers(0, 5), st.integers(0, 2)), max_size=30
)


@given(_RECORDS)
def test_merge_over_ranks_by_way_of_json_equals_one_process(records: list[tuple[str, int, int, int]]) -> None:
    whole, ranks = Metrics(), [Metrics() for _ in range(3)]
    for name, value, weight, rank in records:
        for figures in (whole, ranks[rank]):
            for kind in ("mean", "max", "min", "sum"):
                figures.add(f"{name}/{kind}", value, weight, kind)

    merged = Metrics()
    for rank in ranks:
        merged.merge(Metrics.from_json(json.loads(json.dumps(rank.to_json()))))

    assert merged.results() == whole.results()


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


def test_write_non_finite_becomes_null_with_a_counted_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    with caplog.at_level(logging.WARNING, logger="rl.metrics"):
        writer.write({"step": 1, "loss": math.nan, "gap": torch.tensor(math.inf)})

    record = json.loads(writer.path.read_text())

    assert record == {"step": 1, "loss": None, "gap": None, "metrics/non_finite": 2}
    assert writer.non_finite == 2
    assert "loss=nan, gap=inf" in caplog.text


@pytest.mark.parametrize("value", ["0.5", [1.0], torch.zeros(2), torch.zeros(2).numpy()])
def test_write_value_that_is_no_number_is_refused_and_writes_nothing(tmp_path: Path, value: Any) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")

    with pytest.raises(DataError, match="metric 'x'"):
        writer.write({"step": 1, "x": value})
    assert not writer.path.exists()


def test_writer_after_a_kill_cuts_the_unfinished_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')

    MetricsWriter(path).write({"step": 2})

    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_record_number_that_is_not_finite_is_refused(value: float) -> None:
    with collect() as figures, pytest.raises(DataError, match="mine"):
        record("mine", value)

    assert figures.results() == {}
