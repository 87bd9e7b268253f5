"""A thread that waits for something on an event loop, and notices when the loop itself is stuck."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

from rl_contracts.errors import RLError, StalledError

if TYPE_CHECKING:
    from rl_contracts.aio import LoopThread

BEAT_SECONDS = 1.0
"""How often the loop is asked whether it still turns."""


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
            f"{_stack_of(loop.name)}"
        ) from error


def _stack_of(thread_name: str) -> str:
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread.name == thread_name and thread.ident in frames:
            return "".join(traceback.format_stack(frames[thread.ident]))
    return "(no such thread)"
