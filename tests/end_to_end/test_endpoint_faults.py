"""Many conversations at once over one server that is killed and comes back, while the weights change: nothing is lost,
and each token has the version of the weights that made it."""

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
START = [{"role": "user", "content": "what is it?"}]


class Counted:
    """How many calls were answered, to wait for."""

    def __init__(self) -> None:
        self.count, self._changed = 0, asyncio.Condition()

    async def add(self) -> None:
        async with self._changed:
            self.count += 1
            self._changed.notify_all()

    async def reach(self, count: float) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.count >= count)


async def converse(session: Session, http: aiohttp.ClientSession, done: Counted) -> None:
    messages: list[Any] = list(START)
    headers = {"Authorization": f"Bearer {session.api_key}"}
    for turn in range(TURNS):
        body = {"messages": messages, "model": "policy"}
        async with http.post(f"{session.base_url}/chat/completions", json=body, headers=headers) as response:
            text = await response.text()
            assert response.status == 200, text
        messages += [json.loads(text)["choices"][0]["message"], {"role": "user", "content": f"and {turn}?"}]
        await done.add()


async def disturb(engine: EmbeddedEngine, server: ServerProcess, trainer: Trainer, calls: int, done: Counted) -> None:
    """Ten updates spread over the calls, and in the midst of them the end of the server and its return."""
    for number in range(1, UPDATES + 1):
        await done.reach(calls * number / (UPDATES + 2))
        if number == UPDATES // 2:
            await until_running([server])
            server.stop()
            await asyncio.to_thread(lambda: server.start().wait_ready())
        await trainer.publish(engine, "recompute")


def gaps(path: Path, rows: list[Trajectory], shift: int = 0) -> np.ndarray:
    """|recorded log-prob - that of the weights of the token's version plus `shift`| of every sampled token."""
    found = []
    models: dict[int, Any] = {}
    for row in rows:
        ids = torch.from_numpy(row.input_ids)[None]
        for version in set(row.versions.tolist()) - {-1}:
            if version + shift not in models:
                models[version + shift] = reference_model(path)
                for parameter in models[version + shift].parameters():
                    parameter.data *= 1 + (version + shift) / 500
            with torch.no_grad():
                logprobs = torch.log_softmax(models[version + shift](input_ids=ids).logits[0].float(), -1)
            own = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
            found.append(np.abs(own - row.logprobs[1:])[row.versions[1:] == version])
    return np.concatenate(found)


class Recorded(EmbeddedEngine):
    """Remembers its answers."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.responses: list[ModelResponse] = []

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        response = await super().agenerate(request)
        self.responses.append(response)
        return response


async def _survive(sessions: int, tmp_path: Path, record: Any) -> None:
    tokenizer = make_chat_tokenizer("llama3")
    model = tiny_model(tmp_path / "model", vocab_size=347, eos_token_id=346, max_position_embeddings=1024)
    trainer, done = Trainer(reference_model(model), tmp_path / "weights"), Counted()
    options = {"slots": 32, "weights_dir": tmp_path / "weights"}
    generation = GenerationConfig(max_new_tokens=TOKENS, min_new_tokens=TOKENS)
    endpoint = HttpRolloutEndpoint(tokenizer)
    with ServerProcess(model, tmp_path / "server.log", options=options) as server:
        async with client([server], progress_timeout=30.0, probe_timeout=10.0, kind=Recorded) as engine:
            opened = [await endpoint.open(engine, generation, 1024) for _ in range(sessions)]
            async with (
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
                asyncio.TaskGroup() as group,
            ):
                for session in opened:
                    group.create_task(converse(session, http, done))
                group.create_task(disturb(engine, server, trainer, sessions * TURNS, done))
            assert trainer.version == engine.version == UPDATES
            assert sum(response.resubmissions for response in engine.responses) > 0, "the kill hit no answer"
    await endpoint.destroy()

    rows = [row for session in opened for row in session.trajectories(1.0)]
    asked = {tuple(response.input_ids + response.output_ids): response for response in engine.responses}
    assert len(engine.responses) == sessions * TURNS
    assert sum(row.info["turns"] for row in rows) >= sessions * TURNS
    assert sum(int(row.loss_mask.sum()) for row in rows) == sessions * TURNS * TOKENS
    for row in rows:
        versions = row.versions[row.versions >= 0]
        assert (np.diff(versions) >= 0).all(), "a version went down"
        assert row.versions[-TOKENS:].tolist() == asked[tuple(row.input_ids.tolist())].versions
    seen = {int(version) for row in rows for version in row.versions} - {-1}
    gap = gaps(model, rows)
    record("versions", sorted(seen))
    record("gap_max", float(gap.max()))
    assert len(seen) > UPDATES // 2
    assert gap.max() <= 1e-4
    assert np.median(gaps(model, rows[:4], shift=1)) > 1e-4, "this model does not tell versions apart"


@pytest.mark.slow
async def test_20_sessions_lose_nothing_through_the_kill_of_the_only_server_and_ten_updates(
    tmp_path: Path, record_property: Any
) -> None:
    await _survive(20, tmp_path, record_property)


@pytest.mark.nightly
@pytest.mark.timeout(900)
async def test_200_sessions_lose_nothing_through_the_kill_of_the_only_server_and_ten_updates(
    tmp_path: Path, record_property: Any
) -> None:
    await _survive(200, tmp_path, record_property)
