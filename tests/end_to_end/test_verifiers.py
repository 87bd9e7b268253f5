"""An environment of the `verifiers` package, in an environment of its own, against the endpoint."""

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
    """With a Python that has the package and the taskset."""
    python = tmp_path / "its" / "bin" / "python"
    for command in (["venv", str(tmp_path / "its")], ["pip", "install", "--python", str(python), "verifiers>=0.4"]):
        subprocess.run(["uv", "--quiet", *command], check=True)
    (tmp_path / "sums.py").write_text(TASKSET)
    monkeypatch.setattr(Sums, "python", str(python))
    monkeypatch.setattr(Sums, "environment", {"PYTHONPATH": str(tmp_path)})
    return Sums(print)


@pytest.fixture
def rows(agent: VerifiersAgent, tmp_path: Path) -> Chat:
    """The taskset's, by the program."""
    listed = subprocess.run([*agent.command, "--tasks"], env=agent.environment, capture_output=True, check=True)
    (tmp_path / "tasks.jsonl").write_bytes(listed.stdout)
    return Chat(tmp_path / "tasks.jsonl")


@pytest.mark.nightly
@pytest.mark.timeout(1200)
async def test_tasks_of_verifiers_are_rows_and_their_rewards_are_those_of_what_was_sampled(
    agent: VerifiersAgent, rows: Chat
) -> None:
    assert [row["task"] for row in rows] == [0, 1, 2]
    asked = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 2 ="}]
    assert rows[1]["messages"] == asked

    tokenizer = make_tiny_tokenizer()
    config = NullInferenceEngineConfig(seconds_per_token=0.0, vocab_size=len(tokenizer))
    engine = NullInferenceEngine(config, answer=lambda request: tokenizer.encode("3", add_special_tokens=False))
    endpoint = HttpRolloutEndpoint(tokenizer)
    workflow = AgentEpisodeWorkflow(agent, endpoint, GenerationConfig(max_new_tokens=8))
    try:
        found = [await workflow.arun_episode(engine, row) for row in (rows[1], rows[2])]
    finally:
        await agent.close()
        await endpoint.destroy()
    assert [row.reward for [row] in found] == [1.0, 0.0]
    for [row], of in zip(found, (rows[1], rows[2]), strict=True):
        assert row.info["conversation"][:2] == of["messages"]


def test_environment_of_verifiers_without_a_taskset_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"VerifiersAgent\.config: .*taskset.*found \{\}"):
        VerifiersAgent(print)
    assert json.loads(Sums(print).command[-1]) == Sums.config
