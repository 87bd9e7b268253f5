"""Whole commands on a real Ray cluster and a real Slurm whose server and trainer are killed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from commands import Command
from launchers import nodes_of, standing

from rl_contracts.testing.models import make_tiny_model

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of a run whose steps take a fraction of a second."""
    return {
        "model.path": make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, hidden=32),
        "recipe": "embedded",
        "total_steps": 40,
        "data.batch_size": 4,
        "rollout.group_size": 2,
        "rollout.generation.max_new_tokens": 8,
        "evaluation.rows": 0,
        "recover.every": 3,
        "publish.route": "disk",
    }


@pytest.fixture(scope="module", params=["ray", "slurm"])
def launcher(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """The settings of a launcher, whose cluster stands."""
    with standing(request.param) as settings:
        yield settings


def _went_on(command: Command, begin: int = 0) -> bool:
    """Whether it has made steps since."""
    return len(command.steps()) > begin + 2


def _exactly_once(command: Command, steps: int) -> None:
    """Each step is there once, and learned from its own prompts."""
    assert [(r["step"], r["version"]) for r in command.steps()] == [(step, step) for step in range(1, steps + 1)]
    learned = command.learned_from()
    assert (len(learned), set(learned.values())) == (steps * 4, {2})


def test_server_and_trainer_are_killed_the_run_goes_on_and_loses_nothing(launcher, small, start_command):
    command = start_command("gsm8k-grpo", small | launcher | {"total_steps": 60})
    command.wait_for(lambda: _went_on(command))
    assert len(set(nodes_of(command).values())) == 2
    command.send("rollout-0", signal.SIGKILL)
    command.wait_for(lambda: any(r["server/rejoins"] for r in command.steps()))
    command.wait_for(command.has_point)
    command.send("actor-0", signal.SIGKILL)
    said = command.finish(400)

    assert "rollout-0 was killed by SIGKILL" in said
    assert "actor-0 was killed by SIGKILL" in said
    assert "its newest recover point (restart 1 of 3 within 600 s)" in said
    _exactly_once(command, 60)
