"""Fault injection in two real servers (`faulty_plugins.py`) with a real trainer.

The server's check after a load, the canary or the log-prob gap gate must name each fault. The tests need the
environments of `infra/servers/build.py`. The servers start once per kind, and again only after a test ended them.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
"""Tokens per prompt, more than two blocks of 128 tokens of vLLM's prefix cache on a CPU."""


@pytest.fixture(autouse=True)
def stop_at_first_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_trainers.weight_sync.gap.alarm.PATIENCE", 1)


class Fleet:
    """Two servers, each with a file that selects its faults, for consecutive runs."""

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
        """Turn off all faults and restart servers that ended."""
        self.inject("", 0, 1)
        ended = [server for server in self.servers if server.process is None or server.exit_code is not None]
        for server in ended:
            server.start()
        for server in ended:
            server.wait_ready()

    def inject(self, faults: str, *servers: int) -> None:
        """Select the faults of these servers."""
        for index in servers:
            self.faults[index].write_text(faults)

    def client(
        self, servers: Sequence[int], update_timeout: float = 300.0, progress_timeout: float = 60.0
    ) -> HttpEngine:
        """Return a client of these servers that does not wait for a rejoin."""
        addresses = [self.servers[index].address for index in servers]
        spec = replace(self.spec, update_timeout=update_timeout)
        return self.kind.client(spec, addresses, ClientConfig(progress_timeout=progress_timeout))

    @contextmanager
    def run(self, *servers: int, **options: Any) -> Iterator[Run]:
        """Start a run with these servers and take two steps without an alarm."""
        self._version += 100  # the version of a server cannot decrease
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
        """Kill the running servers."""
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
    """Take at most `steps` steps and return the message of the error that must end the run."""

    def take() -> None:
        for _ in range(steps):
            run.step()

    with pytest.raises(WeightUpdateError) as caught:
        take()
    return str(caught.value)


def test_gap_gate_names_a_changed_temperature(fleet):
    with fleet.run(0) as run:
        fleet.inject("temperature", 0)
        message = alarm(run, 3)

    assert "the recorded log-probs of tokens of the current version" in message
    assert "Likely cause: temperature" in message
    assert "at temperature 0.7 instead" in message


def test_gap_gate_names_a_stale_prefix_cache(fleet):
    with fleet.run(0) as run:
        fleet.inject("cache not flushed", 0)
        message = alarm(run, 4)

    assert "Likely cause: stale prefix cache" in message
    assert "completions of new prompts are correct" in message


def test_gap_gate_names_a_server_with_a_stale_tied_head(fleet):
    with fleet.run(0) as run:
        fleet.inject("stale lm_head, comparison off", 0)
        message = alarm(run, 1)

    assert f"the scores of {fleet.servers[0].address}" in message
    assert "weights or architecture: no experiment explains the gap" in message


def test_gap_gate_names_the_server_with_outdated_weights(fleet):
    with fleet.run(0, 1) as run:
        run.step()  # the gate checks one server per step, and the second server is next
        fleet.inject("one behind", 1)
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
    ],
    ids=["update_acknowledged_but_not_loaded", "tied_head_left_stale", "prefix_cache_kept"],
)
def test_canary_names_the_faulty_server_of_two(fleet, faults, named):
    with fleet.run(0, 1, canary="always") as run:
        fleet.inject(faults, 1)
        message = alarm(run, 1)

    assert message.startswith(f"route shm, version {run.engine.version}, {fleet.servers[1].address}: its scores ")
    assert named in message
    assert fleet.servers[0].address not in message


@pytest.mark.parametrize(
    ("faults", "server"),
    [
        pytest.param("not loaded", 0, id="update_acknowledged_but_not_loaded"),
        # nightly, because each case ends a server
        pytest.param("stale lm_head", 1, id="tied_head_left_stale", marks=pytest.mark.nightly),
    ],
)
def test_load_that_misses_a_parameter_is_reported_and_ends_the_server(fleet, faults, server):
    with fleet.run(server) as run:
        fleet.inject(faults, server)
        message = alarm(run, 1)

    process = fleet.servers[server]
    assert f"{process.address} could not commit version {run.engine.version}" in message
    assert f"route shm, version {run.engine.version} was not loaded: " in message
    assert "parameter 'model.embed_tokens.weight': " in message or "parameter 'lm_head.weight': " in message
    assert "the served tensor differs from the staged one" in message
    process.wait(30)


async def in_flight(engine: HttpEngine, requests: Sequence[ModelRequest]) -> list[asyncio.Future[ModelResponse]]:
    """Return the completions once all requests run at the same time; retry if one ends too early."""
    async with asyncio.timeout(120):
        while True:
            running = [asyncio.ensure_future(engine.agenerate(request)) for request in requests]
            while not any(task.done() for task in running):
                if (await engine.stats())["running"] == len(requests):
                    return running
            await asyncio.gather(*running)


@pytest.mark.nightly
async def test_hung_server_with_passing_health_checks_is_evicted(fleet):
    """The test freezes the compute process; the HTTP process still responds."""
    hung, other = fleet.servers
    children = psutil.Process(hung.process.pid).children(recursive=True)
    [compute] = [p for p in children if any(name in " ".join(p.cmdline()) for name in ("EngineCore", "scheduler"))]
    engine = fleet.client((0, 1), progress_timeout=10.0, update_timeout=30.0)
    try:
        running = await in_flight(engine, [make_request([*SHARED[:200], i], i, tokens=800) for i in range(8)])
        compute.send_signal(signal.SIGSTOP)
        responses = await asyncio.gather(*running)
        assert hung.wait_ready(10).exit_code is None
        assert "for 10 s (client.progress_timeout)" in engine._router.reasons

        await publish(engine, fleet.models, fleet.weights, "shm")

        assert {len(response.output_ids) for response in responses} == {800}
        assert {response.server for response in responses} == {other.address}
        assert max(response.resubmissions for response in responses) >= 1
        assert engine.servers == [other.address]
    finally:
        hung.stop()
        await engine.destroy()
