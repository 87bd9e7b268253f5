"""An asyncio loop in a thread, for code that is not asynchronous. What dies in it is seen by whoever waits for it."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, suppress
from contextvars import copy_context
from types import TracebackType
from typing import Any

from rl_contracts.errors import RLError, StalledError
from rl_contracts.runtime.logging import get_logger

__all__ = ["LoopThread"]

logger = get_logger("aio")


BEAT_SECONDS = 1.0
"""How often a loop is asked whether it still turns, where a caller wants to know."""


def run_in_thread[T](work: Callable[[], T]) -> Future[T]:
    """Run `work` in a daemon thread of its own, in the caller's context; it holds nothing up when the process ends."""
    done: Future[T] = Future()
    context = copy_context()

    def run() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(context.run(work))
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            done.set_exception(error)

    threading.Thread(target=run, name="in_thread", daemon=True).start()
    return done


class LoopThread(AbstractContextManager["LoopThread"]):
    """One event loop (uvloop where it is installed) in a daemon thread of its own.

    Usable as a context manager, which closes it.

    Args:
        name: name of the thread, shown in errors.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._loop = _new_event_loop()
        self._lock = threading.Lock()
        self._closing = False
        self._death: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def submit[T](self, coro: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine in the loop, from any thread. Its error or result is in the future.

        Raises:
            RLError: the loop is closed or has died.
        """
        with self._lock:
            if not self._closing:
                return asyncio.run_coroutine_threadsafe(coro, self._loop)
        coro.close()
        raise self._closed_error() from self._death

    def run[T](self, coro: Coroutine[Any, Any, T], timeout: float | None = None, blocked: float | None = None) -> T:
        """Run a coroutine in the loop and wait for its result; its error is raised here with its traceback.

        Args:
            coro: what to run.
            timeout: seconds after which it is cancelled; None where it has deadlines of its own.
            blocked: seconds for which the loop may be blocked meanwhile; None: nobody asks.

        Raises:
            StalledError: it did not finish in time; or something on the loop does not await, and the place is named.
            RLError: called from the loop's own thread, which could only deadlock; or the loop is closed or died.
        """
        if threading.current_thread() is self._thread:
            coro.close()
            raise RLError(
                f"loop {self.name!r}: run({_name_of(coro)}) was called from the loop's own thread; await it instead"
            )
        return self.wait(self.submit(coro), _name_of(coro), timeout, blocked)

    def wait[T](self, future: Future[T], what: str, timeout: float | None = None, blocked: float | None = None) -> T:
        """Wait for what was submitted, as `run` does.

        Args:
            future: of `submit`; cancelled where it is not waited for to its end.
            what: its name in errors.
            timeout, blocked: see `run`.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while True:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise StalledError(f"loop {self.name!r}: {what} did not finish within {timeout:g} s")
                try:
                    return future.result(left if blocked is None else min(left or BEAT_SECONDS, BEAT_SECONDS))
                except TimeoutError:
                    if future.done():
                        raise  # the coroutine's own, not ours
                if blocked is not None:
                    self._beat(blocked)
        except CancelledError as error:
            if self._closing:
                raise self._closed_error() from self._death or error
            raise
        finally:
            future.cancel()

    def _beat(self, seconds: float) -> None:
        beat = self.submit(asyncio.sleep(0))
        try:
            beat.result(seconds)
        except TimeoutError as error:
            raise StalledError(
                f"the event loop {self.name!r} is blocked for more than {seconds:g} s: something on it computes or "
                f"waits without await, such as a plain reward function (wrap it in AsyncRewardWrapper). It is here:\n"
                f"{stack_of_thread(self.name)}"
            ) from error

    def close(self, timeout: float = 10.0) -> None:
        """Cancel what is left, let it clean up, end the thread. A second call does nothing.

        Args:
            timeout: seconds that the tasks have to end.

        Raises:
            StalledError: some task ignores its cancellation; the message names it.
            RLError: called from the loop's own thread.
        """
        if threading.current_thread() is self._thread:
            raise RLError(f"loop {self.name!r}: close was called from the loop's own thread")
        with self._lock:
            if not self._closing:
                self._closing = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout)
        if self._thread.is_alive():
            left = ", ".join(
                sorted(f"{task.get_name()} ({_name_of(task.get_coro())})" for task in asyncio.all_tasks(self._loop))
            )
            raise StalledError(f"loop {self.name!r}: still not ended {timeout:g} s after it was closed: {left}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        except BaseException as error:
            # SystemExit and KeyboardInterrupt of a task leave the loop; in a thread nobody else would see them.
            self._death = error
            logger.exception("loop %r died", self.name)
        finally:
            with self._lock:
                self._closing = True
            self._drain()

    def _drain(self) -> None:
        """Cancel all tasks, also those that others start while they clean up, then close the loop."""
        loop = self._loop
        try:
            while True:
                # SystemExit and KeyboardInterrupt of one more task leave the loop again, while the others still must
                # end; what was left of the round before may cancel this one
                with suppress(SystemExit, KeyboardInterrupt, asyncio.CancelledError):
                    loop.run_until_complete(_end_all_tasks())
                    break
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            loop.close()

    def _closed_error(self) -> RLError:
        how = "is closed" if self._death is None else f"died of {self._death!r}"
        return RLError(f"loop {self.name!r} {how}")


def stack_of_thread(name: str) -> str:
    """Where the thread of that name is."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread.name == name and thread.ident in frames:
            return "".join(traceback.format_stack(frames[thread.ident]))
    return "(no such thread)"


async def _end_all_tasks() -> None:
    """Cancel all other tasks of the loop, those too that begin meanwhile, and wait for them."""
    await asyncio.sleep(0)  # tasks submitted last now exist
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _name_of(coro: Any) -> str:
    return getattr(coro, "__qualname__", repr(coro))


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
