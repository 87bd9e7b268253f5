"""Wait for a condition in a test; a test that waits for a time instead fails by chance."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

SECONDS = 60.0
"""Default limit."""


def wait_until(
    condition: Callable[[], object],
    seconds: float = SECONDS,
    what: str | Callable[[], str] = "",
    interval: float = 0.01,
) -> None:
    """Return once the condition holds.

    Args:
        condition: polled until its result is true; what it raises ends the wait.
        seconds: limit; at least ten times what is usual.
        what: what the test waits for, or a function that returns it after the limit, such as the end of a log; default:
            the source of the condition.
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
    return f"not within {seconds:g} s: {text}"
