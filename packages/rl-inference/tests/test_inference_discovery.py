"""Which servers a client has, after any readings of a source."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_contracts.config import ClientConfig
from rl_contracts.runtime.clock import SystemClock
from rl_inference.client.discovery import Discovery
from rl_inference.client.router import Router
from rl_inference.client.transport import Server, ServerLostError

NAMES = [f"rollout/{number}" for number in range(4)]
ADDRESSES = [f"http://s{number}" for number in range(6)]
FIRST = dict(zip(NAMES[:2], ADDRESSES[:2], strict=True))


def following(source: Callable[[], dict[str, str]] = dict) -> tuple[Router, Discovery]:
    """Two servers that take part, and what follows a source."""
    router = Router([Server(address, 0) for address in FIRST.values()], SystemClock(), slack=4)
    return router, Discovery(source, router, ClientConfig(discover_interval=0.01, probe_timeout=0.05))


def addresses(router: Router) -> list[str]:
    return [server.address for server in router.servers]


def test_take_new_name_is_added_and_out_until_it_is_readmitted() -> None:
    router, discovery = following()

    assert discovery.apply(FIRST | {NAMES[2]: ADDRESSES[2]})

    new = router.servers[-1]
    assert (new.address, new.name, new.live, new.well, new.vetted) == (ADDRESSES[2], NAMES[2], False, False, False)
    assert {router.choose().address for _ in range(20)} == set(FIRST.values())  # type: ignore[union-attr]
    router.readmit(new, 3)
    assert len(router.live) == 3
    assert router.rejoins == 0, "it was never lost"
    assert not discovery.apply(FIRST | {NAMES[2]: ADDRESSES[2]})


def test_take_name_that_is_gone_twice_in_a_row_is_let_go_and_forgotten() -> None:
    router, discovery = following()
    second = {NAMES[1]: ADDRESSES[1]}
    for found in (FIRST, second, FIRST, second):  # a flapping name
        discovery.apply(found)
    assert addresses(router) == list(FIRST.values())
    gone = router.servers[0]

    discovery.apply(second)

    assert addresses(router) == [ADDRESSES[1]]
    assert (gone.live, gone.failures) == (False, 0)
    router.readmit(gone, 1)  # whoever was about to
    assert not gone.live


def test_take_name_with_another_address_forgets_the_old_one_at_once_and_counts_as_a_rejoin() -> None:
    router, discovery = following()
    discovery.apply(FIRST)

    discovery.apply(FIRST | {NAMES[0]: ADDRESSES[4]})

    assert addresses(router) == [ADDRESSES[1], ADDRESSES[4]]
    router.readmit(router.servers[-1], 1)
    assert router.rejoins == 1


def test_take_servers_that_exchange_their_addresses_stay() -> None:
    router, discovery = following()
    before = list(router.servers)

    discovery.apply({NAMES[0]: ADDRESSES[1], NAMES[1]: ADDRESSES[0]})

    assert router.servers == before
    assert [server.name for server in before] == [NAMES[1], NAMES[0]]


def test_take_last_live_server_stays_until_another_takes_part() -> None:
    router, discovery = following()
    router.evict(router.servers[1], "is gone")
    found = {NAMES[2]: ADDRESSES[2]}
    for _ in range(5):
        discovery.apply(found)

    assert addresses(router) == [ADDRESSES[0], ADDRESSES[2]], "the lost one is forgotten, the last one is not"
    router.readmit(router.servers[1], 0)
    discovery.apply(found)
    assert addresses(router) == [ADDRESSES[2]]


READINGS = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(ADDRESSES), max_size=4)


@given(st.lists(st.tuples(READINGS, st.sets(st.sampled_from(ADDRESSES)), st.booleans()), max_size=12), READINGS)
def test_take_any_readings_keep_a_live_server_and_end_at_what_is_named(
    steps: list[tuple[dict[str, str], set[str], bool]], last: dict[str, str]
) -> None:
    """Servers join at any moment, unless they are among the ill; the source says what it likes."""
    router, discovery = following()
    for found, ill, joins in steps:
        before = {server.address: server.name for server in router.live}
        discovery.apply(found)
        known = addresses(router)
        assert len(known) == len(set(known))
        assert set(found.values()) <= set(known)
        moved = {address for address, name in before.items() if name in found and address not in found.values()}
        if set(before) - moved:
            assert router.live, "only servers that are elsewhere now may leave nobody"
        if not found:
            assert {server.address for server in router.live} == set(before)
        for server in router.servers if joins else ():
            if not server.live and server.address not in ill:
                router.readmit(server, 0)
    for _ in range(3):
        for server in router.servers:
            if not server.live:
                router.readmit(server, 0)
        discovery.apply(last)

    if last:
        assert set(addresses(router)) == set(last.values())


@pytest.mark.slow
async def test_remove_answers_end_at_once_and_steps_of_an_update_get_a_moment() -> None:
    router, _ = following()
    server = router.servers[0]
    answer = asyncio.create_task(server.run(asyncio.sleep(60)))
    step = asyncio.create_task(server.run(asyncio.sleep(0.05, "staged"), step=True))
    hangs = asyncio.create_task(server.run(asyncio.sleep(60), step=True))
    await asyncio.sleep(0)

    router.remove(server, "was let go", patience=2.0)

    with pytest.raises(ServerLostError, match="was let go"):
        await answer
    assert await step == "staged"
    with pytest.raises(ServerLostError, match="was let go"):
        await asyncio.wait_for(hangs, 10)


def test_add_up_figures_never_go_down_and_count_nothing_twice() -> None:
    router, discovery = following()
    first, second = router.servers
    router.update_counters(first, {"tokens": 10.0})
    router.update_counters(second, {"tokens": 5.0})
    router.update_counters(second, {"tokens": 2.0})  # it was started anew
    assert router.sums["tokens"] == 17
    discovery.apply({NAMES[1]: ADDRESSES[1], NAMES[2]: ADDRESSES[2]})
    new = router.servers[-1]
    router.update_counters(new, {"tokens": 1000.0})  # made for whoever had it before
    router.update_counters(new, {"tokens": 1003.0})
    for _ in range(2):
        discovery.apply({NAMES[1]: ADDRESSES[1]})

    assert router.sums["tokens"] == 20


async def test_watch_source_that_raises_or_is_empty_or_hangs_changes_nothing_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told, hang = FIRST | {NAMES[2]: ADDRESSES[2]}, threading.Event()
    readings = [told, OSError("stale file handle"), OSError("stale file handle"), {NAMES[0]: "s0:80"}, {}, None]
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

    router, discovery = following(source)
    added = asyncio.Event()
    watching = asyncio.create_task(discovery.watch(added.set))
    try:
        async with asyncio.timeout(30):
            await added.wait()
            while "client.probe_timeout" not in caplog.text:  # noqa: ASYNC110 - a thread
                await asyncio.sleep(0.01)
        assert addresses(router) == list(told.values())
    finally:
        hang.set()
        watching.cancel()

    assert caplog.text.count("OSError: stale file handle") == 1
    assert caplog.text.count("expected http://host:port, found 's0:80'") == 1
    assert caplog.text.count("the list is empty") == 1
