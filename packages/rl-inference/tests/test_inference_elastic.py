"""Servers that are added, taken away and moved while they are used: nothing lost, nothing mixed, nobody unchecked."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from publishing import SPOILED, TOKENS, Trainer, both_serve, client, request, until, until_live, until_running

from rl_contracts.errors import InferenceError
from rl_inference import EmbeddedEngine
from rl_inference.testing import ServerProcess, reference_model, tiny_model

pytestmark = pytest.mark.slow  # each test starts servers of its own

Start = Callable[..., ServerProcess]


@pytest.fixture
def trainer(model_path: Path, tmp_path: Path) -> Trainer:
    return Trainer(reference_model(model_path), tmp_path / "weights")


@pytest.fixture
def start(model_path: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts a server, and ends it after the test."""
    started: list[ServerProcess] = []

    def start(model: Path = model_path, command: tuple[str, ...] | None = None) -> ServerProcess:
        log = tmp_path / f"server-{len(started)}.log"
        options = {"slots": 8, "weights_dir": tmp_path / "weights"}
        started.append(ServerProcess(model, log, options=options, command=command))
        return started[-1].start()

    yield start
    for server in started:
        server.stop()


def named(*servers: ServerProcess) -> dict[str, str]:
    return {f"servers/rollout/{number}": server.address for number, server in enumerate(servers)}


def whole(engine_version: int, answers: list, tokens: int = TOKENS) -> None:
    for answer in answers:
        assert len(answer.output_ids) == len(answer.logprobs) == len(answer.versions) == tokens
        assert answer.versions == sorted(answer.versions)
        assert answer.versions[-1] <= engine_version


async def test_add_while_generating_joins_at_the_committed_version_and_is_used(start: Start, trainer: Trainer) -> None:
    first = start().wait_ready()
    names = named(first)
    async with client([first], names=lambda: dict(names)) as engine:
        version = await trainer.publish(engine)
        answers = [asyncio.create_task(engine.agenerate(request(seed))) for seed in range(4)]
        await until_running([first])
        second = start()  # named before it is ready
        names.update(named(first, second))

        await until_live(engine, 2)
        finished = await asyncio.gather(*answers)

        assert all(answer.versions == [version] * TOKENS for answer in finished)
        assert engine.servers == [first.address, second.address]
        await both_serve(engine, trainer, version)
        assert (await engine.stats())["rejoins"] == 0
        assert len(await engine.live_receipts(second.address)) == 1
        await both_serve(engine, trainer, await trainer.publish(engine))


async def test_remove_while_generating_answers_go_on_elsewhere_and_it_is_no_failure(
    start: Start, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    pair = [start(), start()]
    for server in pair:
        server.wait_ready()
    names = named(*pair)
    # let go long before the first answer ends
    async with client(pair, names=lambda: dict(names), discover_interval=0.02) as engine:
        version = await trainer.publish(engine)
        alone = [await engine.agenerate(request(seed)) for seed in range(6)]
        answers = [asyncio.create_task(engine.agenerate(request(seed))) for seed in range(6)]
        await until_running(pair)
        before = await engine.stats()

        del names["servers/rollout/0"]
        await until(lambda: engine.servers == [pair[1].address])
        pair[0].stop()
        finished = await asyncio.gather(*answers)

        assert {answer.server for answer in finished} == {pair[1].address}
        assert sum(answer.resubmissions for answer in finished) >= 1
        assert [answer.output_ids for answer in finished] == [answer.output_ids for answer in alone]
        assert "is evicted" not in caplog.text
        after = await engine.stats()
        assert after["servers"] == 1
        assert after["generated_tokens"] >= before["generated_tokens"]
        with pytest.raises(InferenceError, match="expected one of the live servers"):
            await engine.score([5, 6], server=pair[0].address)
        assert await trainer.publish(engine) == version + 1


@pytest.mark.nightly
async def test_move_only_server_is_found_elsewhere_and_goes_on(start: Start, trainer: Trainer) -> None:
    old = start().wait_ready()
    names = named(old)
    async with client([old], names=lambda: dict(names)) as engine:
        version = await trainer.publish(engine)
        answers = [asyncio.create_task(engine.agenerate(request(seed))) for seed in range(4)]
        await until_running([old])
        old.stop()
        new = start()
        names.update(named(new))

        finished = await asyncio.wait_for(asyncio.gather(*answers), 120)

        assert all(answer.versions == [version] * TOKENS for answer in finished)
        assert {answer.server for answer in finished} == {new.address}
        assert [server.address for server in engine._router.servers] == [new.address]
        assert (await engine.stats())["rejoins"] == 1


@pytest.mark.nightly
async def test_update_servers_join_after_its_commit_and_may_leave_before(start: Start, trainer: Trainer) -> None:
    stays, leaves = start().wait_ready(), start().wait_ready()
    names = named(stays, leaves)
    async with client([stays, leaves], names=lambda: dict(names)) as engine:
        await trainer.publish(engine)
        meta = await trainer.stage(engine)
        joins = start().wait_ready()
        del names["servers/rollout/1"]
        names["servers/rollout/2"] = joins.address
        await until(lambda: any(server.address == joins.address and server.well for server in engine._router.servers))
        await until(lambda: engine.servers == [stays.address])
        during = await engine.agenerate(request(1, 12))

        await trainer.commit(engine, meta)
        assert engine.servers == [stays.address], "nobody joins before it holds what is committed"
        await until_live(engine, 2)

        assert during.versions == [1] * 12
        await both_serve(engine, trainer, 2)
        await both_serve(engine, trainer, await trainer.publish(engine))


@pytest.mark.nightly
async def test_pause_server_that_joins_meanwhile_generates_after_resume(start: Start, trainer: Trainer) -> None:
    first = start().wait_ready()
    names = named(first)
    async with client([first], names=lambda: dict(names)) as engine:
        await trainer.publish(engine)
        await engine.pause()
        names.update(named(first, start()))
        await until_live(engine, 2)
        answers = [asyncio.create_task(engine.agenerate(request(seed, 12))) for seed in range(6)]
        await until(lambda: sum(server.open for server in engine._router.servers) == 6)
        assert (await engine.stats())["generated_tokens"] == 0

        await engine.resume()

        assert len({answer.server for answer in await asyncio.gather(*answers)}) == 2


@pytest.mark.nightly  # as a return with wrong weights, test_inference_rejoin.py
async def test_join_with_wrong_weights_stays_out_and_is_named(
    start: Start, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    first = start().wait_ready()
    names = named(first)
    async with client([first], names=lambda: dict(names)) as engine:
        version = await trainer.publish(engine)
        wrong = start(command=(sys.executable, "-c", SPOILED))
        names.update(named(first, wrong))

        await until(lambda: f"{wrong.address} responds but cannot rejoin" in caplog.text, 120)

        assert "parameter 'model.norm.weight' differs" in caplog.text
        answers = await asyncio.gather(*(engine.agenerate(request(seed, 12)) for seed in range(4)))
        assert {answer.server for answer in answers} == {first.address}
        right = start()
        names.update(named(first, right))
        await until_live(engine, 2)
        await both_serve(engine, trainer, version)


@pytest.mark.nightly
async def test_join_of_another_model_is_refused_and_the_next_update_goes_on_without_it(
    start: Start, trainer: Trainer, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start().wait_ready()
    names = named(first)
    async with client([first], names=lambda: dict(names)) as engine:
        object.__setattr__(engine.spec, "model_path", str(trainer.model.name_or_path))
        await trainer.publish(engine)
        trainer.directory.joinpath("committed.json").unlink()  # which it would not survive itself
        other = start(tiny_model(tmp_path / "other", hidden_size=48))
        names.update(named(first, other))

        await until(lambda: f"it serves the model {tmp_path / 'other'}" in caplog.text, 60)
        # as over a route that leaves nothing to read, where servers come in with the update
        monkeypatch.setattr("rl_inference.client.weight_update.STORED_ROUTES", ())
        await trainer.publish(engine)

        assert engine.servers == [first.address]


@pytest.mark.nightly
async def test_heads_that_see_a_server_earlier_or_later_use_it_at_the_committed_version_only(
    start: Start, trainer: Trainer
) -> None:
    first = start().wait_ready()
    early, late = named(first), named(first)
    directory = str(trainer.directory)
    async with (
        client([first], names=lambda: dict(late)) as publisher,
        client([first], directory, names=lambda: dict(early)) as head,
    ):
        await trainer.publish(publisher)
        await head.stats()
        second = start()
        early.update(named(first, second))
        await head.agenerate(request(0, 4))  # it looks after its servers from here on
        await until_live(head, 2)
        answers = [asyncio.create_task(head.agenerate(request(seed))) for seed in range(6)]
        await until_running([first, second])
        await trainer.publish(publisher)  # which knows nothing of the second
        early.pop("servers/rollout/0")  # what has tokens of version 2 goes on at one of version 1, if it may
        await until(lambda: head._router.servers[0].address == second.address)
        late.update(named(first, second))
        await until_live(publisher, 2)

        finished = await asyncio.wait_for(asyncio.gather(*answers), 120)

        whole(2, finished)
        await head.stats()
        assert head.version == publisher.version == 2
        early.update(named(first, second))
        await until_live(head, 2)
        await both_serve(head, trainer, 2)
        await both_serve(publisher, trainer, 2)


async def keep_asking(engine: EmbeddedEngine, until_set: asyncio.Event, answers: list) -> None:
    while not until_set.is_set():
        answers.append(await engine.agenerate(request(random.randrange(1000), 60)))


async def until_each_answered(asking: list[asyncio.Task], answers: list[list]) -> None:
    """Wait for one more answer of each, so that no request meets a second kill, which would end it for good."""
    have = [len(one) for one in answers]
    await until(
        lambda: (
            any(task.done() for task in asking)
            or all(len(one) > before for one, before in zip(answers, have, strict=True))
        ),
        120,
    )
    for task in asking:
        if task.done():
            task.result()
    assert not any(task.done() for task in asking)


async def test_churn_every_request_has_one_whole_answer_whoever_comes_and_goes(start: Start, trainer: Trainer) -> None:
    """Servers come, go, die and move in random order while versions are published."""
    random.seed(7)
    servers = [start().wait_ready() for _ in range(3)]
    names = named(*servers)
    async with client(servers, str(trainer.directory), names=lambda: dict(names)) as engine:
        await trainer.publish(engine)
        ended, answers = asyncio.Event(), [[] for _ in range(9)]
        asking = [asyncio.create_task(keep_asking(engine, ended, one)) for one in answers]
        for _ in range(12):
            what = random.choice(["take", "give", "kill", "publish", "publish"])
            name = random.choice(list(names))
            if what == "take" and len(names) > 1:
                del names[name]
            elif what == "give":
                names.update(named(*servers))
            elif what == "kill":  # it comes back at another address
                number = int(name[-1])
                servers[number].stop()
                servers[number] = start()
                names[name] = servers[number].address
            else:
                await asyncio.wait_for(trainer.publish(engine, random.choice(["keep", "recompute"])), 60)
            await until_each_answered(asking, answers)
        names.update(named(*servers))
        await until_live(engine, 3)
        ended.set()
        await asyncio.wait_for(asyncio.gather(*asking), 60)

        whole(trainer.version, [answer for one in answers for answer in one], 60)
        # a reading that began before all names were back may still remove a server, which then joins again
        await until(lambda: {server.address for server in servers} == {*engine.servers})
        late = await asyncio.gather(*(engine.agenerate(request(seed, 12)) for seed in range(12)))
        assert all(answer.versions == [trainer.version] * 12 for answer in late)
