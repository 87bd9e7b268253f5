"""Tests that add, remove and move servers during use: no lost token, no mixed versions, no unchecked server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from publishing import (
    TOKENS,
    Trainer,
    assert_both_serve,
    client,
    request,
    until,
    until_live,
    until_running,
)

from rl_contracts.errors import InferenceError
from rl_inference import EmbeddedEngine
from rl_inference.testing import ServerProcess, reference_model, tiny_model

pytestmark = pytest.mark.slow  # each test starts its own servers

Start = Callable[..., ServerProcess]


@pytest.fixture
def trainer(model_path: Path, tmp_path: Path) -> Trainer:
    return Trainer(reference_model(model_path), tmp_path / "weights")


@pytest.fixture
def start(model_path: Path, tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a server, which is stopped after the test."""
    started: list[ServerProcess] = []

    def start(model: Path = model_path) -> ServerProcess:
        log = tmp_path / f"server-{len(started)}.log"
        options = {"max_sequences": 8, "weights_dir": tmp_path / "weights"}
        started.append(ServerProcess(model, log, options=options))
        return started[-1].start()

    yield start
    for server in started:
        server.stop()


def named(*servers: ServerProcess) -> dict[str, str]:
    return {f"servers/rollout/{number}": server.address for number, server in enumerate(servers)}


def assert_complete(engine_version: int, completions: list, tokens: int = TOKENS) -> None:
    """Assert that completions have all tokens, and that their versions never decrease or exceed the engine's."""
    for completion in completions:
        assert len(completion.output_ids) == len(completion.logprobs) == len(completion.versions) == tokens
        assert completion.versions == sorted(completion.versions)
        assert completion.versions[-1] <= engine_version


async def test_add_server_joins_at_committed_version_and_generates(start: Start, trainer: Trainer) -> None:
    first = start().wait_ready()
    names = named(first)
    async with client([first], names=lambda: dict(names)) as engine:
        version = await trainer.publish(engine)
        completions = [asyncio.create_task(engine.agenerate(request(seed))) for seed in range(4)]
        await until_running([first])
        second = start()  # listed before it is ready
        names.update(named(first, second))

        await until_live(engine, 2)
        finished = await asyncio.gather(*completions)

        assert all(completion.versions == [version] * TOKENS for completion in finished)
        assert engine.servers == [first.address, second.address]
        await assert_both_serve(engine, trainer, version)
        assert (await engine.stats())["rejoins"] == 0
        assert len(await engine.live_receipts(second.address)) == 1
        await assert_both_serve(engine, trainer, await trainer.publish(engine))


async def test_remove_server_resumes_elsewhere_and_is_no_failure(
    start: Start, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    pair = [start(), start()]
    for server in pair:
        server.wait_ready()
    names = named(*pair)
    # discovery removes a server long before its first completion ends
    async with client(pair, names=lambda: dict(names), probe_interval=0.04) as engine:
        version = await trainer.publish(engine)
        alone = [await engine.agenerate(request(seed)) for seed in range(6)]
        completions = [asyncio.create_task(engine.agenerate(request(seed))) for seed in range(6)]
        await until_running(pair)
        before = await engine.stats()

        del names["servers/rollout/0"]
        await until(lambda: engine.servers == [pair[1].address])
        pair[0].stop()
        finished = await asyncio.gather(*completions)

        assert {completion.server for completion in finished} == {pair[1].address}
        assert sum(completion.resubmissions for completion in finished) >= 1
        assert [completion.output_ids for completion in finished] == [completion.output_ids for completion in alone]
        assert "is evicted" not in caplog.text
        after = await engine.stats()
        assert after["servers"] == 1
        assert after["generated_tokens"] >= before["generated_tokens"]
        with pytest.raises(InferenceError, match="expected one of the live servers"):
            await engine.score([5, 6], server=pair[0].address)
        assert await trainer.publish(engine) == version + 1


@pytest.mark.nightly
async def test_update_servers_may_leave_but_join_only_after_commit(start: Start, trainer: Trainer) -> None:
    remaining, removed = start().wait_ready(), start().wait_ready()
    names = named(remaining, removed)
    async with client([remaining, removed], names=lambda: dict(names)) as engine:
        await trainer.publish(engine)
        meta = await trainer.stage(engine)
        added = start().wait_ready()
        del names["servers/rollout/1"]
        names["servers/rollout/2"] = added.address
        await until(
            lambda: any(server.address == added.address and server.instance for server in engine._router.servers)
        )
        await until(lambda: engine.servers == [remaining.address])
        during = await engine.agenerate(request(1, 12))

        await trainer.commit(engine, meta)
        assert engine.servers == [remaining.address], "a server must load the committed version before it joins"
        await until_live(engine, 2)

        assert during.versions == [1] * 12
        await assert_both_serve(engine, trainer, 2)
        await assert_both_serve(engine, trainer, await trainer.publish(engine))


@pytest.mark.nightly
async def test_join_of_another_model_is_rejected_and_updates_continue(
    start: Start, trainer: Trainer, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start().wait_ready()
    names = named(first)
    async with client([first], names=lambda: dict(names)) as engine:
        object.__setattr__(engine.spec, "model_path", str(trainer.model.name_or_path))
        await trainer.publish(engine)
        trainer.directory.joinpath("committed.json").unlink()  # the other model could not start with this record
        other = start(tiny_model(tmp_path / "other", hidden_size=48))
        names.update(named(first, other))

        await until(lambda: f"it serves the model {tmp_path / 'other'}" in caplog.text, 60)
        # as with a route without files, where servers join with an update
        monkeypatch.setattr("rl_inference.client.weight_update.STORED_ROUTES", ())
        await trainer.publish(engine)

        assert engine.servers == [first.address]


@pytest.mark.nightly
async def test_clients_with_different_views_use_only_committed_version(start: Start, trainer: Trainer) -> None:
    first = start().wait_ready()
    reader_names, publisher_names = named(first), named(first)
    directory = str(trainer.directory)
    async with (
        client([first], names=lambda: dict(publisher_names)) as publisher,
        client([first], directory, names=lambda: dict(reader_names)) as reader,
    ):
        await trainer.publish(publisher)
        await reader.stats()
        second = start()
        reader_names.update(named(first, second))
        await reader.agenerate(request(0, 4))  # starts its server monitor
        await until_live(reader, 2)
        completions = [asyncio.create_task(reader.agenerate(request(seed))) for seed in range(6)]
        await until_running([first, second])
        await trainer.publish(publisher)  # the publisher does not know the second server
        # completions with tokens of version 2 must not resume on the server at version 1
        reader_names.pop("servers/rollout/0")
        await until(lambda: reader._router.servers[0].address == second.address)
        publisher_names.update(named(first, second))
        await until_live(publisher, 2)

        finished = await asyncio.wait_for(asyncio.gather(*completions), 120)

        assert_complete(2, finished)
        await reader.stats()
        assert reader.version == publisher.version == 2
        reader_names.update(named(first, second))
        await until_live(reader, 2)
        await assert_both_serve(reader, trainer, 2)
        await assert_both_serve(publisher, trainer, 2)


async def send_requests(engine: EmbeddedEngine, until_set: asyncio.Event, completions: list) -> None:
    while not until_set.is_set():
        completions.append(await engine.agenerate(request(random.randrange(1000), 60)))


async def until_each_completed(tasks: list[asyncio.Task], completions: list[list]) -> None:
    """Wait for one more completion of each task, so that no request meets two kills and is abandoned."""
    previous = [len(each) for each in completions]
    await until(
        lambda: (
            any(task.done() for task in tasks)
            or all(len(each) > count for each, count in zip(completions, previous, strict=True))
        ),
        120,
    )
    for task in tasks:
        if task.done():
            task.result()
    assert not any(task.done() for task in tasks)


async def test_random_server_changes_every_request_completes_once(start: Start, trainer: Trainer) -> None:
    """Add, remove, kill and move servers in random order while versions are published."""
    random.seed(7)
    servers = [start().wait_ready() for _ in range(3)]
    names = named(*servers)
    async with client(servers, str(trainer.directory), names=lambda: dict(names)) as engine:
        await trainer.publish(engine)
        ended, completions = asyncio.Event(), [[] for _ in range(9)]
        tasks = [asyncio.create_task(send_requests(engine, ended, each)) for each in completions]
        for _ in range(12):
            action = random.choice(["remove", "restore", "kill", "publish", "publish"])
            name = random.choice(list(names))
            if action == "remove" and len(names) > 1:
                del names[name]
            elif action == "restore":
                names.update(named(*servers))
            elif action == "kill":  # it restarts at another address
                number = int(name[-1])
                servers[number].stop()
                servers[number] = start()
                names[name] = servers[number].address
            else:
                await asyncio.wait_for(trainer.publish(engine, random.choice(["keep", "recompute"])), 60)
            await until_each_completed(tasks, completions)
        names.update(named(*servers))
        await until_live(engine, 3)
        ended.set()
        await asyncio.wait_for(asyncio.gather(*tasks), 60)

        assert_complete(trainer.version, [completion for each in completions for completion in each], 60)
        # a reading that started before all names were restored may still remove a server, which then joins again
        await until(lambda: {server.address for server in servers} == {*engine.servers})
        final = await asyncio.gather(*(engine.agenerate(request(seed, 12)) for seed in range(12)))
        assert all(completion.versions == [trainer.version] * 12 for completion in final)
