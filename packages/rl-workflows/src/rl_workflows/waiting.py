"""Waits with a deadline: of a thread for something on an event loop, and of a coroutine on the runtime's clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

from rl_contracts.errors import RLError, StalledError
from rl_workflows.stacks import stack_of_thread

if TYPE_CHECKING:
    from rl_contracts.aio import LoopThread
    from rl_contracts.clock import Clock

BEAT_SECONDS = 1.0
"""How often the loop is asked whether it still turns."""


async def within[T](clock: Clock, seconds: float, coroutine: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result, if it has one before `seconds` of the clock have passed.

    Raises:
        TimeoutError: it has none; it is cancelled.
    """
    task = asyncio.ensure_future(coroutine)
    timer = asyncio.ensure_future(clock.sleep(seconds))
    try:
        await asyncio.wait((task, timer), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise TimeoutError
    finally:
        for running in (task, timer):
            running.cancel()


def wait_while_alive[T](
    loop: LoopThread, coroutine: Coroutine[Any, Any, T], limit: float, timeout: float | None = None
) -> T:
    """The coroutine's result, as long as the loop turns.

    Args:
        loop: where it runs.
        coroutine: what to wait for.
        limit: seconds for which the loop may be blocked.
        timeout: seconds for all of it; None where the coroutine has deadlines of its own.

    Raises:
        StalledError: the loop is blocked: something on it does not await. Names the place. Or the time is over.
        RLError: the loop was closed.
    """
    what = getattr(coroutine, "__qualname__", "a coroutine")
    future = loop.submit(coroutine)
    deadline = None if timeout is None else time.monotonic() + timeout
    try:
        while True:
            try:
                return future.result(BEAT_SECONDS)
            except TimeoutError:
                if future.done():
                    raise
            _beat(loop, limit)
            if deadline is not None and time.monotonic() > deadline:
                raise StalledError(f"loop {loop.name!r}: {what} did not finish within {timeout:g} s")
    except CancelledError as error:
        if loop.death is not None:
            raise RLError(f"loop {loop.name!r} died of {loop.death!r} while {what} was awaited") from loop.death
        raise RLError(f"loop {loop.name!r} was closed while {what} was awaited") from error
    finally:
        future.cancel()


def _beat(loop: LoopThread, limit: float) -> None:
    try:
        loop.run(asyncio.sleep(0), limit)
    except StalledError as error:
        raise StalledError(
            f"the event loop {loop.name!r} is blocked for more than {limit:g} s: something on it computes or waits "
            f"without await, for example a plain reward function (wrap it in AsyncRewardWrapper). It is here:\n"
            f"{stack_of_thread(loop.name)}"
        ) from error
