"""Polling of conditions in tests."""

import pytest

from rl_contracts.testing.waiting import until, wait_until


def test_wait_until_past_limit_prints_condition():
    servers = []

    with pytest.raises(AssertionError, match=r" 0 s: .*len\(servers\) == 2"):
        wait_until(lambda: len(servers) == 2, seconds=0)


def test_wait_until_past_limit_prints_description():
    with pytest.raises(AssertionError, match=" 0 s: two servers"):
        wait_until(lambda: False, seconds=0, what=lambda: "two servers")


async def test_until_coroutine_condition_becomes_true_returns():
    results = iter([False, True])

    async def condition():
        return next(results)

    await until(condition, interval=0)

    assert list(results) == []


async def test_until_past_limit_raises():
    with pytest.raises(AssertionError, match=" 0 s"):
        await until(lambda: False, seconds=0)
