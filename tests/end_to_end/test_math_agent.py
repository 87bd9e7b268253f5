"""The agents of `math-agent` against an endpoint whose model calls the calculator and believes it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from rl_apps.embedded.curriculum import LESSONS, words_of
from rl_apps.embedded.tokenizer import word_problem_tokenizer
from rl_apps.programs.math_agent import FrameworkAgent, MathAgent, OneEpisodeAgent, ProgramAgent
from rl_contracts.config import GenerationConfig
from rl_contracts.runtime.clock import SystemClock
from rl_contracts.testing import NullInferenceEngine, NullInferenceEngineConfig
from rl_contracts.workflow import AgentWorkflow
from rl_datasets.word_problems import OPERATION_OF, WordProblems
from rl_rewards.gsm8k import gsm8k_reward_fn
from rl_workflows import AgentEpisodeWorkflow, Ticket
from rl_workflows.agents.endpoint.server import HttpRolloutEndpoint
from rl_workflows.rollout.episode import Episodes
from rl_workflows.rollout.groups import run_group

ROWS = WordProblems(seed=0, size=1)
TOKENIZER = word_problem_tokenizer(256, words_of("tools"))


class AlwaysCalls:
    """The draw of a lesson that calls."""

    def random(self) -> float:
        return 0.0


def believing(request: Any) -> list[int]:
    """What a model answers that calls with the right expression, and then says what it was told."""
    text = TOKENIZER.decode(request.input_ids)
    said = text.rpartition("<|tool|>")[2].removesuffix("<|assistant|>")
    [problem] = ROWS.problems
    chances = {verb: float(operation == "+") for verb, operation in OPERATION_OF.items()}
    call = LESSONS["tools"](problem, chances, AlwaysCalls())[1]  # type: ignore[arg-type]
    return TOKENIZER.encode(f"#### {said}<|end|>" if "<|tool|>" in text else call, add_special_tokens=False)


async def reward(*given: Any, **row: Any) -> float:
    return gsm8k_reward_fn(*given, **row)


def calculator(expression: str) -> str:
    """Calculates wrongly.

    Args:
        expression: what to calculate.
    """
    return str(eval(expression) + 1)


async def solved(kind: type[AgentWorkflow]) -> Any:
    """Two episodes of an agent."""
    config = NullInferenceEngineConfig(seconds_per_token=0.0, vocab_size=len(TOKENIZER))
    engine, endpoint = NullInferenceEngine(config, answer=believing), HttpRolloutEndpoint(TOKENIZER)
    agent = kind(reward)  # type: ignore[call-arg]
    workflow = AgentEpisodeWorkflow(agent, endpoint, GenerationConfig(max_new_tokens=32), 256)
    try:
        return await run_group(Episodes(workflow, engine, SystemClock(), seed=1), ROWS[0], Ticket(0, 0), 2, 2)
    finally:
        await agent.close()
        await endpoint.destroy()


def check(group: Any, right: float) -> None:
    assert group.error is None
    assert [row.reward for row in group.trajectories] == [right] * 2
    for row in group.trajectories:
        asked, called, told, answered = row.info["conversation"]
        assert asked == ROWS[0]["messages"][0]
        assert called["tool_calls"][0]["function"]["name"] == "calculator"
        assert answered["content"] == f"#### {told['content']}"
        assert int(row.loss_mask.sum()) == called["tokens"] + answered["tokens"]


@pytest.mark.parametrize("kind", [MathAgent, FrameworkAgent])
@pytest.mark.parametrize("lies", [False, True])
async def test_agent_calls_the_calculator_and_is_right_unless_that_lies(
    kind: type[MathAgent], lies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lies:
        monkeypatch.setattr(kind, "tool", staticmethod(calculator))
    check(await solved(kind), float(not lies))


@pytest.mark.parametrize("kind", [ProgramAgent, OneEpisodeAgent])
async def test_agent_that_is_a_program_calls_its_own_calculator(kind: type[ProgramAgent]) -> None:
    check(await solved(kind), 1.0)


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Of an environment with OpenAI's client alone."""
    python = tmp_path / "its" / "bin" / "python"
    for command in (["venv", str(tmp_path / "its")], ["pip", "install", "--python", str(python), "openai"]):
        subprocess.run(["uv", "--quiet", *command], check=True)
    assert subprocess.run([python, "-c", "import rl_contracts"], capture_output=True, check=False).returncode == 1
    return python


@pytest.mark.slow
async def test_agent_that_is_a_program_runs_in_an_environment_with_openais_client_alone(
    python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProgramAgent, "command", (str(python), ProgramAgent.command[1]))
    check(await solved(ProgramAgent), 1.0)
