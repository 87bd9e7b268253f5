"""Waiting for a condition in tests. A test that sleeps for a fixed time instead is flaky."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

SECONDS = 60.0
"""Default limit in seconds."""


def wait_until(
    condition: Callable[[], object],
    seconds: float = SECONDS,
    what: str | Callable[[], str] = "",
    interval: float = 0.01,
) -> None:
    """Return once the condition holds.

    Args:
        condition: function to poll until its result is true. Its exceptions end the wait.
        seconds: limit; choose at least ten times the usual duration.
        what: description of the condition for the error message, or a function that returns it (such as the end of a
            log) after the limit. The default is the source code of the condition.
        interval: seconds between two polls.

    Raises:
        AssertionError: the condition did not hold within the limit.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, _message(condition, seconds, what)
        time.sleep(interval)


async def until(
    condition: Callable[[], object | Awaitable[object]],
    seconds: float = SECONDS,
    what: str | Callable[[], str] = "",
    interval: float = 0.01,
) -> None:
    """Return once the condition holds, as `wait_until` does; the condition may be a coroutine function."""
    deadline = time.monotonic() + seconds
    while True:
        result = condition()
        if await result if inspect.isawaitable(result) else result:
            return
        assert time.monotonic() < deadline, _message(condition, seconds, what)
        await asyncio.sleep(interval)


def _message(condition: Callable[[], object], seconds: float, what: str | Callable[[], str]) -> str:
    text = what() if callable(what) else what
    if not text:
        try:
            text = inspect.getsource(condition).strip()
        except (OSError, TypeError):
            text = repr(condition)
    return f"condition was not true within {seconds:g} s: {text}"
