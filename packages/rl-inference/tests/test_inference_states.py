"""States of servers and of weight updates: the tables, and random updates, failures, joins, pauses and sleeps."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from rl_contracts.config import ClientConfig
from rl_contracts.data import STORED_ROUTES, ServeSpec, WeightReceipt, WeightUpdateMeta
from rl_contracts.errors import InferenceError, WeightUpdateError
from rl_contracts.inference import Capabilities
from rl_contracts.testing.clock import SimulatedClock
from rl_inference.client import server_state, weight_loading
from rl_inference.client.protocol import Health
from rl_inference.client.router import Router
from rl_inference.client.server_state import (
    SERVER_TRANSITIONS,
    UPDATE_TRANSITIONS,
    ServerState,
    TransitionError,
    UpdateState,
)
from rl_inference.client.transport import Server, ServerLostError
from rl_inference.client.weight_update import WeightUpdateClient


def documented_transitions() -> dict[str, list[set[str]]]:
    """Return the next states in the tables of the module's docstring; `staged` is a row of both tables."""
    rows = re.findall(r"^ *\| *(\w+) *\|(?: *(?:yes|no) *\|)? *([\w, ]*)\|", str(server_state.__doc__), re.MULTILINE)
    tables: dict[str, list[set[str]]] = {}
    for state, following in rows:
        tables.setdefault(state, []).append({name.strip() for name in following.split(",") if name.strip()})
    return tables


@pytest.mark.parametrize("transitions", [SERVER_TRANSITIONS, UPDATE_TRANSITIONS])
def test_transitions_of_each_state_equal_the_documented_table(transitions: dict[Any, Any]) -> None:
    tables = documented_transitions()
    for state, following in transitions.items():
        assert {str(name) for name in following} in tables[state]


def test_server_move_follows_the_table_or_raises() -> None:
    for current, following in itertools.product(ServerState, repeat=2):
        server = Server("http://a", 0, state=current)
        if current is ServerState.LEAVING or following is current or following in SERVER_TRANSITIONS[current]:
            server.move(following)
            assert server.state is (current if current is ServerState.LEAVING else following)
        else:
            with pytest.raises(TransitionError):
                server.move(following)
            assert server.state is current


@dataclass
class Process:
    """A simulated server: its weights, and whether it generates."""

    version: int | None = 0
    """Version of the weights; None while they are incomplete."""
    staged: int | None = None
    paused_until: float = 0.0
    sleeps: bool = False
    up: bool = True


class SimulatedTransport:
    """Transport to simulated servers, which crash at random, in the middle of any call.

    Pauses end without renewal after the lease, as on real servers.
    """

    def __init__(self, clock: SimulatedClock, generator: random.Random, crashes: float, staged_load: bool) -> None:
        self.clock, self.generator, self.crashes = clock, generator, crashes
        self.config = ClientConfig()
        names = ("health", "pause", "resume", "sleep", "wake", "load", "commit", "receipt")
        operations = {name: lambda *arguments, name=name: (name, *arguments) for name in names}
        capabilities = Capabilities(staged_load=staged_load, checksums=staged_load, sleeps=True, heartbeats=True)
        self.protocol = SimpleNamespace(capabilities=capabilities, **operations)
        self.processes: dict[str, Process] = {}

    def generates(self, server: Server) -> bool:
        """Return whether a server generates tokens now."""
        process = self.processes[server.address]
        return process.up and not process.sleeps and self.clock.now() >= process.paused_until

    async def call_until_evicted(self, server: Server, operation: tuple[Any, ...], _timeout: float = 0.0) -> Any:
        return await server.run(self._call(server, *operation), step=True)

    async def _call(self, server: Server, name: str, *arguments: Any) -> Any:
        process = self.processes[server.address]
        await self.clock.sleep(self.generator.random())
        if process.up and self.generator.random() < self.crashes:
            process.up = False
        if not process.up:
            raise ServerLostError(f"{server.address} does not respond")
        return getattr(self, f"_{name}")(server, process, *arguments)

    def _health(self, server: Server, process: Process) -> Health:
        return Health(-1 if process.version is None else process.version)

    def _pause(self, server: Server, process: Process, mode: str, lease: float) -> None:
        process.paused_until = self.clock.now() + lease

    def _resume(self, server: Server, process: Process) -> float:
        assert not process.sleeps, "a sleeping server must not generate"
        process.paused_until = 0.0
        return 1.0

    def _sleep(self, server: Server, process: Process) -> float:
        assert not self.generates(server)
        process.sleeps = True
        return 1.0

    def _wake(self, server: Server, process: Process) -> None:
        process.sleeps = False

    def _load(self, server: Server, process: Process, meta: WeightUpdateMeta, timeout: float) -> WeightReceipt | None:
        if self.protocol.capabilities.staged_load:
            process.staged = meta.version
            return WeightReceipt(server.address, meta.version, {"w": meta.version})
        assert not self.generates(server), "a server must not load over weights that generate"
        process.version = meta.version
        return None

    def _commit(self, server: Server, process: Process, version: int, mode: str) -> None:
        if self.protocol.capabilities.staged_load:
            if process.staged != version:
                raise InferenceError(f"{server.address}: version {version} is not staged")
            process.version = version

    def _receipt(self, server: Server, process: Process) -> WeightReceipt:
        return WeightReceipt(server.address, process.version or 0, {"w": process.version or 0})


class Simulation:
    """A weight-update client and simulated servers, driven by random events."""

    def __init__(self, seed: int, staged_load: bool, route: str) -> None:
        self.generator, self.clock, self.route = random.Random(seed), SimulatedClock(), route
        servers = [Server(f"http://s{number}", 0) for number in range(self.generator.randint(1, 4))]
        self.router = Router(servers, self.clock, rejoin_timeout=20.0)  # type: ignore[arg-type]
        crashes = self.generator.choice([0.0, 0.02, 0.1, 0.3])
        self.transport = SimulatedTransport(self.clock, self.generator, crashes, staged_load)
        self.transport.processes = {server.address: Process() for server in servers}
        self.updates = WeightUpdateClient(ServeSpec(), self.router, self.transport)  # type: ignore[arg-type]
        self.trained = 0
        self.is_paused = False

    async def run(self, events: int) -> None:
        monitor = asyncio.create_task(self.give_up_regularly())
        names = ("update", "update", "stage", "probe", "probe", "pause", "resume", "sleep", "wake", "crash", "start")
        for _ in range(events):
            name = self.generator.choice([*names, "add", "remove", "wait"])
            together = [getattr(self, name)()]
            if self.generator.random() < 0.3:
                together.append(self.probe())
            results = await asyncio.gather(*together, return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException) and not isinstance(result, InferenceError | WeightUpdateError):
                    raise result
            self.check(name)
        if self.router.live or self.route in STORED_ROUTES:  # otherwise no server can get the committed weights
            await self.recover()
        self.updates.stop_renewal()
        monitor.cancel()

    async def recover(self) -> None:
        """Restart the lost servers, and assert that after two updates all servers generate."""
        self.transport.crashes = 0.0
        for server in self.router.servers:
            process = self.transport.processes[server.address]
            if not process.up:
                self.transport.processes[server.address] = Process()
                self.router.evict(server, "was restarted")
        for end in (self.wake, self.resume, lambda: self.updates.commit(self.trained, "keep")):
            with contextlib.suppress(WeightUpdateError):  # raised if no server is live
                await end()
        for _ in range(2):
            await self.probe()
            await self.update()
        await self.probe()
        assert self.router.live == self.router.servers
        assert all(self.transport.generates(server) for server in self.router.servers)
        self.check("recover")

    async def give_up_regularly(self) -> None:
        """End waits for a server after the rejoin timeout, as the server monitor does."""
        while True:
            await self.clock.sleep(1.0)
            self.router.end_late_waits()

    async def stage(self) -> None:
        self.trained += 1
        await self.updates.stage(WeightUpdateMeta(self.route, self.trained))

    async def update(self) -> None:
        await self.stage()
        await self.updates.commit(self.trained, self.generator.choice(["keep", "recompute", "wait"]))

    async def probe(self) -> None:
        """Probe the servers that are not live, as the server monitor does."""
        for server in [server for server in self.router.servers if not server.is_live]:
            if not self.transport.processes[server.address].up:
                if server.state is ServerState.REJOINING:
                    server.move(ServerState.EVICTED, server.reason)
            else:
                if server.state is ServerState.EVICTED:
                    server.move(ServerState.REJOINING, server.reason)
                with contextlib.suppress(InferenceError, WeightUpdateError):
                    await self.updates.rejoin(server)

    async def pause(self) -> None:
        self.is_paused = True
        await self.updates.pause()

    async def resume(self) -> None:
        self.is_paused = False
        await self.updates.resume()

    async def sleep(self) -> None:
        await self.updates.sleep()

    async def wake(self) -> None:
        await self.updates.wake()

    async def wait(self) -> None:
        """Wait for longer than the lease of a pause."""
        await self.clock.sleep(2 * self.updates._all_servers.lease)

    async def crash(self) -> None:
        self.transport.processes[self.generator.choice(self.router.servers).address].up = False

    async def start(self) -> None:
        """Restart a lost server with the initial weights."""
        lost = [server for server in self.router.servers if not server.is_live]
        if lost:
            self.transport.processes[self.generator.choice(lost).address] = Process()

    async def add(self) -> None:
        address = f"http://s{len(self.transport.processes)}"
        self.transport.processes[address] = Process()
        self.router.add(address, "", served_before=False)

    async def remove(self) -> None:
        if len(self.router.servers) > 1:
            self.router.remove(self.generator.choice(self.router.servers), "was removed")

    def check(self, event: str) -> None:
        """Assert that servers which generate serve the committed version, and that states tell what servers do."""
        processes = self.transport.processes
        generating = [server for server in self.router.live if self.transport.generates(server)]
        if generating and self.updates.state in (UpdateState.IDLE, UpdateState.STAGED):
            served = {processes[server.address].version for server in self.router.live if processes[server.address].up}
            assert served == {self.router.version}, event
        if self.is_paused or self.updates.state is UpdateState.SLEEPING:
            assert not generating, event
        for server in generating:
            assert server.state in (ServerState.SERVING, ServerState.STAGED), event
        assert self.updates.state is not UpdateState.COMMITTING, event


async def simulate(seed: int, staged_load: bool, route: str) -> None:
    await Simulation(seed, staged_load, route).run(60)


@pytest.mark.guarantee("When a server generates, all live servers serve the same committed version.", area="weights")
@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 50), marks=pytest.mark.slow)], ids=["few", "many"])
@pytest.mark.parametrize(("staged_load", "route"), [(True, "shm"), (True, "broadcast"), (False, "disk")])
def test_generating_servers_serve_the_committed_version(
    staged_load: bool, route: str, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_loading, "model_directory", lambda meta, path: meta)
    for seed in seeds:
        try:
            asyncio.run(simulate(seed, staged_load, route))  # a simulated clock needs its own event loop
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
