"""The stats tracker and the metrics file."""

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
from rl_contracts.metrics import MetricsWriter, Statistic, StatsTracker, merge_statistics


def test_export_mean_is_sum_over_denominator_not_mean_of_means() -> None:
    tracker = StatsTracker()
    tracker.add("loss", 30.0, denominator=10)
    tracker.add("loss", 2.0, denominator=2)

    assert tracker.export() == {"loss": pytest.approx(32 / 12)}


def test_export_kinds_of_reduction() -> None:
    tracker = StatsTracker()
    for value in (3.0, -1.0, 2.0):
        tracker.scalar("mean", value)
        tracker.total("total", value)
        tracker.minimum("least", value)
        tracker.maximum("greatest", value)

    assert tracker.export() == {"mean": pytest.approx(4 / 3), "total": 4.0, "least": -1.0, "greatest": 3.0}


def test_export_nothing_recorded_or_zero_denominator_is_none() -> None:
    tracker = StatsTracker()
    tracker.add("gap", 0.0, denominator=0)
    tracker.scalar("length", 4)
    tracker.maximum("longest", 4)

    assert tracker.export() == {"gap": None, "length": 4.0, "longest": 4.0}
    assert tracker.export() == {"gap": None, "length": None, "longest": None}


def test_export_without_reset_goes_on() -> None:
    tracker = StatsTracker()
    tracker.scalar("x", 1)
    tracker.export(reset=False)
    tracker.scalar("x", 3)

    assert tracker.export() == {"x": 2.0}


def test_record_one_name_as_two_kinds_is_refused() -> None:
    tracker = StatsTracker()
    tracker.scalar("x", 1)

    with pytest.raises(ConfigError, match="'x' is a mean, but is now recorded as a max"):
        tracker.maximum("x", 1)


def test_scope_nests_and_ends_also_after_an_error() -> None:
    tracker = StatsTracker()
    with tracker.scope("rollout"):
        with contextlib.suppress(RuntimeError), tracker.scope("reward"):
            tracker.scalar("x", 1)
            raise RuntimeError
        tracker.scalar("x", 2)
    tracker.scalar("x", 3)

    assert tracker.export() == {"rollout/reward/x": 1.0, "rollout/x": 2.0, "x": 3.0}


async def test_scope_tasks_that_interleave_do_not_mix() -> None:
    tracker = StatsTracker()
    barrier = asyncio.Barrier(2)

    async def episode(name: str, value: float) -> None:
        with tracker.scope(name):
            await barrier.wait()
            tracker.scalar("reward", value)
            await barrier.wait()

    await asyncio.gather(episode("a", 1), episode("b", 2))

    assert tracker.export() == {"a/reward": 1.0, "b/reward": 2.0}


def test_scope_threads_do_not_mix_and_no_record_is_lost() -> None:
    tracker = StatsTracker()
    barrier = threading.Barrier(4)

    def work(name: str) -> None:
        with tracker.scope(name):
            barrier.wait(5)
            for _ in range(500):
                tracker.total("n", 1)

    threads = [threading.Thread(target=work, args=(f"t{i % 2}",)) for i in range(4)]
    with tracker.scope("main"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)

    assert tracker.export() == {"t0/n": 1000.0, "t1/n": 1000.0}


def test_timer_adds_seconds_also_after_an_error() -> None:
    tracker = StatsTracker()
    with tracker.scope("step"), pytest.raises(RuntimeError), tracker.timer("time/train"):
        raise RuntimeError
    with tracker.scope("step"), tracker.timer("time/train"):
        threading.Event().wait(0.02)

    assert 0.02 <= tracker.export()["step/time/train"] < 5  # type: ignore[operator]


def test_record_tensors_are_not_read_before_the_export(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a tensor was read")

    tracker = StatsTracker()
    value = torch.tensor(6.0, requires_grad=True)
    with monkeypatch.context() as patch:
        for reader in ("item", "tolist", "__float__", "__bool__", "__int__"):
            patch.setattr(torch.Tensor, reader, refuse)
        tracker.add("loss", value * 1, torch.tensor(2))
        tracker.add("loss", 2.0, torch.tensor([2]))
        for extreme in (value, 4.0, torch.tensor(5.0)):
            tracker.minimum("least", extreme)
            tracker.maximum("greatest", extreme)

    assert tracker.export() == {"loss": 2.0, "least": 4.0, "greatest": 6.0}


def test_record_tensor_changed_afterwards_keeps_the_value_as_recorded() -> None:
    tracker = StatsTracker()
    value = torch.tensor(1.0, dtype=torch.float64)
    tracker.scalar("x", value)
    value.add_(5)

    assert tracker.export() == {"x": 1.0}


def test_record_many_float32_sums_does_not_lose_small_ones() -> None:
    tracker = StatsTracker()
    tracker.add("x", torch.tensor(2.0**24), 1)
    for _ in range(8):
        tracker.add("x", torch.tensor(1.0), 0)

    assert tracker.export() == {"x": 2.0**24 + 8}


def test_record_tensor_with_many_elements_is_refused() -> None:
    with pytest.raises(DataError, match=r"'x': expected one number, found a tensor of shape \(2,\)"):
        StatsTracker().scalar("x", torch.zeros(2))


def test_record_nan_in_an_extreme_is_kept() -> None:
    tracker = StatsTracker()
    for value in (1.0, math.nan, 2.0):
        tracker.maximum("x", value)

    assert math.isnan(tracker.export()["x"])  # type: ignore[arg-type]


_RECORDS = st.lists(
    st.tuples(st.sampled_from(["a", "b"]), st.integers(-50, 50), st.integers(0, 5), st.integers(0, 2)), max_size=30
)


@given(_RECORDS)
def test_export_reduced_over_ranks_equals_one_process(records: list[tuple[str, int, int, int]]) -> None:
    whole, ranks = StatsTracker(), [StatsTracker() for _ in range(3)]
    for name, value, denominator, rank in records:
        for tracker in (whole, ranks[rank]):
            tracker.add(f"{name}/mean", value, denominator)
            tracker.maximum(f"{name}/max", value)
            tracker.total(f"{name}/sum", value)
    parts: list[dict[str, Statistic]] = []
    for rank in ranks[1:]:
        rank.export(reduce=lambda mine: parts.append(mine) or mine)  # type: ignore[func-returns-value]

    reduced = ranks[0].export(reduce=lambda mine: merge_statistics([mine, *parts]))

    assert reduced == whole.export()


def test_merge_statistics_of_different_kinds_is_refused() -> None:
    with pytest.raises(ConfigError, match="mean and max"):
        merge_statistics([{"x": Statistic("mean", 1, 1)}, {"x": Statistic("max", 1, 1)}])


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
