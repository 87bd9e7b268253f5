"""The GPU benchmark runs completely on a CPU, and a failing part does not affect the others."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parent

pytestmark = pytest.mark.timeout(600)


def run_tiny() -> dict[str, list[dict[str, Any]]]:
    """Return the lines of a tiny run on the CPU, by part."""
    command = [sys.executable, str(BENCHMARKS / "gpu_step.py"), "--device", "cpu", "--tiny"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=560, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    lines = [json.loads(line) for line in process.stdout.splitlines()]
    assert all(line["seconds"] > 0 and line["torch"] and line["transformers"] for line in lines)
    assert not [line for line in lines if {"failed", "skipped", "out_of_memory"} & set(line)]
    return {part: [line for line in lines if line["part"] == part] for part in "abc"}


@pytest.mark.nightly  # two minutes
def test_tiny_run_reports_training_combinations_run_and_gpu_tests() -> None:
    results = run_tiny()

    keys = ("model", "compile", "gradient_checkpointing")
    assert len({tuple(line[key] for key in keys) for line in results["a"]}) == len(results["a"]) == 6
    for line in results["a"]:
        assert min(depth["tokens_per_s"] for depth in line["depths"].values()) > 0
        assert line["full_depth"]["layers"] in (28, 48)
        assert line["full_depth"]["tokens_per_s"] > 0
        assert line["full_depth"]["memory_gib"] > 0
        assert len(line["kernels"]) == 10
        assert line["kernels"][0]["ms"] > 0
    run, publish = results["b"]
    assert run["route"] == publish["route"] == "shm"
    assert run["completions_per_s"] > 0
    assert run["mean_tokens"] == 64
    assert run["fraction"]["train"] > 0
    assert 0 <= run["gap"]["mean_abs"] < 0.01
    assert min(publish["bytes"], publish["publish_s"], publish["copy_s"]) > 0
    [line] = results["c"]
    assert line["exit_code"] == 0
    assert line["collected"] > 0


def test_run_parts_failing_part_is_reported_and_others_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu_step

    def failing() -> Iterator[dict[str, Any]]:
        yield {"value": 1}
        raise ValueError("no such thing")

    def missing_module() -> Iterator[dict[str, Any]]:
        import a_module_that_does_not_exist

        yield {"value": a_module_that_does_not_exist}

    def working() -> Iterator[dict[str, Any]]:
        yield {"value": 2}

    code = gpu_step.run_parts({"x": failing, "y": missing_module, "z": working}, {"gpu": None})

    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code == 1
    assert [line["part"] for line in lines] == ["x", "x", "y", "z"]
    assert lines[1]["failed"] == "ValueError: no such thing"
    assert lines[2]["skipped"] == "module a_module_that_does_not_exist is not installed"
    assert lines[3]["value"] == 2


@pytest.mark.parametrize(("values", "expected"), [((3.0, 5.0), 29.0), ((5.0, 3.0), 5.0)])
def test_at_depth_extrapolates_linearly_without_falling(
    values: tuple[float, float], expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu_step_train

    assert gpu_step_train.at_depth(28, (2, 4), values) == expected


def test_combinations_out_of_memory_continues_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu_step_train as train

    state = SimpleNamespace(checkpointing=True, destroy=lambda: None)

    def measure(*_: Any) -> train.Measurement:
        if not state.checkpointing:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return train.Measurement(1.0, 2.0, 3.0, [])

    monkeypatch.setattr(train, "set_checkpointing", lambda engine, on: setattr(engine, "checkpointing", on))
    monkeypatch.setattr(train, "measure", measure)
    load, make = train.Load(rows=2, lengths=(4, 8)), lambda depth: state

    lines = list(train.combinations(train.SHAPES[0], load, "cpu", False, make, time.monotonic() + 60))

    assert [line["gradient_checkpointing"] for line in lines] == [False, True]
    assert lines[0]["out_of_memory"] == "CUDA out of memory"
    assert lines[1]["full_depth"]["seconds_per_step"] == 1.0


def test_combinations_after_the_deadline_build_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu_step_train as train

    load = train.Load(rows=2, lengths=(4, 8))

    lines = list(train.combinations(train.SHAPES[0], load, "cpu", False, lambda depth: 1 / 0, time.monotonic() - 1))

    assert [line["skipped"] for line in lines] == [train.BUDGET_SPENT["skipped"]] * 2
