"""Tests of weight updates on servers that load in place or report no checksums: order of requests, faults, rejoin."""

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
from in_place_server import VOCAB, ChecksumEngine, StagedEngine, TableEngine, TableServer, logprobs_after, scores_of
from probes import NEVER, probes

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
    """Return the weights of a version, [V, V], rounded as in a file."""
    return np.random.default_rng(version).normal(size=(VOCAB, VOCAB)).astype(np.float32).astype(np.float64)


def put(directory: Path, version: int) -> tuple[WeightUpdateMeta, WeightReceipt]:
    return put_weights(directory, version, [("table", torch.from_numpy(table(version)).float())], "disk")


class Trainer:
    """Publisher of weights, with a canary judge that knows the correct results."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.judged: list[tuple[int, list[str]]] = []

    async def publish(self, engine: EmbeddedEngine, interrupt: str = "keep") -> float:
        version = engine.version + 1
        await engine.stage_weights(put(self.directory, version)[0])
        return await engine.commit_weights(version, interrupt, Canary(PROMPT, 16, self.judge))

    async def judge(self, version: int, completions: list[CanaryCompletion]) -> None:
        self.judged.append((version, [completion.server for completion in completions]))
        for completion in completions:
            scores = scores_of(PROMPT + completion.output_ids, table(version))
            assert len(completion.output_ids) == len(completion.logprobs) == 16
            for name, values, expected in (
                ("weights", completion.scores, scores[: len(PROMPT)]),
                ("prefix cache", completion.logprobs, scores[len(PROMPT) :]),
            ):
                if not np.allclose(values, expected, atol=1e-9):
                    raise WeightUpdateError(f"{completion.server}: {name}")


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path)


@contextlib.asynccontextmanager
async def fleet(
    count: int = 2,
    kind: type[EmbeddedEngine] = TableEngine,
    progress_timeout: float = 5.0,
    probe_interval: float = 0.1,
    **spec: Any,
) -> AsyncIterator[tuple[EmbeddedEngine, list[TableServer]]]:
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(probes(probe_interval))
        servers = [await stack.enter_async_context(TableServer(table(0)).serving()) for _ in range(count)]
        engine = kind(spec=ServeSpec(**spec), client=ClientConfig(progress_timeout=progress_timeout))
        engine.initialize([server.address for server in servers])
        stack.push_async_callback(engine.destroy)
        yield engine, servers


def make_request(seed: int, tokens: int = 60) -> ModelRequest:
    prompt = [seed % VOCAB, 3, 5]
    return ModelRequest(prompt, GenerationConfig(max_new_tokens=tokens, ignore_eos=True), seed=seed)


def check(response: ModelResponse) -> None:
    """Assert that each log-prob is that of the token's version."""
    ids = list(response.input_ids)
    for token, logprob, version in zip(response.output_ids, response.logprobs, response.versions, strict=True):
        expected = logprobs_after(ids, table(version), table(version)[ids].mean(0))[token]
        assert logprob == pytest.approx(expected, abs=1e-9)
        ids.append(token)


# ---- order of requests


@pytest.mark.guarantee(
    "After an update, servers without checksums accept requests only after the canary prompt.", area="weights"
)
async def test_commit_in_place_runs_canary_before_releasing_requests(trainer: Trainer) -> None:
    async with fleet() as (engine, servers):
        requests = asyncio.create_task(_send_requests(engine))
        await trainer.publish(engine)
        requests.cancel()

        for server in servers:
            log = server.log[server.log.index(f"generate {len(PROMPT)}") :]
            order = [line for line in log if line != "generate 3"]
            assert order[:6] == [
                "generate 300", "pause keep", "load", "commit 1", "resume", "generate 300"
            ]  # fmt: skip
            pause_index = log.index("pause keep")
            assert "generate 3" not in log[pause_index : log.index("generate 300", pause_index)], (
                "requests must wait for the canary"
            )
        assert trainer.judged == [(1, [server.address for server in servers])]
        assert engine.version == 1


@pytest.mark.slow
async def test_commit_with_slow_canary_holds_back_requests_until_done(
    trainer: Trainer,
) -> None:
    async with fleet(1, progress_timeout=1) as (engine, (server,)):
        server.paused = "keep"  # makes the canary wait
        server.slow = 1.5
        committing = asyncio.create_task(trainer.publish(engine))
        await until(lambda: "generate 300" in server.log)
        completing = asyncio.create_task(engine.agenerate(make_request(1)))
        await asyncio.sleep(0.1)
        assert "generate 3" not in server.log
        server.paused = ""
        await server._notify()

        await committing
        assert set((await completing).versions) == {1}


async def _send_requests(engine: EmbeddedEngine) -> None:
    async with asyncio.TaskGroup() as group:
        for seed in range(10_000):
            group.create_task(engine.agenerate(make_request(seed, 5)))
            await asyncio.sleep(0.005)


@pytest.mark.slow
@pytest.mark.parametrize("interrupt", ["keep", "recompute", "wait"])
async def test_agenerate_over_three_updates_logprobs_match_token_versions(trainer: Trainer, interrupt: str) -> None:
    async with fleet() as (engine, servers):
        running = [asyncio.create_task(engine.agenerate(make_request(seed, 150))) for seed in range(24)]
        for _ in range(3):
            await until(lambda: all(server.running for server in servers))
            await trainer.publish(engine, interrupt)
            running += [asyncio.create_task(engine.agenerate(make_request(seed))) for seed in range(4)]
        responses = await asyncio.gather(*running)

    assert {version for response in responses for version in response.versions} >= {0, 3}
    for response in responses:
        check(response)
        assert response.versions == sorted(response.versions)
        if interrupt == "wait":
            assert len(set(response.versions)) == 1
    if interrupt == "recompute":
        assert any(response.resubmissions for response in responses)


async def test_commit_while_paused_leaves_servers_paused(trainer: Trainer) -> None:
    async with fleet(1) as (engine, (server,)):
        await engine.pause()
        await trainer.publish(engine)

        assert server.paused == "keep"
        assert trainer.judged == [(1, [server.address])]
        await engine.resume()
        assert set((await engine.agenerate(make_request(1))).versions) == {1}


async def test_commit_staged_without_checksums_runs_canary(trainer: Trainer) -> None:
    async with fleet(2, StagedEngine) as (engine, servers):
        await trainer.publish(engine)
        check(await engine.agenerate(make_request(1)))
        servers[1].loads = False

        with pytest.raises(WeightUpdateError, match=f"{servers[1].address}: weights"):
            await trainer.publish(engine)

        assert servers[0].log[:6] == ["stage", "generate 300", "pause keep", "commit 1", "resume", "generate 300"]


def test_capabilities_checksums_with_in_place_load_raise() -> None:
    with pytest.raises(ConfigError, match=r"capabilities\.checksums.*staged_load=False"):
        Capabilities(staged_load=False)


async def test_sleep_interrupts_completions_that_resume_after_wake(trainer: Trainer) -> None:
    async with fleet(2, StagedEngine) as (engine, servers):
        running = [asyncio.create_task(engine.agenerate(make_request(seed))) for seed in range(8)]
        await until(lambda: all(server.running for server in servers))

        await engine.sleep()
        late = asyncio.create_task(engine.agenerate(make_request(9)))
        await engine.wake()
        await engine.wake()  # no effect: they are awake

        for response in await asyncio.gather(*running, late):
            check(response)
        for server in servers:
            order = [line for line in server.log if not line.startswith("generate")]
            assert order == ["pause recompute", "sleep", "wake", "resume"]
            assert server.log.index("wake") == server.log.index("sleep") + 1
        await trainer.publish(engine)


async def test_sleep_with_staged_version_ends_at_its_commit(trainer: Trainer) -> None:
    async with fleet(2, ChecksumEngine) as (engine, servers):
        await trainer.publish(engine)
        running = [asyncio.create_task(engine.agenerate(make_request(seed))) for seed in range(8)]
        await until(lambda: all(server.running for server in servers))
        for server in servers:
            server.log.clear()

        await engine.sleep()
        meta, receipt = put(trainer.directory, 2)
        receipts = await engine.stage_weights(meta)
        assert [each.checksums for each in receipts] == [receipt.checksums] * 2
        assert not any("wake" in server.log for server in servers)
        await engine.commit_weights(2, "recompute")

        for response in await asyncio.gather(*running):
            assert response.versions[-1] == 2
        for server in servers:
            order = [line for line in server.log if not line.startswith(("generate", "stats", "health"))]
            assert order == ["pause recompute", "sleep", "stage", "wake", "pause recompute", "commit 2", "resume"]


async def test_sleep_all_servers_lost_then_rejoin_receives_next_version(trainer: Trainer) -> None:
    async with fleet(1, StagedEngine, rejoin_timeout=30) as (engine, (server,)):
        await trainer.publish(engine)
        await engine.sleep()
        engine._router.evict(engine._router.servers[0], "was evicted by the test")

        await trainer.publish(engine)

        assert (engine.version, engine.servers) == (2, [server.address])
        assert "wake" in server.log


async def test_sleep_rejected_leaves_servers_generating() -> None:
    async with fleet(1, StagedEngine) as (engine, (server,)):
        server.rejects = ("sleep",)
        with pytest.raises(WeightUpdateError, match="cannot sleep"):
            await engine.sleep()

        check(await asyncio.wait_for(engine.agenerate(make_request(1)), 20))


async def test_wake_server_that_fails_is_evicted_until_it_wakes() -> None:
    async with fleet(2, StagedEngine, rejoin_timeout=30) as (engine, servers):
        await engine.sleep()
        servers[1].rejects = ("wake",)
        await engine.wake()
        assert engine.servers == [servers[0].address]
        servers[1].log.clear()
        servers[1].rejects = ()

        await until(lambda: len(engine.servers) == 2)

        assert [line for line in servers[1].log if line != "generate 3"][-2:] == ["wake", "resume"]
        await engine.sleep()
        servers[0].rejects = servers[1].rejects = ("wake",)
        with pytest.raises(WeightUpdateError, match="cannot wake"):
            await engine.wake()
        assert not engine.servers


# ---- leases


def renew_quickly(engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the lease so that it is renewed every 50 ms."""
    monkeypatch.setattr(engine._updates._all_servers, "lease", 0.15)


async def test_lease_renewed_on_paused_server_while_another_drains(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(2, StagedEngine) as (engine, servers):
        renew_quickly(engine, monkeypatch)
        await engine.stage_weights(put(trainer.directory, 1)[0])
        servers[1].running = 1  # never finishes, so the pause waits
        committing = asyncio.create_task(engine.commit_weights(1, "wait"))
        await until(lambda: servers[0].log.count("pause wait") >= 2)
        assert "pause keep" not in servers[0].log, "a pause of another mode would end the wait"
        servers[1].running = 0
        await committing

        log_lengths = [len(server.log) for server in servers]
        await asyncio.sleep(0.2)
        assert log_lengths == [len(server.log) for server in servers], "the lease must not be renewed after the resume"


async def test_lease_renewed_during_sleep_but_not_during_canary(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(1, StagedEngine) as (engine, (server,)):
        renew_quickly(engine, monkeypatch)
        await engine.sleep()
        await until(lambda: server.log.count("pause recompute") >= 3)
        await engine.wake()
        assert not server.paused

        async def judge(version: int, completions: list[CanaryCompletion]) -> None:
            server.log.clear()
            await asyncio.sleep(0.2)
            assert not server.log
            raise WeightUpdateError("rejected by the test")

        await engine.pause()
        await engine.stage_weights(put(trainer.directory, 1)[0])
        with pytest.raises(WeightUpdateError, match="rejected by the test"):
            await engine.commit_weights(1, "keep", Canary(PROMPT, 16, judge))

        assert server.paused == "keep", "`pause` holds it paused"
        await until(lambda: server.log.count("pause keep") >= 3)
        await engine.resume()


async def test_sleep_and_wake_unsupported_raise() -> None:
    async with fleet(1) as (engine, _):
        for call in (engine.sleep, engine.wake):
            with pytest.raises(InferenceError, match="sleep"):
                await call()


# ---- faults


@pytest.mark.parametrize(
    ("fault", "cause"),
    [({"loads": False}, "weights"), ({"flushes": False}, "prefix cache")],
    ids=["load acknowledged but skipped", "stale prefix cache"],
)
async def test_commit_with_injected_fault_names_server_and_cause(
    trainer: Trainer, fault: dict[str, Any], cause: str
) -> None:
    async with fleet() as (engine, servers):
        for name, value in fault.items():
            setattr(servers[1], name, value)

        with pytest.raises(WeightUpdateError, match=f"{servers[1].address}: {cause}"):
            await trainer.publish(engine)

        await engine.agenerate(make_request(1))  # requests are released


async def test_commit_server_that_cannot_load_is_evicted_others_continue(trainer: Trainer) -> None:
    async with fleet() as (engine, servers):
        servers[1].fails = True
        running = [asyncio.create_task(engine.agenerate(make_request(seed))) for seed in range(8)]
        await until(lambda: all(server.running for server in servers))

        await trainer.publish(engine)

        assert engine.servers == [servers[0].address]
        for response in await asyncio.gather(*running):
            check(response)


async def test_commit_no_server_can_load_raises_with_cause(trainer: Trainer) -> None:
    async with fleet() as (engine, servers):
        for server in servers:
            server.fails = True

        with pytest.raises(WeightUpdateError, match="could not load"):
            await trainer.publish(engine)

        assert not engine.servers, "their weights are incomplete"
        for server in servers:
            assert server.log[-1] == "load", "they must not be resumed"


async def test_rejoin_after_failed_load_loads_again_despite_right_version(trainer: Trainer) -> None:
    async with fleet(1, rejoin_timeout=30) as (engine, (server,)):
        await trainer.publish(engine)
        server.fails = True
        engine._updates._loading._failed_loads[engine._router.servers[0]] = ""  # type: ignore[attr-defined]
        engine._router.evict(engine._router.servers[0], "could not load")
        await until(lambda: "load" in server.log[-1])
        assert not engine.servers
        server.fails = server.broken = False

        await until(lambda: bool(engine.servers))

        check(await engine.agenerate(make_request(1)))


async def test_stage_wrong_files_raises_before_any_request(trainer: Trainer) -> None:
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
async def test_pause_wait_without_progress_raises() -> None:
    async with fleet(1, progress_timeout=1, probe_interval=NEVER) as (engine, (server,)):
        server.running = 1  # a completion that never ends

        with pytest.raises(InferenceError, match=r"no progress.*client\.progress_timeout"):
            await asyncio.wait_for(engine._updates._all_servers.pause(engine._router.live[0], "wait"), 20)


# ---- rejoin


async def test_rejoin_restarted_server_loads_and_passes_canary_first(trainer: Trainer) -> None:
    async with fleet(1, rejoin_timeout=30) as (engine, (_,)), contextlib.AsyncExitStack() as stack:
        second = TableServer(table(0))
        second_stack = await stack.enter_async_context(contextlib.AsyncExitStack())
        port = free_port()  # reserved, so that no other process gets it between the two servers
        await second_stack.enter_async_context(second.serving(port))
        engine.initialize([*engine.servers, second.address])
        await trainer.publish(engine)
        await second_stack.aclose()
        await engine.stats()
        await until(lambda: len(engine.servers) == 1)

        restarted = await stack.enter_async_context(TableServer(table(0)).serving(port))
        await until(lambda: len(engine.servers) == 2)

        assert restarted.version == 1
        assert restarted.log[:5] == ["pause recompute", "load", "commit 1", "resume", "generate 300"]
        assert trainer.judged[-1] == (1, [restarted.address])
        check(await engine.agenerate(make_request(1)))


async def test_rejoin_server_without_checksums_loads_committed_weights(trainer: Trainer) -> None:
    async with fleet(2, ChecksumEngine, weights_dir=str(trainer.directory), rejoin_timeout=30) as (engine, servers):
        write_committed(trainer.directory, *put(trainer.directory, 0))
        engine._monitor.start()
        engine._router.evict(engine._router.servers[1], "was restarted")

        await until(lambda: len(engine.servers) == 2)

        assert servers[1].log == ["stage", "commit 0"], "a client that did not pause a server must not resume it"


async def test_sync_version_server_behind_is_evicted_until_it_catches_up(trainer: Trainer) -> None:
    async with fleet(1, weights_dir=str(trainer.directory), rejoin_timeout=30) as (client, (server,)):
        await client.sync_version(1)
        assert client.version == 1
        assert not client.servers

        server.table, server.version = table(2), 2  # another client committed the next version
        write_committed(trainer.directory, *put(trainer.directory, 2))

        assert (await client.agenerate(make_request(1))).versions == [2] * 60
        assert client.version == 2


async def test_stats_server_that_missed_a_commit_of_another_client_is_evicted(trainer: Trainer) -> None:
    async with fleet(2, weights_dir=str(trainer.directory), rejoin_timeout=30) as (client, servers):
        servers[0].table, servers[0].version = table(1), 1
        write_committed(trainer.directory, *put(trainer.directory, 1))

        await client.stats()

        # no await since the eviction, so no probe has readmitted the other server
        assert client.servers == [servers[0].address]
        assert client.version == 1


async def test_rejoin_while_another_client_updates_does_not_resume(trainer: Trainer) -> None:
    async with fleet(1) as (publisher, (server,)):
        client = TableEngine()
        client.initialize([server.address])
        client._monitor.start()
        await publisher.pause()
        client._router.evict(client._router.servers[0], "was silent")

        await until(lambda: bool(client.servers))

        assert server.log == ["pause keep"]
        await client.destroy()


async def test_rejoin_after_unreadable_record_is_tried_again(trainer: Trainer) -> None:
    async with fleet(1, weights_dir=str(trainer.directory), rejoin_timeout=30) as (client, _):
        write_committed(trainer.directory, *put(trainer.directory, 0))
        record = trainer.directory / RECORD_FILE
        content = record.read_bytes()
        record.write_bytes(content[:50])
        client._monitor.start()
        client._router.evict(client._router.servers[0], "was restarted")
        await until(lambda: "cannot be read" in client._router.servers[0].last_error)

        record.write_bytes(content)

        await until(lambda: bool(client.servers))


async def test_commit_while_paused_pauses_joining_server(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("rl_contracts.weights.committed_record", "rl_inference.client.weight_update"):
        monkeypatch.setattr(f"{module}.STORED_ROUTES", ())
    async with fleet(2, ChecksumEngine, rejoin_timeout=30) as (engine, servers):
        await engine.stage_weights(put(trainer.directory, 1)[0])
        await engine.commit_weights(1)
        servers[1].version = 0
        engine._router.evict(engine._router.servers[1], "was restarted")
        await until(lambda: "rejoins with the next update" in engine._router.servers[1].last_error)
        await engine.pause()

        await engine.stage_weights(put(trainer.directory, 2)[0])
        await engine.commit_weights(2)

        assert len(engine.servers) == 2
        assert [server.paused for server in servers] == ["keep", "keep"]


async def test_rejoin_server_with_checksums_also_runs_canary(trainer: Trainer) -> None:
    async with fleet(2, ChecksumEngine, rejoin_timeout=30) as (engine, servers):
        await trainer.publish(engine)
        servers[1].table = table(0)  # wrong weights with right checksums
        engine._router.evict(engine._router.servers[1], "was restarted")

        await until(lambda: "weights" in engine._router.servers[1].last_error)

        assert engine.servers == [servers[0].address]


# ---- conformance suite


class TestInPlaceEngine(suite.InferenceEngineConformance):
    logprob_tolerance = 1e-6

    @pytest.fixture
    async def engine(self, tmp_path: Path) -> AsyncIterator[EmbeddedEngine]:
        self.directory = tmp_path
        async with fleet() as (engine, _):
            yield engine

    async def next_weights(self, version: int) -> tuple[WeightUpdateMeta, WeightReceipt]:
        return put(self.directory, version)
