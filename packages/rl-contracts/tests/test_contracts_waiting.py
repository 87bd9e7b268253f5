"""Waiting for conditions in tests."""

import pytest

from rl_contracts.testing.waiting import until, wait_until


def test_wait_until_condition_that_comes_true_returns():
    answers = iter([False, False, True])

    wait_until(lambda: next(answers), interval=0)

    assert list(answers) == []


def test_wait_until_over_the_limit_prints_the_condition():
    servers = []

    with pytest.raises(AssertionError, match=r"not within 0 s: .*len\(servers\) == 2"):
        wait_until(lambda: len(servers) == 2, seconds=0)


def test_wait_until_over_the_limit_prints_what_it_waited_for():
    with pytest.raises(AssertionError, match="not within 0 s: two servers"):
        wait_until(lambda: False, seconds=0, what=lambda: "two servers")


async def test_until_coroutine_function_that_comes_true_returns():
    answers = iter([False, True])

    async def condition():
        return next(answers)

    await until(condition, interval=0)

    assert list(answers) == []


async def test_until_over_the_limit_raises():
    with pytest.raises(AssertionError, match="not within 0 s"):
        await until(lambda: False, seconds=0)
