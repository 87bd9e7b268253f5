"""Commands restart killed or stopped trainers from the newest recovery checkpoint."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from commands import Command
from safetensors.torch import load_file

from rl_apps.run.components import weights_directory
from rl_contracts.testing.models import make_tiny_model

NO_CHECKPOINTS = {"recover.every": 0, "recover.every_minutes": 0}


def _start(name: str, model: Path, run_dir: Path, **more: object) -> Command:
    settings = {
        "model.path": model,
        "recipe": "embedded",
        "total_steps": 12,
        "data.batch_size": 4,
        "evaluation.examples": 0,
        "recover.every": 3,
    }
    return Command(name, run_dir, settings | more)


def _records_without_times(command: Command) -> list[dict[str, Any]]:
    """Return the records of a command without metrics that differ between runs."""
    timed = ("timestamp", "time/", "throughput/", "memory/")
    return [{k: v for k, v in record.items() if not k.startswith(timed)} for record in command.records()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, hidden=32)


@pytest.mark.guarantee(
    "After SIGKILL of a trainer the run restarts automatically and trains on every prompt once.", area="prompts"
)
@pytest.mark.slow
def test_grpo_trainer_killed_restarts_and_trains_on_every_prompt_once(model: Path, tmp_path: Path) -> None:
    small = {"rollout.group_size": 2, "rollout.generation.max_new_tokens": 8}
    command = _start("gsm8k-grpo", model, tmp_path / "run", **small, total_steps=200)
    command.wait_for(command.has_recovery_checkpoint)
    command.send_signal("actor-0", signal.SIGKILL)

    output = command.finish()

    assert "actor-0 was killed by SIGKILL" in output
    assert "the newest recovery checkpoint (restart 1 of 3 within 600 s)" in output
    assert "200/200" in output
    records = command.records()
    assert [(r["step"], r["version"]) for r in records] == [(step, step) for step in range(1, 201)]
    trained = command.trained_completions()
    assert len(trained) == 200 * 4
    assert set(trained.values()) == {2}  # one group of two completions
    assert not list((command.run_dir / "names" / "servers").rglob("=value"))
    assert not weights_directory(command.run_dir).exists()


def _start_with_stuck_components(model: Path, file: Path, monkeypatch: pytest.MonkeyPatch, **more: object) -> Command:
    monkeypatch.setenv("STUCK_FILE", str(file))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"))
    settings = {
        "algorithm.loss.kind": "stuck_components:stuck_loss",
        "rollout.group_size": 2,
        "rollout.generation.max_new_tokens": 8,
        **NO_CHECKPOINTS,
        "total_steps": 100_000,
    }
    return _start("gsm8k-grpo", model, file.parent / "run", **settings | more)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("stuck", "pattern"),
    [
        (
            "workflow",
            r"rollout.stall_timeout=8\). stuck stage: workflow, for \d(.|\n)*in arun_episode",
        ),
        (
            "trainer",
            r"stuck stage: trainer.*the limit is 8 s(.|\n)*in stuck_loss",
        ),
    ],
)
def test_run_without_progress_ends_with_stuck_stage_age_and_stack(
    stuck: str, pattern: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "stuck"
    monkeypatch.setenv("TRAINER_TIMEOUT", "8")
    # without recovery checkpoints, so that the launcher does not restart the run
    more = {"rollout.workflow": "stuck_components:StuckWorkflow", "rollout.stall_timeout": 8}
    command = _start_with_stuck_components(model, file, monkeypatch, **more)
    command.wait_for(lambda: bool(command.records()))
    file.write_text(stuck)

    output = command.finish(code=1)

    assert re.search(pattern, output), output


@pytest.mark.nightly
def test_run_with_failing_reward_ends_with_trace_without_restart(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"rollout.reward": "stuck_components:failing_reward", "recover.every": 1}
    command = _start_with_stuck_components(model, tmp_path / "stuck", monkeypatch, **more)
    command.wait_for(command.has_recovery_checkpoint)
    (tmp_path / "stuck").write_text("reward")

    output = command.finish(code=1)

    assert re.search(r"of the last \d+ groups failed.*reward", "\n".join(output.splitlines()[-3:])), output
    assert re.search(r"ZeroDivisionError.*stuck_components.py:\d+", output), output
    assert "restart 1 of" not in output
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "run/groups.jsonl").read_text().splitlines()]
    assert any(reason and reason.startswith("reward: ") for reason in reasons)


@pytest.mark.nightly
def test_sft_rank_without_heartbeat_restarts_and_run_ends_identically(model: Path, tmp_path: Path) -> None:
    """The other rank waits in a collective with a deadline of ten minutes."""
    ranks = {"allocation": "fsdp:d2", "cluster.device": "cpu"}
    whole = _start("gsm8k-sft", model, tmp_path / "whole", **ranks)
    whole.finish()
    command = _start("gsm8k-sft", model, tmp_path / "run", **ranks, **{"launcher.health_timeout": 10})
    command.wait_for(command.has_recovery_checkpoint)
    command.send_signal("actor-1", signal.SIGSTOP)

    output = command.finish()

    assert "actor-1 sent no heartbeat for 10 s" in output
    assert _records_without_times(command) == _records_without_times(whole)
    resumed, expected = (load_file(c.run_dir / "checkpoints/step_12/model.safetensors") for c in (command, whole))
    assert all(resumed[name].equal(expected[name]) for name in expected)


@pytest.mark.nightly
def test_sft_trainer_killed_without_checkpoint_ends_with_message(model: Path, tmp_path: Path) -> None:
    command = _start("gsm8k-sft", model, tmp_path / "run", **NO_CHECKPOINTS, total_steps=100_000)
    command.wait_for(lambda: (command.run_dir / "metrics.jsonl").exists())
    command.send_signal("actor-0", signal.SIGKILL)
    output = command.finish(60, code=1)
    assert "actor-0 was killed by SIGKILL" in output
    assert "no recovery checkpoint to resume from" in output
