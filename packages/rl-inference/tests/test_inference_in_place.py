"""Updates of servers that load in place: what is said to them and when, faults, and the way back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from in_place_server import VOCAB, BesideEngine, SummedEngine, TableEngine, TableServer, logprobs_after, scores_of

from rl_contracts.config import ClientConfig, GenerationConfig
from rl_contracts.conformance import inference_engine as suite
from rl_contracts.data import ModelRequest, ModelResponse, ServeSpec, WeightReceipt, WeightUpdateMeta
from rl_contracts.errors import ConfigError, InferenceError, WeightUpdateError
from rl_contracts.inference import Canary, CanaryCompletion, Capabilities
from rl_contracts.testing import put_weights
from rl_contracts.testing.processes import free_port
from rl_contracts.testing.waiting import until
from rl_contracts.weights import write_committed
from rl_contracts.weights.committed_record import RECORD_FILE
from rl_inference import EmbeddedEngine

PROMPT = [n * n % VOCAB for n in range(300)]
Judge = Callable[[int, list[CanaryCompletion]], Any]


def table(version: int) -> np.ndarray:
    """[V, V], as a server reads it from a file."""
    return np.random.default_rng(version).normal(size=(VOCAB, VOCAB)).astype(np.float32).astype(np.float64)


def put(directory: Path, version: int) -> tuple[WeightUpdateMeta, WeightReceipt]:
    return put_weights(directory, version, [("table", torch.from_numpy(table(version)).float())], "disk")


class Trainer:
    """What a trainer does of an update, and a judge that knows what is right."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.judged: list[tuple[int, list[str]]] = []

    async def publish(self, engine: EmbeddedEngine, interrupt: str = "keep") -> float:
        version = engine.version + 1
        await engine.stage_weights(put(self.directory, version)[0])
        return await engine.commit_weights(version, interrupt, Canary(PROMPT, 16, self.judge))

    async def judge(self, version: int, answers: list[CanaryCompletion]) -> None:
        self.judged.append((version, [answer.server for answer in answers]))
        for answer in answers:
            right = scores_of(PROMPT + answer.output_ids, table(version))
            assert len(answer.output_ids) == len(answer.logprobs) == 16
            for what, found, expected in (
                ("weights", answer.scores, right[: len(PROMPT)]),
                ("prefix cache", answer.logprobs, right[len(PROMPT) :]),
            ):
                if not np.allclose(found, expected, atol=1e-9):
                    raise WeightUpdateError(f"{answer.server}: {what}")


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path)


@contextlib.asynccontextmanager
async def fleet(
    count: int = 2, kind: type[EmbeddedEngine] = TableEngine, spec: ServeSpec | None = None, **config: float
) -> AsyncIterator[tuple[EmbeddedEngine, list[TableServer]]]:
    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(TableServer(table(0)).serving()) for _ in range(count)]
        engine = kind(
            spec=spec or ServeSpec(), client=ClientConfig(**{"progress_timeout": 5.0, "probe_interval": 0.1, **config})
        )
        engine.initialize([server.address for server in servers])
        stack.push_async_callback(engine.destroy)
        yield engine, servers


def asked(seed: int, tokens: int = 60) -> ModelRequest:
    prompt = [seed % VOCAB, 3, 5]
    return ModelRequest(prompt, GenerationConfig(max_new_tokens=tokens, ignore_eos=True), seed=seed)


def check(response: ModelResponse) -> None:
    """Each log-prob is that of the version that its stamp says."""
    ids = list(response.input_ids)
    for token, logprob, version in zip(response.output_ids, response.logprobs, response.versions, strict=True):
        right = logprobs_after(ids, table(version), table(version)[ids].mean(0))[token]
        assert logprob == pytest.approx(right, abs=1e-9)
        ids.append(token)


# ---- the order


async def test_commit_in_place_pauses_all_loads_proves_and_only_then_lets_requests_in(trainer: Trainer) -> None:
    async with fleet() as (engine, servers):
        asking = asyncio.create_task(_ask_all_the_time(engine))
        await trainer.publish(engine)
        asking.cancel()

        for server in servers:
            told = server.log[server.log.index(f"generate {len(PROMPT)}") :]
            order = [line for line in told if line != "generate 3"]
            assert order[:6] == [
                "generate 300", "pause keep", "load", "commit 1", "resume", "generate 300"
            ]  # fmt: skip
            first = told.index("pause keep")
            assert "generate 3" not in told[first : told.index("generate 300", first)], "they wait for the canary"
        assert trainer.judged == [(1, [server.address for server in servers])]
        assert engine.version == 1


@pytest.mark.slow
async def test_commit_holds_requests_back_before_the_canary_and_waits_for_it_as_long_as_it_takes(
    trainer: Trainer,
) -> None:
    async with fleet(1, progress_timeout=1) as (engine, (server,)):
        server.paused = "keep"  # so that the canary waits
        server.slow = 1.5
        committing = asyncio.create_task(trainer.publish(engine))
        await until(lambda: "generate 300" in server.log)
        asking = asyncio.create_task(engine.agenerate(asked(1)))
        await asyncio.sleep(0.1)
        assert "generate 3" not in server.log
        server.paused = ""
        await server._tell()

        await committing
        assert set((await asking).versions) == {1}


async def _ask_all_the_time(engine: EmbeddedEngine) -> None:
    async with asyncio.TaskGroup() as group:
        for seed in range(10_000):
            group.create_task(engine.agenerate(asked(seed, 5)))
            await asyncio.sleep(0.005)


@pytest.mark.slow
@pytest.mark.parametrize("interrupt", ["keep", "recompute", "wait"])
async def test_agenerate_over_three_updates_log_probs_are_of_the_stamped_versions(
    trainer: Trainer, interrupt: str
) -> None:
    async with fleet() as (engine, servers):
        running = [asyncio.create_task(engine.agenerate(asked(seed, 150))) for seed in range(24)]
        for _ in range(3):
            await until(lambda: all(server.running for server in servers))
            await trainer.publish(engine, interrupt)
            running += [asyncio.create_task(engine.agenerate(asked(seed))) for seed in range(4)]
        responses = await asyncio.gather(*running)

    assert {version for response in responses for version in response.versions} >= {0, 3}
    for response in responses:
        check(response)
        assert response.versions == sorted(response.versions)
        if interrupt == "wait":
            assert len(set(response.versions)) == 1
    if interrupt == "recompute":
        assert any(response.resubmissions for response in responses)


async def test_commit_while_the_owner_holds_servers_paused_leaves_them_so(trainer: Trainer) -> None:
    async with fleet(1) as (engine, (server,)):
        await engine.pause()
        await trainer.publish(engine)

        assert server.paused == "keep"
        assert trainer.judged == [(1, [server.address])]
        await engine.resume()
        assert set((await engine.agenerate(asked(1))).versions) == {1}


async def test_commit_beside_without_checksums_is_proved_by_the_canary_too(trainer: Trainer) -> None:
    async with fleet(2, BesideEngine) as (engine, servers):
        await trainer.publish(engine)
        check(await engine.agenerate(asked(1)))
        servers[1].loads = False

        with pytest.raises(WeightUpdateError, match=f"{servers[1].address}: weights"):
            await trainer.publish(engine)

        assert servers[0].log[:6] == ["stage", "generate 300", "pause keep", "commit 1", "resume", "generate 300"]


def test_capabilities_checksums_of_servers_that_load_in_place_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"capabilities\.checksums.*staged_load=False"):
        Capabilities(staged_load=False)


async def test_sleep_interrupts_answers_that_go_on_after_wake_and_nothing_is_asked_between(trainer: Trainer) -> None:
    async with fleet(2, BesideEngine) as (engine, servers):
        running = [asyncio.create_task(engine.agenerate(asked(seed))) for seed in range(8)]
        await until(lambda: all(server.running for server in servers))

        await engine.sleep()
        late = asyncio.create_task(engine.agenerate(asked(9)))
        await engine.wake()
        await engine.wake()  # they are

        for response in await asyncio.gather(*running, late):
            check(response)
        for server in servers:
            order = [line for line in server.log if not line.startswith("generate")]
            assert order == ["pause recompute", "sleep", "wake", "resume"]
            assert server.log.index("wake") == server.log.index("sleep") + 1
        await trainer.publish(engine)


async def test_sleep_lasts_to_the_commit_of_what_was_staged_meanwhile(trainer: Trainer) -> None:
    async with fleet(2, SummedEngine) as (engine, servers):
        await trainer.publish(engine)
        running = [asyncio.create_task(engine.agenerate(asked(seed))) for seed in range(8)]
        await until(lambda: all(server.running for server in servers))
        for server in servers:
            server.log.clear()

        await engine.sleep()
        meta, receipt = put(trainer.directory, 2)
        staged = await engine.stage_weights(meta)
        assert [each.checksums for each in staged] == [receipt.checksums] * 2
        assert not any("wake" in server.log for server in servers)
        await engine.commit_weights(2, "recompute")

        for response in await asyncio.gather(*running):
            assert response.versions[-1] == 2
        for server in servers:
            order = [line for line in server.log if not line.startswith(("generate", "stats", "health"))]
            assert order == ["pause recompute", "sleep", "stage", "wake", "pause recompute", "commit 2", "resume"]


async def test_sleep_all_servers_are_lost_meanwhile_whoever_comes_back_takes_the_version(trainer: Trainer) -> None:
    async with fleet(1, BesideEngine, rejoin_timeout=30) as (engine, (server,)):
        await trainer.publish(engine)
        await engine.sleep()
        engine._router.evict(engine._router.servers[0], "was evicted by the test")

        await trainer.publish(engine)

        assert (engine.version, engine.servers) == (2, [server.address])
        assert "wake" in server.log


async def test_sleep_that_is_refused_leaves_servers_that_generate() -> None:
    async with fleet(1, BesideEngine) as (engine, (server,)):
        server.refuses = ("sleep",)
        with pytest.raises(WeightUpdateError, match="cannot sleep"):
            await engine.sleep()

        check(await asyncio.wait_for(engine.agenerate(asked(1)), 20))


async def test_wake_server_that_does_not_wake_is_out_until_it_does() -> None:
    async with fleet(2, BesideEngine, rejoin_timeout=30) as (engine, servers):
        await engine.sleep()
        servers[1].refuses = ("wake",)
        await engine.wake()
        assert engine.servers == [servers[0].address]
        servers[1].log.clear()
        servers[1].refuses = ()

        await until(lambda: len(engine.servers) == 2)

        assert [line for line in servers[1].log if line != "generate 3"][-2:] == ["wake", "resume"]
        await engine.sleep()
        servers[0].refuses = servers[1].refuses = ("wake",)
        with pytest.raises(WeightUpdateError, match="cannot wake"):
            await engine.wake()
        assert not engine.servers


# ---- leases


def renewals(engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let leases be renewed every 50 ms."""
    monkeypatch.setattr(engine._updates._all_servers, "lease", 0.15)


async def test_lease_of_a_pause_that_drains_is_renewed_where_one_stands_still_already(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(2, BesideEngine) as (engine, servers):
        renewals(engine, monkeypatch)
        await engine.stage_weights(put(trainer.directory, 1)[0])
        servers[1].running = 1  # drains
        committing = asyncio.create_task(engine.commit_weights(1, "wait"))
        await until(lambda: servers[0].log.count("pause wait") >= 2)
        assert "pause keep" not in servers[0].log, "another kind would end a drain"
        servers[1].running = 0
        await committing

        told = [len(server.log) for server in servers]
        await asyncio.sleep(0.2)
        assert told == [len(server.log) for server in servers], "renewed after the resume"


async def test_lease_is_renewed_while_servers_sleep_and_not_while_the_canary_is_asked(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(1, BesideEngine) as (engine, (server,)):
        renewals(engine, monkeypatch)
        await engine.sleep()
        await until(lambda: server.log.count("pause recompute") >= 3)
        await engine.wake()
        assert not server.paused

        async def judge(version: int, answers: list[CanaryCompletion]) -> None:
            server.log.clear()
            await asyncio.sleep(0.2)
            assert not server.log
            raise WeightUpdateError("wrong, says this test")

        await engine.pause()
        await engine.stage_weights(put(trainer.directory, 1)[0])
        with pytest.raises(WeightUpdateError, match="says this test"):
            await engine.commit_weights(1, "keep", Canary(PROMPT, 16, judge))

        assert server.paused == "keep", "its owner holds it paused"
        await until(lambda: server.log.count("pause keep") >= 3)
        await engine.resume()


async def test_sleep_servers_that_cannot_say_so() -> None:
    async with fleet(1) as (engine, _):
        for call in (engine.sleep, engine.wake):
            with pytest.raises(InferenceError, match="sleep"):
                await call()


# ---- faults


@pytest.mark.parametrize(
    ("fault", "named"),
    [({"loads": False}, "weights"), ({"flushes": False}, "prefix cache")],
    ids=["acknowledged, not loaded", "stale prefix cache"],
)
async def test_commit_one_server_of_two_with_a_planted_fault_is_named(
    trainer: Trainer, fault: dict[str, Any], named: str
) -> None:
    async with fleet() as (engine, servers):
        for name, value in fault.items():
            setattr(servers[1], name, value)

        with pytest.raises(WeightUpdateError, match=f"{servers[1].address}: {named}"):
            await trainer.publish(engine)

        await engine.agenerate(asked(1))  # nobody waits for ever


async def test_commit_server_that_cannot_load_is_out_and_the_others_go_on(trainer: Trainer) -> None:
    async with fleet() as (engine, servers):
        servers[1].fails = True
        running = [asyncio.create_task(engine.agenerate(asked(seed))) for seed in range(8)]
        await until(lambda: all(server.running for server in servers))

        await trainer.publish(engine)

        assert engine.servers == [servers[0].address]
        for response in await asyncio.gather(*running):
            check(response)


async def test_commit_where_no_server_can_load_raises_and_says_why(trainer: Trainer) -> None:
    async with fleet() as (engine, servers):
        for server in servers:
            server.fails = True

        with pytest.raises(WeightUpdateError, match="could not load"):
            await trainer.publish(engine)

        assert not engine.servers, "what they have is no version"
        for server in servers:
            assert server.log[-1] == "load", "and they are not resumed"


async def test_commit_server_that_could_not_load_is_not_taken_for_whole_by_its_version(trainer: Trainer) -> None:
    async with fleet(1, rejoin_timeout=30) as (engine, (server,)):
        await trainer.publish(engine)
        server.fails = True
        engine._updates._loading._failed_loads[engine._router.servers[0]] = ""  # type: ignore[attr-defined]
        engine._router.evict(engine._router.servers[0], "could not load, says this test")
        await until(lambda: "load" in server.log[-1])
        assert not engine.servers
        server.fails = server.broken = False

        await until(lambda: bool(engine.servers))

        check(await engine.agenerate(asked(1)))


async def test_stage_of_files_that_are_wrong_is_refused_before_a_server_hears_of_it(trainer: Trainer) -> None:
    async with fleet(1) as (engine, (server,)):
        meta, _ = put(trainer.directory, 1)
        (part,) = meta.parts
        wrong = replace(part, params=(replace(part.params[0], shape=(VOCAB, 1)),))

        with pytest.raises(WeightUpdateError, match=r"'table': expected shape \(64, 1\), found \(64, 64\)"):
            await engine.stage_weights(replace(meta, parts=(wrong,)))
        with pytest.raises(WeightUpdateError, match="cannot be read"):
            await engine.stage_weights(replace(meta, parts=(replace(part, location="/nowhere"),)))
        with pytest.raises(WeightUpdateError, match=r"publish\.route=disk"):
            await engine.stage_weights(replace(meta, route="broadcast"))
        with pytest.raises(WeightUpdateError, match="nothing is staged"):
            await engine.commit_weights(1)
        assert not {"pause keep", "load", "commit 1"} & set(server.log)


@pytest.mark.slow
async def test_pause_that_drains_without_progress_is_given_up() -> None:
    async with fleet(1, progress_timeout=1, probe_interval=0) as (engine, (server,)):
        server.running = 1  # an answer that never ends

        with pytest.raises(InferenceError, match=r"no progress.*client\.progress_timeout"):
            await asyncio.wait_for(engine._updates._all_servers.pause(engine._router.live[0], "wait"), 20)


# ---- the way back


async def test_rejoin_restarted_server_is_brought_up_and_proved_before_it_takes_part(trainer: Trainer) -> None:
    async with fleet(1, rejoin_timeout=30) as (engine, (_,)), contextlib.AsyncExitStack() as stack:
        second = TableServer(table(0))
        running = await stack.enter_async_context(contextlib.AsyncExitStack())
        port = free_port()  # which nobody is given while it is free
        await running.enter_async_context(second.serving(port))
        engine.initialize([*engine.servers, second.address])
        await trainer.publish(engine)
        await running.aclose()
        await engine.stats()
        await until(lambda: len(engine.servers) == 1)

        again = await stack.enter_async_context(TableServer(table(0)).serving(port))
        await until(lambda: len(engine.servers) == 2)

        assert again.version == 1
        assert again.log[:5] == ["pause recompute", "load", "commit 1", "resume", "generate 300"]
        assert trainer.judged[-1] == (1, [again.address])
        check(await engine.agenerate(asked(1)))


async def test_rejoin_restarted_server_that_does_not_load_stays_out(trainer: Trainer) -> None:
    async with fleet(2, rejoin_timeout=30) as (engine, servers):
        await trainer.publish(engine)
        engine._router.evict(engine._router.servers[1], "was restarted, says this test")
        servers[1].table, servers[1].version, servers[1].loads = table(0), 0, False
        await until(lambda: "weights" in engine._router.servers[1].last_error)

        assert engine.servers == [servers[0].address]


async def test_rejoin_server_that_has_no_checksums_yet_is_brought_up(trainer: Trainer) -> None:
    spec = ServeSpec(weights_dir=str(trainer.directory), version=0)
    async with fleet(2, SummedEngine, spec, rejoin_timeout=30) as (engine, servers):
        write_committed(trainer.directory, *put(trainer.directory, 0))
        engine._monitor.start()
        engine._router.evict(engine._router.servers[1], "was restarted, says this test")

        await until(lambda: len(engine.servers) == 2)

        assert servers[1].log == ["stage", "commit 0"], "it is no business of this client's to let it go on"


async def test_catch_up_server_that_does_not_show_the_version_is_out_until_it_does(trainer: Trainer) -> None:
    spec = ServeSpec(weights_dir=str(trainer.directory))
    async with fleet(1, spec=spec, rejoin_timeout=30) as (head, (server,)):
        await head.sync_version(1)
        assert head.version == 1
        assert not head.servers

        server.table, server.version = table(2), 2  # meanwhile another version was committed
        write_committed(trainer.directory, *put(trainer.directory, 2))

        assert (await head.agenerate(asked(1))).versions == [2] * 60
        assert head.version == 2


async def test_rejoin_while_another_client_updates_resumes_nobody(trainer: Trainer) -> None:
    async with fleet(1) as (publisher, (server,)):
        head = TableEngine(client=ClientConfig(probe_interval=0.05))
        head.initialize([server.address])
        head._monitor.start()
        await publisher.pause()
        head._router.evict(head._router.servers[0], "was silent, says this test")

        await until(lambda: bool(head.servers))

        assert server.log == ["pause keep"]
        await head.destroy()


async def test_rejoin_record_that_cannot_be_read_for_a_moment_keeps_nobody_out(trainer: Trainer) -> None:
    async with fleet(1, spec=ServeSpec(weights_dir=str(trainer.directory)), rejoin_timeout=30) as (head, _):
        write_committed(trainer.directory, *put(trainer.directory, 0))
        record = trainer.directory / RECORD_FILE
        whole = record.read_bytes()
        record.write_bytes(whole[:50])
        head._monitor.start()
        head._router.evict(head._router.servers[0], "was restarted, says this test")
        await until(lambda: "cannot be read" in head._router.servers[0].last_error)

        record.write_bytes(whole)

        await until(lambda: bool(head.servers))


async def test_commit_server_that_joins_while_all_are_held_is_held_too(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("rl_contracts.weights.committed_record", "rl_inference.client.weight_update"):
        monkeypatch.setattr(f"{module}.STORED_ROUTES", ())
    async with fleet(2, SummedEngine, rejoin_timeout=30) as (engine, servers):
        await engine.stage_weights(put(trainer.directory, 1)[0])
        await engine.commit_weights(1)
        servers[1].version = 0
        engine._router.evict(engine._router.servers[1], "was restarted, says this test")
        await until(lambda: "rejoins with the next update" in engine._router.servers[1].last_error)
        await engine.pause()

        await engine.stage_weights(put(trainer.directory, 2)[0])
        await engine.commit_weights(2)

        assert len(engine.servers) == 2
        assert [server.paused for server in servers] == ["keep", "keep"]


async def test_rejoin_server_with_checksums_is_shown_the_canary_too(trainer: Trainer) -> None:
    async with fleet(2, SummedEngine, rejoin_timeout=30) as (engine, servers):
        await trainer.publish(engine)
        servers[1].table = table(0)  # its checksums are right
        engine._router.evict(engine._router.servers[1], "was restarted, says this test")

        await until(lambda: "weights" in engine._router.servers[1].last_error)

        assert engine.servers == [servers[0].address]


# ---- the contract


class TestInPlaceEngine(suite.InferenceEngineConformance):
    logprob_tolerance = 1e-6

    @pytest.fixture
    async def engine(self, tmp_path: Path) -> AsyncIterator[EmbeddedEngine]:
        self.directory = tmp_path
        async with fleet() as (engine, _):
            yield engine

    async def next_weights(self, version: int) -> tuple[WeightUpdateMeta, WeightReceipt]:
        return put(self.directory, version)
