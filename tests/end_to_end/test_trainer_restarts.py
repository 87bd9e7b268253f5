"""Commands whose trainers are killed or stopped go on by themselves, from their newest recover point."""

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

NO_POINTS = {"recover.every": 0, "recover.every_minutes": 0}


def _start(name: str, model: Path, run_dir: Path, **more: object) -> Command:
    settings = {
        "model.path": model,
        "recipe": "embedded",
        "total_steps": 12,
        "data.batch_size": 4,
        "evaluation.rows": 0,
        "recover.every": 3,
    }
    return Command(name, run_dir, settings | more)


def _untimed(command: Command) -> list[dict[str, Any]]:
    """Its records without what differs from run to run."""
    timed = ("timestamp", "time/", "throughput/", "memory/")
    return [{k: v for k, v in record.items() if not k.startswith(timed)} for record in command.records()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, hidden=32)


@pytest.mark.slow
def test_grpo_trainer_killed_goes_on_by_itself_and_learns_from_every_prompt_once(model: Path, tmp_path: Path) -> None:
    small = {"rollout.group_size": 2, "rollout.generation.max_new_tokens": 8}
    command = _start("gsm8k-grpo", model, tmp_path / "run", **small, total_steps=200)
    command.wait_for(command.has_recovery_checkpoint)
    command.send_signal("actor-0", signal.SIGKILL)

    said = command.finish()

    assert "actor-0 was killed by SIGKILL" in said
    assert "the newest recovery checkpoint (restart 1 of 3 within 600 s)" in said
    assert "200/200" in said
    records = command.records()
    assert [(r["step"], r["version"]) for r in records] == [(step, step) for step in range(1, 201)]
    learned = command.trained_completions()
    assert len(learned) == 200 * 4
    assert set(learned.values()) == {2}  # its group, once
    assert not list((command.run_dir / "names" / "servers").rglob("=value"))
    assert not weights_directory(command.run_dir).exists()


def _start_with_parts(model: Path, file: Path, monkeypatch: pytest.MonkeyPatch, **more: object) -> Command:
    monkeypatch.setenv("STUCK_FILE", str(file))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"))
    settings = {
        "algorithm.loss.kind": "stuck_components:stuck_loss",
        "rollout.group_size": 2,
        "rollout.generation.max_new_tokens": 8,
        **NO_POINTS,
        "total_steps": 100_000,
    }
    return _start("gsm8k-grpo", model, file.parent / "run", **settings | more)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("what", "timeout", "says"),
    [
        (
            "workflow",
            "stall_timeout",
            r"rollout.stall_timeout=8\). stuck stage: workflow, for \d(.|\n)*in arun_episode",
        ),
        (
            "trainer",
            "trainer_timeout",
            r"stuck stage: trainer.*rollout.trainer_timeout=8(.|\n)*in stuck_loss",
        ),
    ],
)
def test_run_in_which_nothing_moves_ends_with_the_stage_its_age_and_its_stack(
    what: str, timeout: str, says: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "stuck"
    # a run that has a point would be started again
    more = {"rollout.workflow": "stuck_components:StuckWorkflow", f"rollout.{timeout}": 8}
    command = _start_with_parts(model, file, monkeypatch, **more)
    command.wait_for(lambda: bool(command.records()))
    file.write_text(what)

    said = command.finish(code=1)

    assert re.search(says, said), said


@pytest.mark.nightly
def test_run_whose_reward_fails_ends_with_the_counts_and_the_trace_and_is_not_started_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"rollout.reward": "stuck_components:failing_reward", "rollout.failure_min_groups": 8, "recover.every": 1}
    command = _start_with_parts(model, tmp_path / "stuck", monkeypatch, **more)
    command.wait_for(command.has_recovery_checkpoint)
    (tmp_path / "stuck").write_text("reward")

    said = command.finish(code=1)

    assert re.search(r"of the last \d+ groups failed.*reward", "\n".join(said.splitlines()[-3:])), said
    assert re.search(r"ZeroDivisionError.*stuck_components.py:\d+", said), said
    assert "restart 1 of" not in said
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "run/groups.jsonl").read_text().splitlines()]
    assert any(reason and reason.startswith("reward: ") for reason in reasons)


@pytest.mark.nightly
def test_sft_rank_that_is_stopped_is_noticed_and_the_run_ends_as_if_it_had_not_been(
    model: Path, tmp_path: Path
) -> None:
    """Of two ranks, so that the other one waits in a collective, whose own deadline is ten minutes."""
    ranks = {"allocation": "fsdp:d2", "cluster.device": "cpu"}
    whole = _start("gsm8k-sft", model, tmp_path / "whole", **ranks)
    whole.finish()
    command = _start("gsm8k-sft", model, tmp_path / "run", **ranks, **{"launcher.health_timeout": 10})
    command.wait_for(command.has_recovery_checkpoint)
    command.send_signal("actor-1", signal.SIGSTOP)

    said = command.finish()

    assert "actor-1 sent no heartbeat for 10 s" in said
    assert _untimed(command) == _untimed(whole)
    found, expected = (load_file(c.run_dir / "checkpoints/step_12/model.safetensors") for c in (command, whole))
    assert all(found[name].equal(expected[name]) for name in expected)


@pytest.mark.nightly
def test_sft_trainer_killed_without_recover_points_ends_with_a_sentence(model: Path, tmp_path: Path) -> None:
    command = _start("gsm8k-sft", model, tmp_path / "run", **NO_POINTS, total_steps=100_000)
    command.wait_for(lambda: (command.run_dir / "metrics.jsonl").exists())
    command.send_signal("actor-0", signal.SIGKILL)
    said = command.finish(60, code=1)
    assert "actor-0 was killed by SIGKILL" in said
    assert "no recovery checkpoint to resume from" in said
