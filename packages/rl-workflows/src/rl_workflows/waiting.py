"""A thread that waits for something on an event loop, and notices when the loop itself is stuck."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

from rl_contracts.errors import RLError, StalledError

if TYPE_CHECKING:
    from rl_contracts.aio import LoopThread

BEAT_SECONDS = 1.0
"""How often the loop is asked whether it still turns."""


def wait_while_alive[T](loop: LoopThread, coroutine: Coroutine[Any, Any, T], limit: float) -> T:
    """The coroutine's result, however long it takes, as long as the loop turns.

    Args:
        loop: where it runs.
        coroutine: what to wait for; it has deadlines of its own.
        limit: seconds for which the loop may be blocked.

    Raises:
        StalledError: the loop is blocked: something on it does not await. Names the place.
        RLError: the loop was closed.
    """
    what = getattr(coroutine, "__qualname__", "a coroutine")
    future = loop.submit(coroutine)
    try:
        while True:
            try:
                return future.result(BEAT_SECONDS)
            except TimeoutError:
                if future.done():
                    raise
            _beat(loop, limit)
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
