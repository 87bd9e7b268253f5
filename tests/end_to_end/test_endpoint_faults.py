"""Concurrent conversations while the single server is killed and restarted and the weights change.

No token is lost, and each token has the version of the weights that sampled it.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from publishing import Trainer, client, until_running

from rl_contracts.batch.trajectory import Trajectory
from rl_contracts.config import GenerationConfig
from rl_contracts.data import ModelRequest, ModelResponse
from rl_contracts.testing.chat_formats import make_chat_tokenizer
from rl_inference import EmbeddedEngine
from rl_inference.testing import ServerProcess, reference_model, tiny_model
from rl_workflows.agents.endpoint.server import HttpRolloutEndpoint
from rl_workflows.agents.endpoint.session import Session

TURNS, UPDATES, TOKENS = 6, 10, 16
FIRST_MESSAGES = [{"role": "user", "content": "what is it?"}]


class CallCounter:
    """Number of completed calls, with a method that waits for a number."""

    def __init__(self) -> None:
        self.count, self._changed = 0, asyncio.Condition()

    async def add(self) -> None:
        async with self._changed:
            self.count += 1
            self._changed.notify_all()

    async def reach(self, count: float) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.count >= count)


async def converse(session: Session, http: aiohttp.ClientSession, completed: CallCounter) -> None:
    messages: list[Any] = list(FIRST_MESSAGES)
    headers = {"Authorization": f"Bearer {session.api_key}"}
    for turn in range(TURNS):
        body = {"messages": messages, "model": "policy"}
        async with http.post(f"{session.base_url}/chat/completions", json=body, headers=headers) as response:
            text = await response.text()
            assert response.status == 200, text
        messages += [json.loads(text)["choices"][0]["message"], {"role": "user", "content": f"and {turn}?"}]
        await completed.add()


async def update_and_restart(
    engine: EmbeddedEngine, server: ServerProcess, trainer: Trainer, calls: int, completed: CallCounter
) -> None:
    """Publish ten updates spread over the calls, and restart the server before the fifth."""
    for number in range(1, UPDATES + 1):
        await completed.reach(calls * number / (UPDATES + 2))
        if number == UPDATES // 2:
            await until_running([server])
            server.stop()
            await asyncio.to_thread(lambda: server.start().wait_ready())
        await trainer.publish(engine, "recompute")


def gaps(path: Path, trajectories: list[Trajectory], shift: int = 0) -> np.ndarray:
    """Return |recorded log-prob - log-prob at the token's version plus `shift`| of each sampled token."""
    result = []
    models: dict[int, Any] = {}
    for trajectory in trajectories:
        ids = torch.from_numpy(trajectory.input_ids)[None]
        for version in set(trajectory.versions.tolist()) - {-1}:
            if version + shift not in models:
                models[version + shift] = reference_model(path)
                for parameter in models[version + shift].parameters():
                    parameter.data *= 1 + (version + shift) / 500
            with torch.no_grad():
                logprobs = torch.log_softmax(models[version + shift](input_ids=ids).logits[0].float(), -1)
            expected = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
            result.append(np.abs(expected - trajectory.logprobs[1:])[trajectory.versions[1:] == version])
    return np.concatenate(result)


class RecordingEngine(EmbeddedEngine):
    """Engine that keeps its responses."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.responses: list[ModelResponse] = []

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        response = await super().agenerate(request)
        self.responses.append(response)
        return response


async def _check_sessions(sessions: int, tmp_path: Path, record: Any) -> None:
    tokenizer = make_chat_tokenizer("llama3")
    model = tiny_model(tmp_path / "model", vocab_size=347, eos_token_id=346, max_position_embeddings=1024)
    trainer, completed = Trainer(reference_model(model), tmp_path / "weights"), CallCounter()
    options = {"max_sequences": 32, "weights_dir": tmp_path / "weights"}
    generation = GenerationConfig(max_new_tokens=TOKENS, min_new_tokens=TOKENS)
    endpoint = HttpRolloutEndpoint(tokenizer)
    with ServerProcess(model, tmp_path / "server.log", options=options) as server:
        async with client([server], progress_timeout=30.0, probe_timeout=10.0, kind=RecordingEngine) as engine:
            open_sessions = [await endpoint.open(engine, generation, 1024) for _ in range(sessions)]
            async with (
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
                asyncio.TaskGroup() as group,
            ):
                for session in open_sessions:
                    group.create_task(converse(session, http, completed))
                group.create_task(update_and_restart(engine, server, trainer, sessions * TURNS, completed))
            assert trainer.version == engine.version == UPDATES
            assert sum(response.resubmissions for response in engine.responses) > 0, (
                "no request was running at the kill"
            )
    await endpoint.destroy()

    trajectories = [trajectory for session in open_sessions for trajectory in session.trajectories(1.0)]
    responses = {tuple(response.input_ids + response.output_ids): response for response in engine.responses}
    assert len(engine.responses) == sessions * TURNS
    assert sum(trajectory.info["turns"] for trajectory in trajectories) >= sessions * TURNS
    assert sum(int(trajectory.loss_mask.sum()) for trajectory in trajectories) == sessions * TURNS * TOKENS
    for trajectory in trajectories:
        versions = trajectory.versions[trajectory.versions >= 0]
        assert (np.diff(versions) >= 0).all(), "versions decrease within a trajectory"
        assert trajectory.versions[-TOKENS:].tolist() == responses[tuple(trajectory.input_ids.tolist())].versions
    versions_seen = {int(version) for trajectory in trajectories for version in trajectory.versions} - {-1}
    gap = gaps(model, trajectories)
    record("versions", sorted(versions_seen))
    record("gap_max", float(gap.max()))
    assert len(versions_seen) > UPDATES // 2
    assert gap.max() <= 1e-4
    assert np.median(gaps(model, trajectories[:4], shift=1)) > 1e-4, "the log-probs of two versions must differ"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sessions", [20, pytest.param(200, marks=pytest.mark.nightly)])  # 200: most requests wait
async def test_sessions_lose_no_token_across_server_kill_and_ten_updates(
    sessions: int, tmp_path: Path, record_property: Any
) -> None:
    await _check_sessions(sessions, tmp_path, record_property)
