"""Commands whose trainers are killed or stopped go on by themselves, from their newest recover point."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rl_apps.parts import weights_directory
from rl_contracts.testing.models import make_tiny_model

BIN = Path(sys.executable).parent


class Command:
    """A command that goes on, or has ended."""

    def __init__(self, name: str, model: Path, run_dir: Path, **more: object) -> None:
        settings = {
            "run_dir": run_dir,
            "model.path": model,
            "recipe": "embedded",
            "total_steps": 12,
            "data.batch_size": 4,
            "evaluation.rows": 0,
            "recover.every": 3,
        }
        self.run_dir = run_dir
        line = [str(BIN / name), *(f"{key}={value}" for key, value in (settings | more).items())]
        self.process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def wait_for(self, condition: Callable[[], bool], seconds: float = 200.0) -> None:
        """Until something is so, or the command has ended."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, f"still waiting after {seconds:g} s"
            time.sleep(0.005)

    def has_point(self) -> bool:
        return bool(list((self.run_dir / "recover").glob("step_*")))

    def workers(self) -> dict[str, dict[str, Any]]:
        """What runs, by name."""
        file = self.run_dir / "names" / "workers" / "=value"
        return {worker["name"]: worker for worker in json.loads(file.read_text())}

    def send(self, worker: str, number: int) -> None:
        """A signal to a worker."""
        os.kill(self.workers()[worker]["pid"], number)

    def finish(self, seconds: float = 250.0) -> tuple[str, str]:
        """What it said; fails where it failed."""
        out, err = self.process.communicate(timeout=seconds)
        assert self.process.returncode == 0, out + err
        return out, err

    def records(self) -> list[dict[str, Any]]:
        """Without what differs from run to run."""
        lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        timed = ("time/", "throughput/", "memory/")
        return [{k: v for k, v in json.loads(line).items() if not k.startswith(timed)} for line in lines]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, hidden=32)


@pytest.mark.slow
def test_grpo_trainer_killed_goes_on_by_itself_and_learns_from_every_prompt_once(model: Path, tmp_path: Path) -> None:
    small = {"rollout.group_size": 2, "rollout.generation.max_new_tokens": 8}
    command = Command("gsm8k-grpo", model, tmp_path / "run", **small, total_steps=40)
    command.wait_for(command.has_point)
    command.send("actor-0", signal.SIGKILL)

    out, err = command.finish()

    assert "actor-0 was killed by SIGKILL" in err
    assert "its newest recover point (restart 1 of 3 within 600 s)" in err
    assert "40/40" in out
    records = command.records()
    assert [(r["step"], r["version"]) for r in records] == [(step, step) for step in range(1, 41)]
    rollouts = (path.read_text().splitlines() for path in (command.run_dir / "rollouts").glob("step_*-0.jsonl"))
    learned = Counter(json.loads(line)["prompt_id"] for lines in rollouts for line in lines)
    assert len(learned) == 40 * 4
    assert set(learned.values()) == {2}  # its group, once
    assert not list((command.run_dir / "names" / "servers").rglob("=value"))
    assert not weights_directory(command.run_dir).exists()


@pytest.mark.nightly
def test_sft_rank_that_is_stopped_is_noticed_and_the_run_ends_as_if_it_had_not_been(
    model: Path, tmp_path: Path
) -> None:
    """Of two ranks, so that the other one waits in a collective, whose own deadline is ten minutes."""
    ranks = {"allocation": "fsdp:d2", "cluster.device": "cpu"}
    whole = Command("gsm8k-sft", model, tmp_path / "whole", **ranks)
    whole.finish()
    command = Command("gsm8k-sft", model, tmp_path / "run", **ranks, **{"launcher.health_timeout": 10})
    command.wait_for(command.has_point)
    command.send("actor-1", signal.SIGSTOP)

    _, err = command.finish()

    assert "actor-1 gave no sign of life for 10 s" in err
    assert command.records() == whole.records()
    found, expected = (load_file(c.run_dir / "checkpoints/step_12/model.safetensors") for c in (command, whole))
    assert all(found[name].equal(expected[name]) for name in expected)


@pytest.mark.nightly
def test_sft_trainer_killed_without_recover_points_ends_with_a_sentence(model: Path, tmp_path: Path) -> None:
    command = Command("gsm8k-sft", model, tmp_path / "run", **{"recover.every": 0}, total_steps=100_000)
    command.wait_for(lambda: (command.run_dir / "metrics.jsonl").exists())
    command.send("actor-0", signal.SIGKILL)
    _, err = command.process.communicate(timeout=60)
    assert command.process.returncode == 1
    assert "actor-0 was killed by SIGKILL" in err
    assert "recover.every=N writes one every N steps" in err
