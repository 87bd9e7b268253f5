"""Which server gets a request."""

from __future__ import annotations

import pytest

from rl_contracts.clock import SystemClock
from rl_inference.routing import Router, Server


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


def test_choose_group_members_follow_the_first_unless_it_is_much_busier(router: Router) -> None:
    with router.member("g"):
        first = router.choose("g")
        assert first is not None
        first.open = 4
        assert router.choose("g") is first

        first.open = 5
        moved = router.choose("g")

        assert moved is not first
        assert router.choose("g") is moved


def test_member_last_one_gone_forgets_the_group(router: Router) -> None:
    with router.member("g"), router.member("g"):
        router.choose("g")
    router.servers[0].open = 1

    with router.member("g"):
        assert router.choose("g") is router.servers[1]
    assert not router._groups


def test_choose_failed_server_is_avoided_then_tried_again(router: Router) -> None:
    bad = router.servers[0]
    router.failed(bad, "gone")
    assert router.choose() is not bad

    for server in router.servers[1:]:
        server.open = 9
    assert router.choose() is not bad
    assert isinstance(router._clock, Clock)
    router._clock.time += 1.0

    assert router.choose() is bad


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
