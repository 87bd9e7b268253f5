"""Tests of the router: choice of a server, eviction, waiting for a live server."""

from __future__ import annotations

import asyncio
import random

import pytest

from rl_contracts.errors import InferenceError
from rl_contracts.runtime.clock import SystemClock
from rl_inference.client.router import AFFINITY_SLACK, Router
from rl_inference.client.server_state import ServerState
from rl_inference.client.transport import Server, ServerLostError


class Clock(SystemClock):
    """Clock that only moves when a test sets it."""

    time = 100.0

    def now(self) -> float:
        return self.time


def rejoin(router: Router, server: Server, version: int) -> None:
    """Readmit a server that is not live, as after a successful check."""
    server.move(ServerState.REJOINING)
    router.readmit(server, version)


@pytest.fixture
def router() -> Router:
    return Router([Server(f"http://s{i}", 0) for i in range(3)], Clock(), rejoin_timeout=10.0)


def test_sorted_by_load_least_busy_first_ties_random(router: Router) -> None:
    router.servers[1].open = 2

    first_addresses = {router.sorted_by_load()[0].address for _ in range(60)}

    assert first_addresses == {"http://s0", "http://s2"}
    assert router.sorted_by_load()[-1] is router.servers[1]


def test_choose_independent_clients_use_most_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate 8 clients with 4 groups of 8 requests on 16 servers. Without random ties they would use 4 servers."""
    monkeypatch.setattr("rl_inference.client.router.AFFINITY_SLACK", 4)
    random.seed(0)
    used_addresses = set()
    for client in range(8):
        router = Router([Server(f"http://s{i}", 0) for i in range(16)], Clock())
        for name in range(4):
            group = router.group(f"{client}-{name}")
            for _ in range(8):
                server = router.choose(group)
                assert server is not None
                server.open += 1
                used_addresses.add(server.address)

    assert len(used_addresses) >= 13  # the mean is 14.4


def test_choose_counts_requests_of_other_clients(router: Router) -> None:
    router.servers[0].other_requests, router.servers[1].other_requests = 8, 3

    assert router.choose() is router.servers[2]
    router.servers[2].open = 4
    assert router.choose() is router.servers[1]


def test_named_returns_only_live_servers(router: Router) -> None:
    router.evict(router.servers[1], "is gone")

    assert router.named("http://s2") is router.servers[2]
    with pytest.raises(InferenceError, match=r"s1.*is gone"):
        router.named("http://s1")


def test_choose_group_keeps_its_server_within_slack(router: Router) -> None:
    group = router.group("g")
    first = router.choose(group)
    assert first is not None
    first.open = AFFINITY_SLACK
    assert router.choose(router.group("g")) is first

    first.open = AFFINITY_SLACK + 1
    other = router.choose(group)

    assert other is not first
    assert router.choose(router.group("g")) is other


def test_group_without_references_is_forgotten(router: Router) -> None:
    first, second = router.group("g"), router.group("g")
    chosen = router.choose(first)
    assert chosen is not None
    chosen.open = 1
    del first
    assert router.choose(second) is chosen

    del second

    assert not router._groups
    assert router.choose(router.group("g")) is not chosen


def test_choose_failed_server_is_avoided_during_cooldown(router: Router) -> None:
    failed_server = router.servers[0]
    router.failed(failed_server, "gone")
    assert router.choose() is not failed_server

    for server in router.servers[1:]:
        server.open = 9
    assert router.choose() is not failed_server
    assert isinstance(router.clock, Clock)
    router.clock.time += 1.0

    assert router.choose() is failed_server


def test_choose_busy_server_is_avoided_briefly(router: Router) -> None:
    busy_server, other = router.servers[0], router.servers[1]
    other.open, router.servers[2].open = 40, 41
    assert router.choose() is busy_server

    router.busy(busy_server)

    assert router.choose() is other, "a busy server must not get the next request"
    router.clock.time += 1.0  # type: ignore[attr-defined]
    assert router.choose() is busy_server


def test_choose_all_failed_returns_server_with_earliest_cooldown_end(router: Router) -> None:
    for server in (
        router.servers[1],
        router.servers[0],
        router.servers[0],
        router.servers[2],
        router.servers[2],
    ):
        router.failed(server, "gone")

    assert router.choose() is router.servers[1]


async def test_wait_live_returns_after_readmit_or_timeout(router: Router) -> None:
    clock = router.clock
    assert isinstance(clock, Clock)
    for server in router.servers:
        router.evict(server, "died")
    waiting = [asyncio.create_task(router.wait_live()) for _ in range(3)]
    await asyncio.sleep(0)
    clock.time += 9
    router.end_late_waits()
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)

    rejoin(router, router.servers[1], 7)
    assert await asyncio.gather(*waiting) == [True] * 3

    router.evict(router.servers[1], "died again")
    waiting = [asyncio.create_task(router.wait_live()) for _ in range(3)]
    await asyncio.sleep(0)
    clock.time += 11
    router.end_late_waits()
    assert await asyncio.gather(*waiting) == [False] * 3
    assert not await router.wait_live(), "later calls must not wait again"
    clock.time -= 11
    router.rejoin_timeout = 0.0
    assert not await router.wait_live()


async def test_evict_cancels_requests_and_readmit_resets_failures(router: Router) -> None:
    server = router.servers[0]
    router.failed(server, "slow")
    task = asyncio.create_task(server.run(asyncio.sleep(60)))
    await asyncio.sleep(0)

    router.evict(server, "does not answer")
    with pytest.raises(ServerLostError, match="does not answer"):
        await task
    assert not server.tasks

    rejoin(router, server, 4)
    assert (server.version, server.failures, server.avoid_until, server.is_live) == (4, 0, 0.0, True)
    for other in router.servers[1:]:
        other.open = 1
    assert router.choose() is server
