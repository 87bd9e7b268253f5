"""Runs of `multi-turn-math` and `math-agent`: a few steps, and whether accuracy improves."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rl_apps.embedded.prepare import EmbeddedRecipe, prepare_embedded
from rl_apps.embedded.warmup import WarmUp
from rl_apps.programs.conversations import MATH_AGENT, MULTI_TURN_MATH
from rl_contracts.runtime.json_lines import json_lines

BIN = Path(sys.executable).parent
WRONG_CALCULATOR = """
from rl_apps.programs.math_agent import MathAgent

def calculator(expression: str) -> str:
    '''Calculates the value of an arithmetic expression.

    Args:
        expression: numbers and + and -.
    '''
    return str(eval(expression) + 1)

class WrongAgent(MathAgent):
    tool = staticmethod(calculator)
"""
FAILING = """
from rl_apps.programs.math_agent import MathAgent

class FailingAgent(MathAgent):
    async def run(self, data, **options):
        if data["prompt_id"] % 3 == 0:
            raise RuntimeError("injected")
        return await super().run(data, **options)
"""
SMALL = ("recipe=embedded", "data.batch_size=4", "rollout.group_size=4", "evaluation.examples=8", "total_steps=3")


def run(app: Any, directory: Path, *settings: str, seconds: float = 280) -> list[dict[str, Any]]:
    """Run a command and return its records."""
    (directory.parent / "wrong_calculator.py").write_text(WRONG_CALCULATOR)
    line = [str(BIN / app.name), f"run_dir={directory}", *settings]
    result = subprocess.run(line, capture_output=True, text=True, timeout=seconds, cwd=directory.parent)
    assert result.returncode == 0, result.stdout + result.stderr
    return list(json_lines(directory / "metrics.jsonl"))


def rollouts(directory: Path) -> list[dict[str, Any]]:
    """Return the records of all trained trajectories."""
    files = sorted((directory / "rollouts").glob("step_*.jsonl"))
    return [record for file in files for record in json_lines(file)]


def accuracy(records: list[dict[str, Any]]) -> list[float]:
    return [record["eval/accuracy"] for record in records if record.get("eval/accuracy") is not None]


def warm_model(cache: Path, lessons: str) -> Path:
    """Return a model after a short warm-up."""
    recipe = EmbeddedRecipe(lessons=lessons, warm_up=WarmUp(steps=60, batch_size=32, problems=512, lr=1e-2))
    return prepare_embedded(1, recipe, cache_dir=cache)


@pytest.mark.nightly
@pytest.mark.parametrize("staleness", [1, 0])
def test_math_agent_colocated_with_server_completes_three_steps(staleness: int, tmp_path: Path) -> None:
    model = warm_model(tmp_path / "cache", "tools")
    settings = (f"model.path={model}", "allocation='embedded:d1|fsdp:d1'", f"rollout.max_staleness={staleness}")

    records = run(MATH_AGENT, tmp_path / "run", *settings, *SMALL)

    steps = [record for record in records if "sequences" in record]
    assert [record["step"] for record in steps] == [1, 2, 3]
    assert max(record["staleness/max"] for record in steps) == staleness
    assert all("sharing/freed_gib" in record and record["time/sleep"] > 0 for record in steps)
    assert max(record["sharing/freed_gib"] for record in steps) > 0
    conversations = [record["conversation"] for record in rollouts(tmp_path / "run")]
    roles = {tuple(message["role"] for message in conversation) for conversation in conversations}
    assert ("user", "assistant") in roles
    assert ("user", "assistant", "tool", "assistant") in roles  # with a tool call
    assert sum(record["agent/calls"] for record in steps if record.get("agent/calls")) > 0


@pytest.mark.nightly
def test_agent_failing_on_some_prompts_does_not_stop_the_run(tmp_path: Path) -> None:
    settings = (
        f"model.path={warm_model(tmp_path / 'cache', 'tools')}",
        "rollout.workflow=failing:FailingAgent",
        *SMALL,
    )
    settings += ("rollout.trial_episode=false", "rollout.failure_budget=0.9")
    (tmp_path / "failing.py").write_text(FAILING)

    records = run(MATH_AGENT, tmp_path / "run", *settings)

    steps = [record for record in records if "sequences" in record]
    assert [record["step"] for record in steps] == [1, 2, 3]
    assert sum(record.get("groups/failed/agent") or 0 for record in records) > 0
    assert {record["prompt_id"] % 3 for record in rollouts(tmp_path / "run")} == {1, 2}


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_multi_turn_math_improves_accuracy_of_last_turn(tmp_path: Path, record_property: Any) -> None:
    values = accuracy(run(MULTI_TURN_MATH, tmp_path / "run", seconds=1100))

    record_property("accuracy of the last turn, before and after", f"{values[0]:.3f}, {values[-1]:.3f}")
    assert values[-1] >= values[0] + 0.15
    assert 2 in {record["turns"] for record in rollouts(tmp_path / "run")}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("agent", ["MathAgent", "FrameworkAgent", "ProgramAgent"])
def test_math_agent_improves_and_fails_with_wrong_calculator(agent: str, tmp_path: Path, record_property: Any) -> None:
    workflow = f"rollout.workflow=rl_apps.programs.math_agent:{agent}"
    begin = time.monotonic()

    values = accuracy(run(MATH_AGENT, tmp_path / "run", workflow, seconds=1200))

    record_property(f"run time of {agent} in seconds", f"{time.monotonic() - begin:.0f}")
    record_property(f"held-out accuracy of {agent}, before and after", f"{values[0]:.3f}, {values[-1]:.3f}")
    assert values[-1] >= values[0] + 0.3
    if agent == "MathAgent":
        model = max((tmp_path / "run" / "checkpoints").iterdir(), key=lambda path: int(path.name.removeprefix("step_")))
        settings = (
            f"model.path={model}",
            "recipe=embedded",
            "total_steps=1",
            "rollout.workflow=wrong_calculator:WrongAgent",
        )
        wrong = accuracy(run(MATH_AGENT, tmp_path / "wrong", *settings))
        record_property("accuracy with a wrong calculator", f"{wrong[0]:.3f}")
        assert wrong[0] <= values[-1] - 0.3
