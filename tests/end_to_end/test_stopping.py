"""A run of any command that is stopped at a random moment keeps every finished step and resumes bit-identically."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rl_contracts.runtime.run_files import last_recovery_checkpoint
from rl_contracts.testing.models import make_tiny_model
from rl_contracts.testing.waiting import wait_until

BIN = Path(sys.executable).parent
MEASURED = ("timestamp", "time/", "throughput/", "memory/", "server/")
"""Prefixes of metrics that depend on clocks or servers."""
GENERATED = ("groups/", "tokens/generated", "finished/")
"""Prefixes of metrics that count generated groups, including groups of an abandoned step."""
MINUTES = 0.1


REWARD = "reward_by_ids:score"
SCORE = "def score(prompt, completions, prompt_ids, completion_ids, **data):\n    return sum(completion_ids) % 7 / 6\n"
"""Reward that varies within each group of a random model."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("reward")
    (directory / "reward_by_ids.py").write_text(SCORE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(directory))
        yield make_tiny_model(tmp_path_factory.mktemp("model"), layers=2, hidden=128)


def _command(name: str, model: Path, run_dir: Path, **more: object) -> list[str]:
    settings = {"run_dir": run_dir, "model.path": model, "recipe": "embedded", "evaluation.examples": 0}
    if name == "gsm8k-grpo":
        settings |= {"rollout.group_size": 4, "rollout.generation.max_new_tokens": 8, "rollout.reward": REWARD}
    return [str(BIN / name), *(f"{key}={value}" for key, value in (settings | more).items())]


def _records(run_dir: Path) -> list[dict[str, Any]]:
    """Return the records without metrics that differ between runs."""
    lines = _lines(run_dir)
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(MEASURED + GENERATED)} for line in lines]


def _lines(run_dir: Path) -> list[str]:
    path = run_dir / "metrics.jsonl"
    return path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []


def _stop(command: list[str], run_dir: Path, *signals: signal.Signals, within: float) -> str:
    """Start a command, send it signals at a random moment after its second step, and return its output."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_until(lambda: len(_records(run_dir)) >= 2 or process.poll() is not None, 200, "two steps")
        time.sleep(random.uniform(0, within))
        for number in signals:
            process.send_signal(number)
            time.sleep(0.7)  # signals in quick succession count as one
        out, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    return out


def _finish(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gsm8k-sft", pytest.param("hh-rlhf-dpo", marks=pytest.mark.nightly)])
def test_run_stopped_once_keeps_every_finished_step(name: str, model: Path, tmp_path: Path) -> None:
    endless = _command(name, model, tmp_path, **{"data.batch_size": 4, "total_steps": 100_000})

    out = _stop(endless, tmp_path, signal.SIGTERM, within=2.0)

    steps = [record["step"] for record in _records(tmp_path)]
    assert last_recovery_checkpoint(tmp_path / "recover") == steps[-1], out
    assert steps == [*range(1, len(steps) + 1)]


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["gsm8k-grpo", "gsm8k-sft", "hh-rlhf-dpo"])
def test_run_stopped_twice_in_long_step_resumes_bit_identically(name: str, model: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    settings = {"deterministic": True, "total_steps": 4, "allocation": "fsdp:d2", "data.batch_size": 512}
    if name == "gsm8k-grpo":
        settings |= {"rollout.max_staleness": 0, "allocation": "embedded:d1+fsdp:d2", "data.batch_size": 64}
    settings["launcher.grace_seconds"] = 4  # shorter than a step
    _finish(_command(name, model, whole, **settings))
    command = _command(name, model, cut, **settings)

    # most of a GRPO step is waiting for the batch, where one signal suffices
    out = _stop(command, cut, signal.SIGINT, signal.SIGINT, within=15 if name == "gsm8k-grpo" else 0.5)

    assert last_recovery_checkpoint(cut / "recover") == _records(cut)[-1]["step"] in (2, 3), out
    _finish(command)
    resumed, expected = (load_file(d / "checkpoints" / "step_4" / "model.safetensors") for d in (cut, whole))
    assert all(resumed[key].equal(expected[key]) for key in expected)
    assert _records(cut) == _records(whole)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gsm8k-grpo", "hh-rlhf-rm"])
def test_run_killed_loses_at_most_one_checkpoint_interval(name: str, model: Path, tmp_path: Path) -> None:
    more = {"data.batch_size": 4, "total_steps": 100_000, "recover.every_minutes": MINUTES}
    process = subprocess.Popen(_command(name, model, tmp_path, **more), stdout=subprocess.DEVNULL)
    try:
        wait_until(
            lambda: last_recovery_checkpoint(tmp_path / "recover") is not None or process.poll() is not None,
            200,
            "a recovery checkpoint",
        )
        time.sleep(random.uniform(0, 60 * MINUTES))
    finally:
        process.kill()
    process.wait(10)

    records = [json.loads(line) for line in _lines(tmp_path)]
    (saved,) = (record for record in records if record["step"] == last_recovery_checkpoint(tmp_path / "recover"))
    longest = max(record["time/step"] + (record.get("time/recover_written") or 0.0) for record in records)
    assert records[-1]["timestamp"] - saved["timestamp"] < 60 * MINUTES + 3 * longest + 1
