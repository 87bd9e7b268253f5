"""A killed command resumes from its recovery checkpoint when it is started again with the same run directory."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rl_contracts.runtime.json_lines import json_lines
from rl_contracts.runtime.run_files import last_recovery_checkpoint
from rl_contracts.testing.models import make_tiny_model

BIN = Path(sys.executable).parent


def _command(name: str, model: Path, run_dir: Path, **more: object) -> list[str]:
    settings = {
        "run_dir": run_dir,
        "model.path": model,
        "recipe": "embedded",
        "total_steps": 12,
        "data.batch_size": 4,
        "evaluation.examples": 8,
        "recover.every": 3,
    }
    return [str(BIN / name), *(f"{key}={value}" for key, value in (settings | more).items())]


def _kill_after_checkpoint(command: list[str], run_dir: Path, after: int = 0) -> int:
    """Start a command, kill it as soon as it has a recovery checkpoint later than step `after`, and return the step."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while (last_recovery_checkpoint(run_dir / "recover") or 0) <= after:
        assert process.poll() is None, "the command ended before its first recovery checkpoint"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    return last_recovery_checkpoint(run_dir / "recover") or 0


def _records(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    timed = ("timestamp", "time/", "throughput/", "memory/")
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(timed)} for line in lines]


def _optimizer_moments(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Load the optimizer moments from a recovery checkpoint of one rank."""
    tensors = [load_file(path) for path in (checkpoint / "actor").rglob("*.safetensors")]
    moments = {name: value for file in tensors for name, value in file.items() if "exp_avg" in name}
    assert len(moments) > 10
    return moments


@pytest.mark.nightly  # starts four commands
@pytest.mark.timeout(900)
def test_sft_resumed_with_other_trainers_matches_uninterrupted_run(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", layers=1, hidden=128)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    settings = {
        "total_epochs": 2,
        "total_steps": 20,
        "data.options.size": 26,
        "recover.every": 2,
        "evaluation.examples": 0,
    }
    one_rank = {**settings, "allocation": "fsdp:d1"}
    subprocess.run(_command("gsm8k-sft", model, whole, **one_rank), check=True, capture_output=True, timeout=250)

    step = _kill_after_checkpoint(_command("gsm8k-sft", model, cut, **settings, allocation="fsdp:d2"), cut)
    step = _kill_after_checkpoint(_command("gsm8k-sft", model, cut, **settings, allocation="fsdp:t2"), cut, after=step)
    subprocess.run(_command("gsm8k-sft", model, cut, **one_rank), check=True, capture_output=True, timeout=250)

    assert step < 12
    resumed, expected = (load_file(d / "checkpoints" / "step_12" / "model.safetensors") for d in (cut, whole))
    for name, value in expected.items():
        torch.testing.assert_close(resumed[name], value, rtol=1e-4, atol=1e-5, msg=name)
    resumed, expected = (_optimizer_moments(d / "recover" / "step_12") for d in (cut, whole))
    assert resumed.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(resumed[name], value, rtol=1e-3, atol=1e-4 * value.abs().max().item(), msg=name)
    losses = [[record["loss/train"] for record in _records(d)] for d in (cut, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_sft_on_megatron_tensor_ranks_resumes_on_pipeline_stages(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    settings = {"recover.every": 2, "evaluation.examples": 0}
    before, after = ({**settings, "allocation": f"megatron:{layout}"} for layout in ("t2", "p2"))
    subprocess.run(_command("gsm8k-sft", model, whole, **before), check=True, capture_output=True, timeout=250)

    step = _kill_after_checkpoint(_command("gsm8k-sft", model, cut, **before), cut)
    subprocess.run(_command("gsm8k-sft", model, cut, **after), check=True, capture_output=True, timeout=250)

    assert step < 12
    files = ((d / "checkpoints" / "step_12").glob("*.safetensors") for d in (cut, whole))
    resumed, expected = ({k: v for path in paths for k, v in load_file(path).items()} for paths in files)
    assert resumed.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(resumed[name], value, rtol=1e-4, atol=1e-5, msg=name)
    losses = [[record["loss/train"] for record in _records(d)] for d in (cut, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.nightly
def test_grpo_killed_and_restarted_trains_on_every_prompt_once(tmp_path: Path) -> None:
    model, run_dir = make_tiny_model(tmp_path / "model", layers=1, hidden=32), tmp_path / "run"
    small = {"rollout.group_size": 2, "rollout.generation.max_new_tokens": 8, "evaluation.examples": 0}
    command = _command("gsm8k-grpo", model, run_dir, **small)
    _kill_after_checkpoint(command, run_dir)

    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=250)

    assert "12/12" in done.stdout
    records = _records(run_dir)
    assert [r["step"] for r in records] == [*range(1, 13)]
    assert [r["version"] for r in records] == [*range(1, 13)]
    trained = [
        record["prompt_id"]
        for step in range(1, 13)
        for record in json_lines(run_dir / "rollouts" / f"step_{step}-0.jsonl")
    ]
    assert len(trained) == 12 * 4 * 2
    assert set(Counter(trained).values()) == {2}  # one group of two completions


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_grpo_resumed_on_two_trainers_and_one_trains_every_prompt_once(tmp_path: Path) -> None:
    """21 prompts, two epochs, 4 prompts per step: epochs end within a step, and the last step has two prompts."""
    model, run_dir = make_tiny_model(tmp_path / "model", layers=1, hidden=32), tmp_path / "run"
    settings = {
        "rollout.group_size": 2,
        "rollout.generation.max_new_tokens": 8,
        "evaluation.examples": 0,
        "data.options.size": 21,
        "total_epochs": 2,
        "total_steps": 20,
        "recover.every": 2,
    }

    def with_trainers(number: int, servers: int) -> list[str]:
        allocation = f"embedded:d{servers}+fsdp:d{number}"
        return _command("gsm8k-grpo", model, run_dir, **settings, allocation=allocation)

    first = _kill_after_checkpoint(with_trainers(1, 1), run_dir)
    second = _kill_after_checkpoint(with_trainers(2, 2), run_dir, after=first)
    done = subprocess.run(with_trainers(1, 1), check=True, capture_output=True, text=True, timeout=250)

    assert 0 < first < second < 11
    assert f"resuming after step {second} of" in done.stdout
    records = _records(run_dir)
    assert [r["step"] for r in records] == [*range(1, 12)]
    assert [r["version"] for r in records] == [*range(1, 12)]
    assert [r["sequences"] for r in records] == [8.0] * 10 + [4.0]
    trained = [
        json.loads(line)
        for path in (run_dir / "rollouts").glob("step_*.jsonl")
        for line in path.read_text().splitlines()
    ]
    # two epochs, each with one group of two completions per prompt
    assert Counter(record["prompt_id"] for record in trained) == dict.fromkeys(range(21), 2 * 2)
    groups = Counter(record["group_id"] for record in trained)
    assert set(groups.values()) == {2}, "expected one group id per group"
    assert len(groups) == 42


@pytest.mark.nightly  # test_end_to_end.py stops a run on every commit
def test_sft_stopped_by_sigterm_resumes_and_finishes_once(tmp_path: Path) -> None:
    model, run_dir = make_tiny_model(tmp_path / "model", layers=1, hidden=32), tmp_path / "run"
    more = {"recover.every": 0, "recover.every_minutes": 0, "evaluation.examples": 0}
    endless = _command("gsm8k-sft", model, run_dir, **more, total_steps=100_000)
    process = subprocess.Popen(endless, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 200
    while not (run_dir / "metrics.jsonl").exists() or len(_records(run_dir)) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    step = last_recovery_checkpoint(run_dir / "recover")
    assert process.returncode == 143
    assert step
    assert f"Stopped. The same command resumes after step {step}." in out
    assert [r["step"] for r in _records(run_dir)] == [*range(1, step + 1)]

    command = _command("gsm8k-sft", model, run_dir, **more, total_steps=step + 2)
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=250)
    assert f"resuming after step {step} of {step + 2}" in done.stdout
    assert f"total_steps changed from 100000 to {step + 2}" in done.stdout
    assert f"step {step}/" not in done.stdout
    assert [r["step"] for r in _records(run_dir)] == [*range(1, step + 3)]
    assert "total_steps: 100000" in (run_dir / "config-1.yaml").read_text()

    written = (run_dir / "metrics.jsonl").read_text()
    again = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert "this run is already finished" in again.stdout
    assert (run_dir / "metrics.jsonl").read_text() == written
