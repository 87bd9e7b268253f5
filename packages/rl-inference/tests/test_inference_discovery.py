"""Tests of service discovery: the servers of a client after readings of a source."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_contracts.runtime.clock import SystemClock
from rl_inference.client.discovery import Discovery
from rl_inference.client.router import Router
from rl_inference.client.server_state import ServerState
from rl_inference.client.transport import Server, ServerLostError

NAMES = [f"rollout/{number}" for number in range(4)]
ADDRESSES = [f"http://s{number}" for number in range(6)]
FIRST = dict(zip(NAMES[:2], ADDRESSES[:2], strict=True))


def rejoin(router: Router, server: Server, version: int) -> None:
    """Readmit a server that is not live, as after a successful check."""
    server.move(ServerState.REJOINING)
    router.readmit(server, version)


def create_discovery(source: Callable[[], dict[str, str]] = dict) -> tuple[Router, Discovery]:
    """Return a router with two live servers, and the discovery of its source."""
    router = Router([Server(address, 0) for address in FIRST.values()], SystemClock())
    return router, Discovery(source, router, probe_interval=0.02)


def addresses(router: Router) -> list[str]:
    return [server.address for server in router.servers]


def test_apply_new_server_is_added_but_evicted_until_readmitted() -> None:
    router, discovery = create_discovery()

    assert discovery.apply(FIRST | {NAMES[2]: ADDRESSES[2]})

    new = router.servers[-1]
    assert (new.address, new.name, new.state) == (ADDRESSES[2], NAMES[2], ServerState.STARTING)
    assert {router.choose().address for _ in range(20)} == set(FIRST.values())  # type: ignore[union-attr]
    rejoin(router, new, 3)
    assert len(router.live) == 3
    assert router.rejoins == 0, "a first join is not a rejoin"
    assert not discovery.apply(FIRST | {NAMES[2]: ADDRESSES[2]})


def test_apply_server_missing_twice_in_a_row_is_removed() -> None:
    router, discovery = create_discovery()
    second = {NAMES[1]: ADDRESSES[1]}
    for reading in (FIRST, second, FIRST, second):  # a name that is missing in every other reading
        discovery.apply(reading)
    assert addresses(router) == list(FIRST.values())
    removed = router.servers[0]

    discovery.apply(second)

    assert addresses(router) == [ADDRESSES[1]]
    assert (removed.is_live, removed.failures) == (False, 0)
    rejoin(router, removed, 1)  # a rejoin that was in progress has no effect
    assert not removed.is_live


def test_apply_moved_server_replaces_old_address_and_counts_as_rejoin() -> None:
    router, discovery = create_discovery()
    discovery.apply(FIRST)

    discovery.apply(FIRST | {NAMES[0]: ADDRESSES[4]})

    assert addresses(router) == [ADDRESSES[1], ADDRESSES[4]]
    rejoin(router, router.servers[-1], 1)
    assert router.rejoins == 1


def test_apply_servers_that_swap_addresses_are_kept() -> None:
    router, discovery = create_discovery()
    before = list(router.servers)

    discovery.apply({NAMES[0]: ADDRESSES[1], NAMES[1]: ADDRESSES[0]})

    assert router.servers == before
    assert [server.name for server in before] == [NAMES[1], NAMES[0]]


READINGS = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(ADDRESSES), max_size=4)


@given(st.lists(st.tuples(READINGS, st.sets(st.sampled_from(ADDRESSES)), st.booleans()), max_size=12), READINGS)
def test_apply_random_readings_keep_live_server_and_follow_source(
    steps: list[tuple[dict[str, str], set[str], bool]], last: dict[str, str]
) -> None:
    """Apply random readings. After each, servers may join, except those at the unhealthy addresses."""
    router, discovery = create_discovery()
    for reading, unhealthy, may_join in steps:
        before = {server.address: server.name for server in router.live}
        discovery.apply(reading)
        current = addresses(router)
        assert len(current) == len(set(current))
        assert set(reading.values()) <= set(current)
        moved = {address for address, name in before.items() if name in reading and address not in reading.values()}
        if set(before) - moved:
            assert router.live, "not all live servers moved, so one must stay live"
        if not reading:
            assert {server.address for server in router.live} == set(before)
        for server in router.servers if may_join else ():
            if not server.is_live and server.address not in unhealthy:
                rejoin(router, server, 0)
    for _ in range(3):
        for server in router.servers:
            if not server.is_live:
                rejoin(router, server, 0)
        discovery.apply(last)

    if last:
        assert set(addresses(router)) == set(last.values())


@pytest.mark.slow
async def test_remove_cancels_requests_now_and_update_steps_later() -> None:
    router, _ = create_discovery()
    server = router.servers[0]
    request = asyncio.create_task(server.run(asyncio.sleep(60)))
    step = asyncio.create_task(server.run(asyncio.sleep(0.05, "staged"), step=True))
    hanging_step = asyncio.create_task(server.run(asyncio.sleep(60), step=True))
    await asyncio.sleep(0)

    router.remove(server, "was removed", patience=2.0)

    with pytest.raises(ServerLostError, match="was removed"):
        await request
    assert await step == "staged"
    with pytest.raises(ServerLostError, match="was removed"):
        await asyncio.wait_for(hanging_step, 10)


def test_update_counters_sums_never_decrease_or_count_twice() -> None:
    router, discovery = create_discovery()
    first, second = router.servers
    router.update_counters(first, {"tokens": 10.0})
    router.update_counters(second, {"tokens": 5.0})
    router.update_counters(second, {"tokens": 2.0})  # after a restart
    assert router.sums["tokens"] == 17
    discovery.apply({NAMES[1]: ADDRESSES[1], NAMES[2]: ADDRESSES[2]})
    new = router.servers[-1]
    router.update_counters(new, {"tokens": 1000.0})  # generated before this client knew the server
    router.update_counters(new, {"tokens": 1003.0})
    for _ in range(2):
        discovery.apply({NAMES[1]: ADDRESSES[1]})

    assert router.sums["tokens"] == 20


async def test_watch_faulty_source_changes_nothing_and_warns_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, hang = FIRST | {NAMES[2]: ADDRESSES[2]}, threading.Event()
    readings = [listed, OSError("stale file handle"), OSError("stale file handle"), {NAMES[0]: "s0:80"}, {}, None]
    read = 0

    def source() -> dict[str, str]:
        nonlocal read
        reading = readings[min(read, len(readings) - 1)]
        read += 1
        if isinstance(reading, OSError):
            raise reading
        if reading is None:
            hang.wait(60)
        return reading or {}

    monkeypatch.setattr("rl_inference.client.discovery._READ_SECONDS", 0.05)
    router, discovery = create_discovery(source)
    added = asyncio.Event()
    watching = asyncio.create_task(discovery.watch(added.set))
    try:
        async with asyncio.timeout(30):
            await added.wait()
            while "no result within" not in caplog.text:  # noqa: ASYNC110 - the log has no event
                await asyncio.sleep(0.01)
        assert addresses(router) == list(listed.values())
    finally:
        hang.set()
        watching.cancel()

    assert caplog.text.count("OSError: stale file handle") == 1
    assert caplog.text.count("expected http://host:port, found 's0:80'") == 1
    assert caplog.text.count("the list is empty") == 1
