"""Faults planted in real servers (`faulty_plugins.py`), between a real trainer and two of them: each is named by the
server's own comparison after a load, by the canary, or by the gap gate.

vLLM's in CI, SGLang's nightly; they need the environments that `infra/servers/build.py` makes, and are skipped where
there are none. Both servers of a kind start at once, and again only where a test has ended them.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from real_servers import KEY, SHARED, Kind, Models, faulty, kind_of, make_request, publish
from training_run import Run

from rl_contracts.config import ClientConfig
from rl_contracts.data import ModelRequest, ModelResponse, ServeSpec
from rl_contracts.errors import WeightUpdateError
from rl_contracts.runtime.aio import LoopThread
from rl_inference.client.engine import HttpEngine
from rl_inference.testing import JobProcess

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1500)]

LONG = 300
"""Tokens of a prompt: more than two blocks of vLLM's prefix cache on a CPU, which hold 128."""


class Fleet:
    """Two servers with a file of faults each, and the runs that use them one after the other."""

    def __init__(self, kind: Kind, directory: Path) -> None:
        self.kind, self.directory, self._version = kind, directory, 0
        self.models, self.weights = Models(directory / "models", tied=True), directory / "weights"
        self.model = self.models.paths[0]
        self.spec = ServeSpec(str(self.model), device="cpu", weights_dir=str(self.weights), cpus=1)
        self.faults = [directory / f"faults-{index}" for index in range(2)]
        jobs = [faulty(kind.job(self.spec), faults) for faults in self.faults]
        logs = [directory / f"server-{index}.log" for index in range(2)]
        self.servers = [JobProcess(self.model, log, KEY, job=job) for log, job in zip(logs, jobs, strict=True)]

    def ready(self) -> None:
        """Let both run without a fault; one that has ended is started again."""
        self.plant("", 0, 1)
        ended = [server for server in self.servers if server.process is None or server.exit_code is not None]
        for server in ended:
            server.start()
        for server in ended:
            server.wait_ready()

    def plant(self, faults: str, *servers: int) -> None:
        """Switch faults on, on some servers."""
        for index in servers:
            self.faults[index].write_text(faults)

    def client(self, servers: Sequence[int], **settings: float) -> HttpEngine:
        """A client of the servers of these numbers, which waits for none to come back."""
        addresses = [self.servers[index].address for index in servers]
        options = {"progress_timeout": 60.0, "probe_timeout": 5.0, "rejoin_timeout": 0.0, **settings}
        return self.kind.client(self.spec, addresses, ClientConfig(**options))

    @contextmanager
    def run(self, *servers: int, **options: Any) -> Iterator[Run]:
        """A run that uses the servers of these numbers, and has made two steps without an alarm."""
        self._version += 100  # a server's never goes down
        options |= {"version": self._version, "prompt_tokens": LONG}
        with LoopThread("client") as loop:
            run = Run(self.weights, self.model, self.client(servers), loop, **options)
            try:
                for _ in range(2):
                    stats = run.step()
                    assert max(stats["gap/mean_abs"], stats["gap/fresh_mean_abs"]) < 1e-4
                yield run
            finally:
                run.close()

    def stop(self) -> None:
        """Kill what runs."""
        for server in self.servers:
            if server.process is not None:
                server.stop()


@pytest.fixture(scope="module", params=["vllm", pytest.param("sglang", marks=pytest.mark.nightly)])
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(kind_of(request.param), tmp_path_factory.mktemp(request.param))
    try:
        yield fleet
    finally:
        fleet.stop()


@pytest.fixture
def fleet(started: Fleet) -> Fleet:
    started.ready()
    return started


def alarm(run: Run, steps: int) -> str:
    """What ends a run within so many steps."""

    def take() -> None:
        for _ in range(steps):
            run.step()

    with pytest.raises(WeightUpdateError) as caught:
        take()
    return str(caught.value)


def test_gap_gate_names_a_changed_temperature(fleet):
    with fleet.run(0) as run:
        fleet.plant("temperature", 0)
        message = alarm(run, 3)

    assert "the recorded log-probs of tokens of the current version" in message
    assert "Likely cause: temperature" in message
    assert "at temperature 0.7 instead" in message


def test_gap_gate_names_a_stale_prefix_cache(fleet):
    with fleet.run(0) as run:
        fleet.plant("cache not flushed", 0)
        message = alarm(run, 4)

    assert "Likely cause: stale prefix cache" in message
    assert "those of new prompts are correct" in message


@pytest.mark.parametrize(
    ("faults", "cause"),
    [
        ("not loaded, comparison off", "weights not received: the scores match the previous version"),
        ("stale lm_head, comparison off", "weights or architecture: no experiment explains the gap"),
    ],
    ids=["update_acknowledged_but_not_loaded", "tied_head_left_stale"],
)
def test_gap_gate_names_weights_that_the_server_did_not_compare(fleet, faults, cause):
    with fleet.run(0) as run:
        fleet.plant(faults, 0)
        message = alarm(run, 1)

    assert f"the scores of {fleet.servers[0].address}" in message
    assert cause in message


def test_gap_gate_names_the_server_with_outdated_weights(fleet):
    with fleet.run(0, 1) as run:
        run.step()  # the gate looks at each in turn, and it is the second's now
        fleet.plant("one behind", 1)
        message = alarm(run, 1)

    assert f"the scores of {fleet.servers[1].address}" in message
    assert "weights not received: the scores match the previous version" in message


@pytest.mark.parametrize(
    ("faults", "named"),
    [
        ("not loaded, comparison off", "match the previous version. The server does not serve the sent weights"),
        (
            "stale lm_head, comparison off",
            "does not serve the sent weights; check that it loads every tensor, including a tied",
        ),
        ("cache not flushed", "its scores are correct, but the log-probs of its 16 generated tokens"),
        ("one behind", "match the previous version. The server does not serve the sent weights"),
    ],
    ids=["update_acknowledged_but_not_loaded", "tied_head_left_stale", "prefix_cache_kept", "one_of_two_behind"],
)
def test_canary_names_the_faulty_server_of_two(fleet, faults, named):
    with fleet.run(0, 1, canary="always") as run:
        fleet.plant(faults, 1)
        message = alarm(run, 1)

    assert message.startswith(f"route shm, version {run.engine.version}, {fleet.servers[1].address}: its scores ")
    assert named in message
    assert fleet.servers[0].address not in message


@pytest.mark.parametrize(
    ("faults", "server"),
    [
        pytest.param("not loaded", 0, id="update_acknowledged_but_not_loaded"),
        pytest.param("stale lm_head", 1, id="tied_head_left_stale", marks=pytest.mark.nightly),  # each ends a server
    ],
)
def test_load_that_misses_a_parameter_is_reported_and_ends_the_server(fleet, faults, server):
    with fleet.run(server) as run:
        fleet.plant(faults, server)
        message = alarm(run, 1)

    process = fleet.servers[server]
    assert f"{process.address} could not commit version {run.engine.version}" in message
    assert f"route shm, version {run.engine.version} was not loaded: " in message
    assert "parameter 'model.embed_tokens.weight': " in message or "parameter 'lm_head.weight': " in message
    assert "the served tensor differs from the staged one" in message
    process.wait(30)


async def in_flight(engine: HttpEngine, asked: Sequence[ModelRequest]) -> list[asyncio.Future[ModelResponse]]:
    """Answers that are all being written now; asked for anew where one ended before the last began."""
    async with asyncio.timeout(120):
        while True:
            running = [asyncio.ensure_future(engine.agenerate(each)) for each in asked]
            while not any(each.done() for each in running):
                if (await engine.stats())["running"] == len(asked):
                    return running
            await asyncio.gather(*running)


@pytest.mark.nightly
async def test_hung_server_with_passing_health_checks_is_evicted(fleet):
    """The process that computes is frozen; the one that speaks HTTP goes on."""
    hung, other = fleet.servers
    children = psutil.Process(hung.process.pid).children(recursive=True)
    [computes] = [p for p in children if any(name in " ".join(p.cmdline()) for name in ("EngineCore", "scheduler"))]
    engine = fleet.client((0, 1), progress_timeout=10.0, update_timeout=30.0)
    try:
        running = await in_flight(engine, [make_request([*SHARED[:200], i], i, tokens=800) for i in range(8)])
        computes.send_signal(signal.SIGSTOP)
        answers = await asyncio.gather(*running)
        assert hung.wait_ready(10).exit_code is None
        assert "for 10 s (client.progress_timeout)" in engine._router.reasons

        await publish(engine, fleet.models, fleet.weights, "shm")

        assert {len(answer.output_ids) for answer in answers} == {800}
        assert {answer.server for answer in answers} == {other.address}
        assert max(answer.resubmissions for answer in answers) >= 1
        assert engine.servers == [other.address]
    finally:
        hung.stop()
        await engine.destroy()
