"""Servers that are killed or frozen and come back: no token lost, no version mixed, nobody used unchecked."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from publishing import (
    PROMPT,
    SPOILED,
    TOKENS,
    Trainer,
    both_serve,
    client,
    request,
    served_version,
    until,
    until_live,
    until_running,
)

from rl_contracts.errors import InferenceError, NoServersError, WeightUpdateError
from rl_inference.testing import ServerProcess, reference_model

pytestmark = pytest.mark.slow  # each test starts servers of its own


@pytest.fixture
def trainer(model_path: Path, tmp_path: Path) -> Trainer:
    return Trainer(reference_model(model_path), tmp_path / "weights")


@pytest.fixture
def servers(model_path: Path, tmp_path: Path) -> Iterator[list[ServerProcess]]:
    """Two servers of version 0, the second one started on demand."""
    options = {"slots": 8, "weights_dir": tmp_path / "weights"}
    pair = [ServerProcess(model_path, tmp_path / f"server-{i}.log", options=dict(options)) for i in range(2)]
    try:
        for server in pair:
            server.start()
        yield [server.wait_ready() for server in pair]
    finally:
        for server in pair:
            if server.process is not None:
                server.stop()


async def test_agenerate_server_killed_mid_answer_is_replaced_and_used_again(
    servers: list[ServerProcess], trainer: Trainer
) -> None:
    async with client(servers) as engine:
        version = await trainer.publish(engine)
        alone = [await engine.agenerate(request(seed)) for seed in range(2)]
        answers = [asyncio.create_task(engine.agenerate(request(seed))) for seed in range(6)]
        await until_running(servers)

        servers[0].stop()
        finished = await asyncio.gather(*answers)
        assert len(engine._router.live) == 1
        servers[0].start().wait_ready()
        assert served_version(servers[0]) == version, "it restored what was committed by itself"
        await until_live(engine, 2)

        assert [answer.output_ids for answer in finished[:2]] == [answer.output_ids for answer in alone]
        assert {answer.server for answer in finished if answer.resubmissions} == {servers[1].address}
        for answer in finished:
            assert answer.versions == [version] * TOKENS
            trainer.check(answer)
        await both_serve(engine, trainer, version)
        assert (await engine.stats())["rejoins"] == 1
        await both_serve(engine, trainer, await trainer.publish(engine))


@pytest.mark.nightly
async def test_stage_server_killed_meanwhile_is_evicted_and_later_brought_to_the_new_version(
    servers: list[ServerProcess], trainer: Trainer
) -> None:
    async with client(servers, progress_timeout=20.0) as engine:
        await trainer.publish(engine)
        servers[0].signal(signal.SIGSTOP)  # so that it is certainly asked, and certainly has not answered
        staging = asyncio.create_task(trainer.stage(engine))
        await until(lambda: bool(engine._router.servers[0].tasks))

        servers[0].stop()
        meta = await staging
        assert len(engine._router.live) == 1
        servers[0].start().wait_ready()
        assert served_version(servers[0]) == 1
        await trainer.commit(engine, meta)
        await until_live(engine, 2)

        await both_serve(engine, trainer, 2)


async def test_commit_server_killed_between_stage_and_commit_rejoins_at_the_committed_version(
    servers: list[ServerProcess], trainer: Trainer
) -> None:
    async with client(servers) as engine:
        await trainer.publish(engine)
        meta = await trainer.stage(engine)
        servers[0].stop()
        servers[0].start().wait_ready()  # back before anybody noticed, at version 1

        await trainer.commit(engine, meta)
        assert engine.version == 2
        await until_live(engine, 2)

        await both_serve(engine, trainer, 2)


@pytest.mark.nightly
async def test_commit_server_frozen_is_out_until_it_has_caught_up(
    servers: list[ServerProcess], trainer: Trainer
) -> None:
    async with client(servers) as engine:
        await trainer.publish(engine)
        meta = await trainer.stage(engine)
        answers = [asyncio.create_task(engine.agenerate(request(seed))) for seed in range(6)]
        await until_running(servers)
        servers[0].signal(signal.SIGSTOP)

        await trainer.commit(engine, meta, "recompute")
        assert [server.address for server in engine._router.live] == [servers[1].address]
        finished = await asyncio.gather(*answers)
        meta = await trainer.stage(engine)  # nobody rejoins between a stage and its commit
        servers[0].signal(signal.SIGCONT)
        assert served_version(servers[0]) == 1
        during = await asyncio.gather(*(engine.agenerate(request(seed, 12)) for seed in range(4)))
        assert len(engine._router.live) == 1
        await trainer.commit(engine, meta)
        await until_live(engine, 2)

        for answer in finished:
            assert len(answer.output_ids) == TOKENS
            assert answer.versions == sorted(answer.versions)
            assert answer.versions[-1] == 2
        assert all(answer.versions == [2] * 12 for answer in during)
        await both_serve(engine, trainer, 3)


@pytest.mark.nightly
async def test_agenerate_server_frozen_mid_answer_continues_elsewhere_and_is_used_again(
    servers: list[ServerProcess], trainer: Trainer
) -> None:
    async with client(servers) as engine:
        version = await trainer.publish(engine)
        answers = [asyncio.create_task(engine.agenerate(request(seed))) for seed in range(6)]
        await until_running(servers)

        servers[0].signal(signal.SIGSTOP)
        finished = await asyncio.gather(*answers)
        await until_live(engine, 1)
        servers[0].signal(signal.SIGCONT)
        await until_live(engine, 2)

        assert all(answer.versions == [version] * TOKENS for answer in finished)
        assert {answer.server for answer in finished if answer.resubmissions} == {servers[1].address}
        await both_serve(engine, trainer, version)


@pytest.mark.nightly
async def test_stage_server_that_answers_late_is_evicted_and_its_late_answer_changes_nothing(
    servers: list[ServerProcess], trainer: Trainer
) -> None:
    async with client(servers, update_timeout=4.0, progress_timeout=20.0) as engine:
        await trainer.publish(engine)
        servers[0].signal(signal.SIGSTOP)
        meta = await trainer.stage(engine)
        assert "no response within 4 s" in str(engine._router.servers[0].evicted)

        servers[0].signal(signal.SIGCONT)  # it stages now, and nobody listens
        await trainer.commit(engine, meta)
        await until_live(engine, 2)

        await both_serve(engine, trainer, 2)


async def test_rejoin_one_wrong_tensor_stays_out_with_its_name_until_it_holds_what_was_committed(
    servers: list[ServerProcess], trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    async with client(servers) as engine:
        version = await trainer.publish(engine)
        servers[0].stop()
        servers[0].command = (sys.executable, "-c", SPOILED)
        servers[0].start().wait_ready()

        await until(lambda: "cannot rejoin: " in caplog.text)
        answers = await asyncio.gather(*(engine.agenerate(request(seed, 12)) for seed in range(4)))
        assert "parameter 'model.norm.weight' differs" in caplog.text
        assert caplog.text.count("cannot rejoin: ") == 1, "it is asked once, not at every round"
        assert {answer.server for answer in answers} == {servers[1].address}

        servers[0].stop()
        servers[0].command = None
        servers[0].start().wait_ready()
        await until_live(engine, 2)
        await both_serve(engine, trainer, version)


async def test_only_server_dies_everything_waits_for_it_to_come_back(
    servers: list[ServerProcess], trainer: Trainer
) -> None:
    only = servers[:1]
    async with client(only) as engine:
        await trainer.publish(engine)
        meta = await trainer.stage(engine)
        answers = [asyncio.create_task(engine.agenerate(request(seed))) for seed in range(3)]
        await until_running(only)

        only[0].stop()
        commit = asyncio.create_task(trainer.commit(engine, meta))
        score = asyncio.create_task(engine.score(PROMPT))
        await until_live(engine, 0)
        assert not any(task.done() for task in [*answers, commit, score])
        only[0].start()
        await commit

        assert engine.version == 2
        assert len(await score) == len(PROMPT)
        for answer in await asyncio.gather(*answers):
            assert answer.versions == sorted(answer.versions)
            assert len(answer.versions) == TOKENS
            assert answer.versions[-1] == 2
        meta = await trainer.stage(engine)
        only[0].stop()
        only[0].start().wait_ready()  # back before anybody noticed, without what was staged
        await trainer.commit(engine, meta)
        after = await engine.agenerate(request(1, 12))
        assert after.versions == [3] * 12
        trainer.check(after)


@pytest.mark.nightly
async def test_all_servers_stay_away_requests_and_updates_fail_at_the_deadline_with_each_reason(
    servers: list[ServerProcess], trainer: Trainer
) -> None:
    async with client(servers, rejoin_timeout=1.0) as engine:
        await trainer.publish(engine)
        answers = [asyncio.create_task(engine.agenerate(request(seed))) for seed in range(4)]
        await until_running(servers)
        for server in servers:
            server.stop()

        for result in await asyncio.wait_for(asyncio.gather(*answers, return_exceptions=True), 15):
            assert isinstance(result, InferenceError)
            for server in servers:  # gone before it could carry the request on, or ended while it did
                assert f"{server.address}: " in str(result)
        with pytest.raises(WeightUpdateError, match=r"no live server could stage version 2: .*is gone"):
            await trainer.stage(engine)
        assert engine.version == 1


@pytest.mark.nightly
async def test_nobody_starts_servers_again_updates_and_scores_do_not_wait_for_one(
    servers: list[ServerProcess], trainer: Trainer
) -> None:
    async with client(servers, rejoin_timeout=600.0, progress_timeout=600.0) as engine:
        await trainer.publish(engine)
        for server in servers:
            server.stop()
        waiting = [asyncio.create_task(trainer.stage(engine)), asyncio.create_task(engine.score(PROMPT))]
        done, _ = await asyncio.wait(waiting, timeout=2.0)
        assert not done, "somebody may start them"

        engine.stop_waiting_for_servers()

        for result in await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 15):
            assert isinstance(result, (InferenceError, WeightUpdateError))
            assert "is gone" in str(result)
        with pytest.raises(WeightUpdateError, match="no live server could stage"):
            await asyncio.wait_for(trainer.stage(engine), 1)


async def test_all_servers_gone_without_restarts_fails_at_once(servers: list[ServerProcess], trainer: Trainer) -> None:
    async with client(servers, rejoin_timeout=0.0, progress_timeout=60.0) as engine:
        await trainer.publish(engine)
        for server in servers:
            server.stop()

        with pytest.raises(InferenceError):  # no server is left, or both were lost in this request
            await asyncio.wait_for(engine.agenerate(request(0)), 10)
        with pytest.raises(NoServersError, match="is gone"):
            await asyncio.wait_for(engine.agenerate(request(1)), 10)


async def test_monitor_dies_requests_fail_with_its_death(
    servers: list[ServerProcess], trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: Any, server: Any) -> None:
        raise ZeroDivisionError("planted")

    async with client(servers[:1]) as engine:
        await trainer.publish(engine)
        monkeypatch.setattr("rl_inference.client.weight_update.WeightUpdates.rejoin", broken)
        engine._router.evict(engine._router.servers[0], "was evicted by the test")

        with pytest.raises(InferenceError, match=r"server monitor ended: .*ZeroDivisionError"):
            await asyncio.wait_for(engine.agenerate(request(0)), 10)


@pytest.mark.nightly
async def test_stats_client_that_does_not_publish_evicts_who_lags_and_takes_it_back(
    servers: list[ServerProcess], trainer: Trainer
) -> None:
    async with client(servers) as publisher, client(servers, weights_dir=str(trainer.directory)) as other:
        await trainer.publish(publisher)
        await other.stats()
        assert other.version == 1
        meta = await trainer.stage(publisher)
        servers[0].signal(signal.SIGSTOP)
        await trainer.commit(publisher, meta)

        await other.stats()
        assert other.version == 2
        assert [server.address for server in other._router.live] == [servers[1].address]
        assert (await other.agenerate(request(0, 12))).versions == [2] * 12
        servers[0].signal(signal.SIGCONT)
        await until_live(other, 2)

        await both_serve(other, trainer, 2)


@pytest.mark.nightly
async def test_rejoin_route_that_leaves_nothing_to_read_takes_part_from_the_next_update_on(
    servers: list[ServerProcess], trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("rl_contracts.weights.committed_record", "rl_inference.client.weight_update"):
        monkeypatch.setattr(f"{module}.STORED_ROUTES", ())
    trainer.record = False
    async with client(servers, update_timeout=2.0) as engine:
        await trainer.publish(engine)
        servers[0].stop()
        servers[0].start().wait_ready()
        assert served_version(servers[0]) == 0
        await until(lambda: "rejoins with the next update" in engine._router.servers[0].last_error)
        answers = await asyncio.gather(*(engine.agenerate(request(seed, 12)) for seed in range(4)))

        assert {answer.server for answer in answers} == {servers[1].address}
        servers[0].signal(signal.SIGSTOP)
        await trainer.publish(engine)  # one that cannot come along holds nobody up
        assert [server.address for server in engine._router.live] == [servers[1].address]
        servers[0].signal(signal.SIGCONT)
        await until(lambda: engine._router.servers[0].well)
        await trainer.publish(engine)
        assert len(engine._router.live) == 2
        await both_serve(engine, trainer, 3)
