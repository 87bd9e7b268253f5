"""`multi-turn-math` and `math-agent`: a few steps in CI, and every night whether they learn."""

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
LYING = """
from rl_apps.programs.math_agent import MathAgent

def calculator(expression: str) -> str:
    '''Calculates the value of an arithmetic expression.

    Args:
        expression: numbers and + and -.
    '''
    return str(eval(expression) + 1)

class LyingAgent(MathAgent):
    tool = staticmethod(calculator)
"""
FAILING = """
from rl_apps.programs.math_agent import MathAgent

class FailingAgent(MathAgent):
    async def run(self, data, **where):
        if data["prompt_id"] % 3 == 0:
            raise RuntimeError("planted")
        return await super().run(data, **where)
"""
SMALL = ("recipe=embedded", "data.batch_size=4", "rollout.group_size=4", "evaluation.rows=8", "total_steps=3")


def run(app: Any, directory: Path, *settings: str, seconds: float = 280) -> list[dict[str, Any]]:
    """The records of a run."""
    (directory.parent / "lying.py").write_text(LYING)
    line = [str(BIN / app.name), f"run_dir={directory}", *settings]
    done = subprocess.run(line, capture_output=True, text=True, timeout=seconds, cwd=directory.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    return list(json_lines(directory / "metrics.jsonl"))


def answers(directory: Path) -> list[dict[str, Any]]:
    """What was learned from."""
    files = sorted((directory / "rollouts").glob("step_*.jsonl"))
    return [answer for file in files for answer in json_lines(file)]


def accuracy(records: list[dict[str, Any]]) -> list[float]:
    return [record["eval/accuracy"] for record in records if record.get("eval/accuracy") is not None]


def hasty(cache: Path, lessons: str) -> Path:
    """A model that has had a few lessons."""
    recipe = EmbeddedRecipe(lessons=lessons, warm_up=WarmUp(steps=60, batch_size=32, problems=512, lr=1e-2))
    return prepare_embedded(1, recipe, cache_dir=cache)


@pytest.mark.nightly
@pytest.mark.parametrize("staleness", [1, 0])
def test_math_agent_takes_steps_on_devices_that_its_server_shares(staleness: int, tmp_path: Path) -> None:
    model = hasty(tmp_path / "cache", "tools")
    settings = (f"model.path={model}", "allocation='embedded:d1|fsdp:d1'", f"rollout.max_staleness={staleness}")

    records = run(MATH_AGENT, tmp_path / "run", *settings, *SMALL)

    steps = [record for record in records if "rows" in record]
    assert [record["step"] for record in steps] == [1, 2, 3]
    assert max(record["staleness/max"] for record in steps) == staleness
    assert all("sharing/freed_gib" in record and record["time/sleep"] > 0 for record in steps)
    assert max(record["sharing/freed_gib"] for record in steps) > 0
    told = [answer["conversation"] for answer in answers(tmp_path / "run")]
    roles = {tuple(message["role"] for message in talk) for talk in told}
    assert ("user", "assistant") in roles
    assert ("user", "assistant", "tool", "assistant") in roles  # one that called
    assert sum(record["agent/calls"] for record in steps if record.get("agent/calls")) > 0


@pytest.mark.nightly
def test_agent_that_fails_on_some_rows_is_counted_and_the_run_goes_on(tmp_path: Path) -> None:
    settings = (f"model.path={hasty(tmp_path / 'cache', 'tools')}", "rollout.workflow=failing:FailingAgent", *SMALL)
    settings += ("rollout.rehearsal=false", "rollout.failure_budget=0.9")
    (tmp_path / "failing.py").write_text(FAILING)

    records = run(MATH_AGENT, tmp_path / "run", *settings)

    steps = [record for record in records if "rows" in record]
    assert [record["step"] for record in steps] == [1, 2, 3]
    assert sum(record.get("groups/failed/agent") or 0 for record in records) > 0
    assert {answer["prompt_id"] % 3 for answer in answers(tmp_path / "run")} == {1, 2}


@pytest.mark.nightly
def test_math_agent_takes_steps_with_a_process_for_each_episode(tmp_path: Path) -> None:
    settings = (f"model.path={hasty(tmp_path / 'cache', 'tools')}", *SMALL)

    records = run(
        MATH_AGENT, tmp_path / "run", "rollout.workflow=rl_apps.programs.math_agent:OneEpisodeAgent", *settings
    )

    steps = [record for record in records if "rows" in record]
    assert [record["step"] for record in steps] == [1, 2, 3]
    assert {record["groups/failed"] for record in steps} == {0}
    assert sum(record["agent/calls"] for record in steps if record.get("agent/calls")) > 0


@pytest.mark.nightly
def test_multi_turn_math_takes_steps_of_several_turns(tmp_path: Path) -> None:
    records = run(MULTI_TURN_MATH, tmp_path / "run", f"model.path={hasty(tmp_path / 'cache', 'turns')}", *SMALL)

    assert [record["step"] for record in records if "rows" in record] == [1, 2, 3]
    turns = {answer["turns"] for answer in answers(tmp_path / "run")}
    assert 2 in turns


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_multi_turn_math_improves_the_accuracy_of_the_last_turn(tmp_path: Path, record_property: Any) -> None:
    found = accuracy(run(MULTI_TURN_MATH, tmp_path / "run", seconds=1100))

    record_property("accuracy of the last turn, before and after", f"{found[0]:.3f}, {found[-1]:.3f}")
    assert found[-1] >= found[0] + 0.15


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("agent", ["MathAgent", "FrameworkAgent", "ProgramAgent"])
def test_math_agent_learns_and_is_lost_with_a_calculator_that_lies(
    agent: str, tmp_path: Path, record_property: Any
) -> None:
    workflow = f"rollout.workflow=rl_apps.programs.math_agent:{agent}"

    begun = time.monotonic()

    found = accuracy(run(MATH_AGENT, tmp_path / "run", workflow, seconds=1200))

    record_property(f"seconds of {agent}, from the command to its end", f"{time.monotonic() - begun:.0f}")
    record_property(f"held-out accuracy of {agent}, before and after", f"{found[0]:.3f}, {found[-1]:.3f}")
    assert found[-1] >= found[0] + 0.3
    if agent == "MathAgent":
        model = max((tmp_path / "run" / "checkpoints").iterdir(), key=lambda path: int(path.name.removeprefix("step_")))
        settings = (f"model.path={model}", "recipe=embedded", "total_steps=1", "rollout.workflow=lying:LyingAgent")
        lied = accuracy(run(MATH_AGENT, tmp_path / "lied", *settings))
        record_property("its accuracy with a calculator that lies", f"{lied[0]:.3f}")
        assert lied[0] <= found[-1] - 0.3
