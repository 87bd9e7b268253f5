"""An environment of the `verifiers` package, in a separate Python environment, against the endpoint."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import ClassVar

import pytest

from rl_contracts.config import GenerationConfig
from rl_contracts.errors import ConfigError
from rl_contracts.testing import NullInferenceEngine, NullInferenceEngineConfig, make_tiny_tokenizer
from rl_datasets.chat import Chat
from rl_workflows import AgentEpisodeWorkflow, VerifiersAgent
from rl_workflows.agents.endpoint.server import HttpRolloutEndpoint

TASKSET = """
import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    total: int


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(str(self.data.total) in trace.last_reply)

    @vf.metric
    async def letters(self, trace) -> float:
        return float(len(trace.last_reply))


class Sums(vf.Taskset[SumTask]):
    def load(self):
        for a in range(3):
            yield SumTask(SumData(prompt=f"{a} + 2 =", system_prompt="Add.", total=a + 2), self.config.task)
"""


class Sums(VerifiersAgent):
    config: ClassVar = {
        "taskset": {"id": "sums"},
        "agent": {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}},
    }
    processes = 1


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VerifiersAgent:
    """Agent that runs in a Python environment with `verifiers` and the taskset."""
    python = tmp_path / "env" / "bin" / "python"
    for command in (["venv", str(tmp_path / "env")], ["pip", "install", "--python", str(python), "verifiers>=0.4"]):
        subprocess.run(["uv", "--quiet", *command], check=True)
    (tmp_path / "sums.py").write_text(TASKSET)
    monkeypatch.setattr(Sums, "python", str(python))
    monkeypatch.setattr(Sums, "environment", {"PYTHONPATH": str(tmp_path)})
    return Sums(print)


@pytest.fixture
def examples(agent: VerifiersAgent, tmp_path: Path) -> Chat:
    """Tasks of the taskset, as listed by the program of the agent."""
    listed = subprocess.run([*agent.command, "--tasks"], env=agent.environment, capture_output=True, check=True)
    (tmp_path / "tasks.jsonl").write_bytes(listed.stdout)
    return Chat(tmp_path / "tasks.jsonl")


@pytest.mark.nightly
@pytest.mark.timeout(1200)
async def test_verifiers_tasks_are_examples_and_rewards_match_completions(
    agent: VerifiersAgent, examples: Chat
) -> None:
    assert [example["task"] for example in examples] == [0, 1, 2]
    prompt = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 2 ="}]
    assert examples[1]["messages"] == prompt

    tokenizer = make_tiny_tokenizer()
    config = NullInferenceEngineConfig(seconds_per_token=0.0, vocab_size=len(tokenizer))
    engine = NullInferenceEngine(config, answer=lambda request: tokenizer.encode("3", add_special_tokens=False))
    endpoint = HttpRolloutEndpoint(tokenizer)
    workflow = AgentEpisodeWorkflow(agent, endpoint, GenerationConfig(max_new_tokens=8))
    try:
        episodes = [await workflow.arun_episode(engine, example) for example in (examples[1], examples[2])]
    finally:
        await agent.close()
        await endpoint.destroy()
    assert [trajectory.reward for [trajectory] in episodes] == [1.0, 0.0]
    for [trajectory], example in zip(episodes, (examples[1], examples[2]), strict=True):
        assert trajectory.info["conversation"][:2] == example["messages"]


def test_verifiers_agent_without_taskset_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"VerifiersAgent\.config: .*taskset.*found \{\}"):
        VerifiersAgent(print)
    assert json.loads(Sums(print).command[-1]) == Sums.config
