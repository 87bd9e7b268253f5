"""The agents of `math-agent` against an endpoint with a scripted model that repeats the result of the calculator."""

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

EXAMPLES = WordProblems(seed=0, size=1)
TOKENIZER = word_problem_tokenizer(256, words_of("tools"))


class AlwaysCalls:
    """Random numbers for which the lesson calls the calculator."""

    def random(self) -> float:
        return 0.0


def calculator_completion(request: Any) -> list[int]:
    """Call the calculator with the correct expression, or repeat its result as the final answer."""
    text = TOKENIZER.decode(request.input_ids)
    result = text.rpartition("<|tool|>")[2].removesuffix("<|assistant|>")
    [problem] = EXAMPLES.problems
    probabilities = {verb: float(operation == "+") for verb, operation in OPERATION_OF.items()}
    call = LESSONS["tools"](problem, probabilities, AlwaysCalls())[1]  # type: ignore[arg-type]
    return TOKENIZER.encode(f"#### {result}<|end|>" if "<|tool|>" in text else call, add_special_tokens=False)


async def reward(*args: Any, **fields: Any) -> float:
    return gsm8k_reward_fn(*args, **fields)


def calculator(expression: str) -> str:
    """Return an incorrect result.

    Args:
        expression: the expression to calculate.
    """
    return str(eval(expression) + 1)


async def run_two_episodes(kind: type[AgentWorkflow]) -> Any:
    config = NullInferenceEngineConfig(seconds_per_token=0.0, vocab_size=len(TOKENIZER))
    engine, endpoint = NullInferenceEngine(config, answer=calculator_completion), HttpRolloutEndpoint(TOKENIZER)
    agent = kind(reward)  # type: ignore[call-arg]
    workflow = AgentEpisodeWorkflow(agent, endpoint, GenerationConfig(max_new_tokens=32), 256)
    try:
        return await run_group(Episodes(workflow, engine, SystemClock(), seed=1), EXAMPLES[0], Ticket(0, 0), 2, 2)
    finally:
        await agent.close()
        await endpoint.destroy()


def check(group: Any, reward: float) -> None:
    assert group.error is None
    assert [trajectory.reward for trajectory in group.trajectories] == [reward] * 2
    for trajectory in group.trajectories:
        question, call, result, final = trajectory.info["conversation"]
        assert question == EXAMPLES[0]["messages"][0]
        assert call["tool_calls"][0]["function"]["name"] == "calculator"
        assert final["content"] == f"#### {result['content']}"
        assert int(trajectory.loss_mask.sum()) == call["tokens"] + final["tokens"]


@pytest.mark.parametrize(("kind", "is_wrong"), [(MathAgent, True), (FrameworkAgent, False), (FrameworkAgent, True)])
async def test_agent_is_correct_unless_its_calculator_is_wrong(
    kind: type[MathAgent], is_wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_wrong:
        monkeypatch.setattr(kind, "tool", staticmethod(calculator))
    check(await run_two_episodes(kind), float(not is_wrong))


@pytest.mark.parametrize("kind", [ProgramAgent, OneEpisodeAgent])
async def test_agent_program_calls_its_calculator(kind: type[ProgramAgent]) -> None:
    check(await run_two_episodes(kind), 1.0)


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Python of a virtual environment that contains only the client of OpenAI."""
    python = tmp_path / "env" / "bin" / "python"
    for command in (["venv", str(tmp_path / "env")], ["pip", "install", "--python", str(python), "openai"]):
        subprocess.run(["uv", "--quiet", *command], check=True)
    assert subprocess.run([python, "-c", "import rl_contracts"], capture_output=True, check=False).returncode == 1
    return python


@pytest.mark.slow
async def test_agent_program_runs_in_environment_with_openai_client_only(
    python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProgramAgent, "command", (str(python), ProgramAgent.command[1]))
    check(await run_two_episodes(ProgramAgent), 1.0)
