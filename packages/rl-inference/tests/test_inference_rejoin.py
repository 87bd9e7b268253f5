"""Tests with servers that are killed or frozen and return: no lost token, no mixed versions, no unchecked server."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from publishing import (
    CORRUPTING_SERVER,
    PROMPT,
    TOKENS,
    Trainer,
    assert_both_serve,
    client,
    request,
    served_version,
    until,
    until_live,
    until_running,
)

from rl_contracts.errors import InferenceError, NoServersError, WeightUpdateError
from rl_inference.testing import ServerProcess, reference_model

pytestmark = pytest.mark.slow  # each test starts its own servers


@pytest.fixture
def trainer(model_path: Path, tmp_path: Path) -> Trainer:
    return Trainer(reference_model(model_path), tmp_path / "weights")


@pytest.fixture
def servers(model_path: Path, tmp_path: Path) -> Iterator[list[ServerProcess]]:
    """Start two servers at version 0."""
    options = {"max_sequences": 8, "weights_dir": tmp_path / "weights"}
    pair = [ServerProcess(model_path, tmp_path / f"server-{i}.log", options=dict(options)) for i in range(2)]
    try:
        for server in pair:
            server.start()
        yield [server.wait_ready() for server in pair]
    finally:
        for server in pair:
            if server.process is not None:
                server.stop()


@pytest.mark.guarantee("A restarted server loads the committed version before it rejoins.", area="weights")
async def test_agenerate_server_killed_resumes_elsewhere_and_server_rejoins(
    servers: list[ServerProcess], trainer: Trainer
) -> None:
    async with client(servers) as engine:
        version = await trainer.publish(engine)
        alone = [await engine.agenerate(request(seed)) for seed in range(2)]
        completions = [asyncio.create_task(engine.agenerate(request(seed))) for seed in range(6)]
        await until_running(servers)

        servers[0].stop()
        finished = await asyncio.gather(*completions)
        assert len(engine._router.live) == 1
        servers[0].start().wait_ready()
        assert served_version(servers[0]) == version, "the server must restore the committed version"
        await until_live(engine, 2)

        assert [completion.output_ids for completion in finished[:2]] == [completion.output_ids for completion in alone]
        assert {completion.server for completion in finished if completion.resubmissions} == {servers[1].address}
        for completion in finished:
            assert completion.versions == [version] * TOKENS
            trainer.check(completion)
        await assert_both_serve(engine, trainer, version)
        assert (await engine.stats())["rejoins"] == 1
        await assert_both_serve(engine, trainer, await trainer.publish(engine))


@pytest.mark.guarantee(
    "A server that does not commit is evicted, and its requests continue at the new version elsewhere.", area="weights"
)
@pytest.mark.nightly
async def test_commit_server_frozen_is_evicted_until_it_catches_up(
    servers: list[ServerProcess], trainer: Trainer
) -> None:
    async with client(servers) as engine:
        await trainer.publish(engine)
        meta = await trainer.stage(engine)
        completions = [asyncio.create_task(engine.agenerate(request(seed))) for seed in range(6)]
        await until_running(servers)
        servers[0].signal(signal.SIGSTOP)

        await trainer.commit(engine, meta, "recompute")
        assert [server.address for server in engine._router.live] == [servers[1].address]
        finished = await asyncio.gather(*completions)
        meta = await trainer.stage(engine)  # no server rejoins between a stage and its commit
        servers[0].signal(signal.SIGCONT)
        assert served_version(servers[0]) == 1
        during = await asyncio.gather(*(engine.agenerate(request(seed, 12)) for seed in range(4)))
        assert len(engine._router.live) == 1
        await trainer.commit(engine, meta)
        await until_live(engine, 2)

        for completion in finished:
            assert len(completion.output_ids) == TOKENS
            assert completion.versions == sorted(completion.versions)
            assert completion.versions[-1] == 2
        assert all(completion.versions == [2] * 12 for completion in during)
        await assert_both_serve(engine, trainer, 3)


@pytest.mark.nightly
async def test_agenerate_server_frozen_resumes_elsewhere_and_server_rejoins(
    servers: list[ServerProcess], trainer: Trainer
) -> None:
    async with client(servers) as engine:
        version = await trainer.publish(engine)
        completions = [asyncio.create_task(engine.agenerate(request(seed))) for seed in range(6)]
        await until_running(servers)

        servers[0].signal(signal.SIGSTOP)
        finished = await asyncio.gather(*completions)
        await until_live(engine, 1)
        servers[0].signal(signal.SIGCONT)
        await until_live(engine, 2)

        assert all(completion.versions == [version] * TOKENS for completion in finished)
        assert {completion.server for completion in finished if completion.resubmissions} == {servers[1].address}
        await assert_both_serve(engine, trainer, version)


@pytest.mark.nightly
async def test_stage_late_response_evicts_server_and_is_ignored(servers: list[ServerProcess], trainer: Trainer) -> None:
    async with client(servers, update_timeout=4.0, progress_timeout=20.0) as engine:
        await trainer.publish(engine)
        servers[0].signal(signal.SIGSTOP)
        meta = await trainer.stage(engine)
        assert "no response within 4 s" in str(engine._router.servers[0].reason)

        servers[0].signal(signal.SIGCONT)  # the server stages now; the client ignores its response
        await trainer.commit(engine, meta)
        await until_live(engine, 2)

        await assert_both_serve(engine, trainer, 2)


@pytest.mark.guarantee(
    "A restarted server with a wrong tensor stays evicted, and a warning names the parameter.", area="weights"
)
async def test_rejoin_wrong_tensor_is_named_and_server_stays_evicted(
    servers: list[ServerProcess], trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    async with client(servers) as engine:
        version = await trainer.publish(engine)
        servers[0].stop()
        servers[0].command = (sys.executable, "-c", CORRUPTING_SERVER)
        servers[0].start().wait_ready()

        await until(lambda: "cannot rejoin: " in caplog.text)
        completions = await asyncio.gather(*(engine.agenerate(request(seed, 12)) for seed in range(4)))
        assert "parameter 'model.norm.weight' differs" in caplog.text
        assert caplog.text.count("cannot rejoin: ") == 1, "the client must try once, not at every probe"
        assert {completion.server for completion in completions} == {servers[1].address}

        servers[0].stop()
        servers[0].command = None
        servers[0].start().wait_ready()
        await until_live(engine, 2)
        await assert_both_serve(engine, trainer, version)


async def test_single_server_killed_all_requests_wait_for_its_return(
    servers: list[ServerProcess], trainer: Trainer
) -> None:
    single = servers[:1]
    async with client(single) as engine:
        await trainer.publish(engine)
        meta = await trainer.stage(engine)
        completions = [asyncio.create_task(engine.agenerate(request(seed))) for seed in range(3)]
        await until_running(single)

        single[0].stop()
        commit = asyncio.create_task(trainer.commit(engine, meta))
        score = asyncio.create_task(engine.score(PROMPT))
        await until_live(engine, 0)
        assert not any(task.done() for task in [*completions, commit, score])
        single[0].start()
        await commit

        assert engine.version == 2
        assert len(await score) == len(PROMPT)
        for completion in await asyncio.gather(*completions):
            assert completion.versions == sorted(completion.versions)
            assert len(completion.versions) == TOKENS
            assert completion.versions[-1] == 2
        meta = await trainer.stage(engine)
        single[0].stop()
        single[0].start().wait_ready()  # without the staged version, before the client noticed its loss
        await trainer.commit(engine, meta)
        after = await engine.agenerate(request(1, 12))
        assert after.versions == [3] * 12
        trainer.check(after)


@pytest.mark.nightly
async def test_stop_waiting_for_servers_fails_waiting_updates_and_scores(
    servers: list[ServerProcess], trainer: Trainer
) -> None:
    async with client(servers, rejoin_timeout=600.0, progress_timeout=600.0) as engine:
        await trainer.publish(engine)
        for server in servers:
            server.stop()
        waiting = [asyncio.create_task(trainer.stage(engine)), asyncio.create_task(engine.score(PROMPT))]
        done, _ = await asyncio.wait(waiting, timeout=2.0)
        assert not done, "the servers may still be restarted"

        engine.stop_waiting_for_servers()

        for result in await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 15):
            assert isinstance(result, (InferenceError, WeightUpdateError))
            assert "is gone" in str(result)
        with pytest.raises(WeightUpdateError, match="no live server could stage"):
            await asyncio.wait_for(trainer.stage(engine), 1)


async def test_all_servers_lost_without_restarts_fails_immediately(
    servers: list[ServerProcess], trainer: Trainer
) -> None:
    async with client(servers, rejoin_timeout=0.0, progress_timeout=60.0) as engine:
        await trainer.publish(engine)
        for server in servers:
            server.stop()

        with pytest.raises(InferenceError):  # no server is left, or both were lost in this request
            await asyncio.wait_for(engine.agenerate(request(0)), 10)
        with pytest.raises(NoServersError, match="is gone"):
            await asyncio.wait_for(engine.agenerate(request(1)), 10)


async def test_monitor_fails_requests_fail_with_its_error(
    servers: list[ServerProcess], trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: Any, server: Any) -> None:
        raise ZeroDivisionError("injected")

    async with client(servers[:1]) as engine:
        await trainer.publish(engine)
        monkeypatch.setattr("rl_inference.client.weight_update.WeightUpdateClient.rejoin", broken)
        engine._router.evict(engine._router.servers[0], "was evicted by the test")

        with pytest.raises(InferenceError, match=r"server monitor ended: .*ZeroDivisionError"):
            await asyncio.wait_for(engine.agenerate(request(0)), 10)
