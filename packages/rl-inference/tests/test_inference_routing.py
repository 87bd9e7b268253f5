"""Which server gets a request."""

from __future__ import annotations

import asyncio
import random

import pytest

from rl_contracts.errors import InferenceError
from rl_contracts.runtime.clock import SystemClock
from rl_inference.client.router import Router
from rl_inference.client.transport import Server, ServerLostError


class Clock(SystemClock):
    """A clock that stands still."""

    time = 100.0

    def now(self) -> float:
        return self.time


@pytest.fixture
def router() -> Router:
    return Router([Server(f"http://s{i}", 0) for i in range(3)], Clock(), slack=4)


def test_choose_without_group_takes_the_least_busy(router: Router) -> None:
    router.servers[0].open, router.servers[1].open, router.servers[2].open = 3, 1, 2

    assert router.choose() is router.servers[1]


def test_by_load_the_least_busy_comes_first_and_ties_are_spread(router: Router) -> None:
    router.servers[1].open = 2

    firsts = {router.sorted_by_load()[0].address for _ in range(60)}

    assert firsts == {"http://s0", "http://s2"}
    assert router.sorted_by_load()[-1] is router.servers[1]


def test_choose_heads_that_know_nothing_of_each_other_use_all_servers() -> None:
    """8 heads with 4 groups of 8 each over 16 servers: with ties to the first, they used four of them."""
    random.seed(0)
    used = set()
    for head in range(8):
        router = Router([Server(f"http://s{i}", 0) for i in range(16)], Clock(), slack=4)
        for name in range(4):
            group = router.group(f"{head}-{name}")
            for _ in range(8):
                server = router.choose(group)
                assert server is not None
                server.open += 1
                used.add(server.address)

    assert len(used) >= 13  # 14.4 on average


def test_choose_looks_at_what_other_clients_ask_of_a_server(router: Router) -> None:
    router.servers[0].others, router.servers[1].others = 8, 3

    assert router.choose() is router.servers[2]
    router.servers[2].open = 4
    assert router.choose() is router.servers[1]


def test_named_finds_live_servers_only(router: Router) -> None:
    router.evict(router.servers[1], "is gone")

    assert router.named("http://s2") is router.servers[2]
    with pytest.raises(InferenceError, match=r"s1.*is gone"):
        router.named("http://s1")


def test_choose_group_members_follow_the_first_unless_it_is_much_busier(router: Router) -> None:
    group = router.group("g")
    first = router.choose(group)
    assert first is not None
    first.open = 4
    assert router.choose(router.group("g")) is first

    first.open = 5
    moved = router.choose(group)

    assert moved is not first
    assert router.choose(router.group("g")) is moved


def test_group_last_member_gone_is_forgotten(router: Router) -> None:
    first, second = router.group("g"), router.group("g")
    chosen = router.choose(first)
    assert chosen is not None
    chosen.open = 1
    del first
    assert router.choose(second) is chosen

    del second

    assert not router._groups
    assert router.choose(router.group("g")) is not chosen


def test_choose_failed_server_is_avoided_then_tried_again(router: Router) -> None:
    bad = router.servers[0]
    router.failed(bad, "gone")
    assert router.choose() is not bad

    for server in router.servers[1:]:
        server.open = 9
    assert router.choose() is not bad
    assert isinstance(router.clock, Clock)
    router.clock.time += 1.0

    assert router.choose() is bad


def test_choose_busy_server_is_left_alone_for_a_moment(router: Router) -> None:
    full, other = router.servers[0], router.servers[1]
    other.open, router.servers[2].open = 40, 41
    assert router.choose() is full

    router.busy(full)

    assert router.choose() is other, "whoever has no room must not be asked again at once"
    router.clock.time += 1.0  # type: ignore[attr-defined]
    assert router.choose() is full


def test_choose_all_failed_takes_the_one_whose_cooldown_ends_first(router: Router) -> None:
    for server in (
        router.servers[1],
        router.servers[0],
        router.servers[0],
        router.servers[2],
        router.servers[2],
    ):
        router.failed(server, "gone")

    assert router.choose() is router.servers[1]


def test_evict_server_is_never_chosen_again(router: Router) -> None:
    for server in router.servers[:2]:
        router.evict(server, "did not acknowledge")
    assert router.choose() is router.servers[2]

    router.evict(router.servers[2], "did not acknowledge")

    assert router.choose() is None


async def test_wait_live_returns_when_a_server_is_back_or_the_time_is_over(router: Router) -> None:
    clock = router.clock
    assert isinstance(clock, Clock)
    for server in router.servers:
        router.evict(server, "died")
    waiting = [asyncio.create_task(router.wait_live(10.0)) for _ in range(3)]
    await asyncio.sleep(0)
    clock.time += 9
    router.give_up_after(10.0)
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)

    router.readmit(router.servers[1], 7)
    assert await asyncio.gather(*waiting) == [True] * 3

    router.evict(router.servers[1], "died again")
    waiting = [asyncio.create_task(router.wait_live(10.0)) for _ in range(3)]
    await asyncio.sleep(0)
    clock.time += 11
    router.give_up_after(10.0)
    assert await asyncio.gather(*waiting) == [False] * 3
    assert not await router.wait_live(10.0), "those who come later need not wait again"
    assert not await router.wait_live(0.0)


async def test_evict_cancels_what_the_server_was_asked_and_readmit_begins_anew(router: Router) -> None:
    server = router.servers[0]
    router.failed(server, "slow")
    asked = asyncio.create_task(server.run(asyncio.sleep(60)))
    await asyncio.sleep(0)

    router.evict(server, "does not answer")
    with pytest.raises(ServerLostError, match="does not answer"):
        await asked
    assert not server.tasks

    router.readmit(server, 4)
    assert (server.version, server.failures, server.avoid_until, server.live) == (4, 0, 0.0, True)
    for other in router.servers[1:]:
        other.open = 1
    assert router.choose() is server


async def test_run_caller_cancelled_is_a_cancellation_and_ends_the_work(router: Router) -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    asked = asyncio.create_task(router.servers[0].run(work()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    asked.cancel()

    with pytest.raises(asyncio.CancelledError):
        await asked
    assert ended.is_set()
