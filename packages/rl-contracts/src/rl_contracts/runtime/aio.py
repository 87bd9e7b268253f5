"""An asyncio loop in a thread, for code that is not asynchronous. Callers that wait for the loop see its errors."""

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
"""Seconds between two checks whether a loop still runs, for callers that set `blocked`."""


def run_in_thread[T](work: Callable[[], T]) -> Future[T]:
    """Run `work` in a new daemon thread, in the caller's context. The thread does not delay the end of the process."""
    future: Future[T] = Future()
    context = copy_context()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(context.run(work))
        except BaseException as error:  # noqa: BLE001 - passed to the caller
            future.set_exception(error)

    threading.Thread(target=run, name="in_thread", daemon=True).start()
    return future


class LoopThread(AbstractContextManager["LoopThread"]):
    """One event loop (uvloop if it is installed) in its own daemon thread. A `with` statement closes it.

    Args:
        name: name of the thread, shown in errors.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._loop = _new_event_loop()
        self._lock = threading.Lock()
        self._is_closed = False
        self._death: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def submit[T](self, coro: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine in the loop, from any thread. The future holds its result or error.

        Raises:
            RLError: the loop is closed or has died.
        """
        with self._lock:
            if not self._is_closed:
                return asyncio.run_coroutine_threadsafe(coro, self._loop)
        coro.close()
        raise self._closed_error() from self._death

    def run[T](self, coro: Coroutine[Any, Any, T], timeout: float | None = None, blocked: float | None = None) -> T:
        """Run a coroutine in the loop and return its result. An error of the coroutine keeps its traceback.

        Args:
            coro: coroutine to run.
            timeout: seconds after which the coroutine is cancelled; None if it has its own deadlines.
            blocked: seconds for which the loop may be blocked while this waits; None disables the check.

        Raises:
            StalledError: the coroutine did not finish in time, or the loop is blocked. If the loop is blocked, the
                message shows the stack of its thread.
            RLError: called from the loop's own thread, which would deadlock; or the loop is closed or has died.
        """
        if threading.current_thread() is self._thread:
            coro.close()
            raise RLError(
                f"loop {self.name!r}: run({_name_of(coro)}) was called from the loop's own thread; await it instead"
            )
        return self.wait(self.submit(coro), _name_of(coro), timeout, blocked)

    def wait[T](self, future: Future[T], what: str, timeout: float | None = None, blocked: float | None = None) -> T:
        """Return the result of a submitted coroutine, as `run` does.

        Args:
            future: future that `submit` returned. If it is not done when this call ends, it is cancelled.
            what: name of the coroutine in errors.
            timeout, blocked: see `run`.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while True:
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    raise StalledError(f"loop {self.name!r}: {what} did not finish within {timeout:g} s")
                try:
                    return future.result(remaining if blocked is None else min(remaining or BEAT_SECONDS, BEAT_SECONDS))
                except TimeoutError:
                    if future.done():
                        raise  # the coroutine raised it
                if blocked is not None:
                    self._check_responsive(blocked)
        except CancelledError as error:
            if self._is_closed:
                raise self._closed_error() from self._death or error
            raise
        finally:
            future.cancel()

    def _check_responsive(self, seconds: float) -> None:
        """Raise StalledError if the loop does not run a trivial coroutine within `seconds`."""
        probe = self.submit(asyncio.sleep(0))
        try:
            probe.result(seconds)
        except TimeoutError as error:
            raise StalledError(
                f"the event loop {self.name!r} has been blocked for more than {seconds:g} s: a coroutine computes or "
                f"waits without await, for example in a plain reward function (wrap it in AsyncRewardWrapper). Stack "
                f"of the loop's thread:\n"
                f"{stack_of_thread(self.name)}"
            ) from error

    def close(self, timeout: float = 10.0) -> None:
        """Cancel the remaining tasks, wait for their cleanup and end the thread. A second call does nothing.

        Args:
            timeout: seconds to wait for the tasks to end.

        Raises:
            StalledError: a task ignores its cancellation; the message names it.
            RLError: called from the loop's own thread.
        """
        if threading.current_thread() is self._thread:
            raise RLError(
                f"loop {self.name!r}: close() was called from the loop's own thread; call it from another one"
            )
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout)
        if self._thread.is_alive():
            remaining = ", ".join(
                sorted(f"{task.get_name()} ({_name_of(task.get_coro())})" for task in asyncio.all_tasks(self._loop))
            )
            raise StalledError(
                f"loop {self.name!r}: tasks still run {timeout:g} s after close(); they must not ignore "
                f"CancelledError: {remaining}"
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        except BaseException as error:
            # SystemExit and KeyboardInterrupt of a task end run_forever(); in a thread they would go unnoticed.
            self._death = error
            logger.exception("loop %r died", self.name)
        finally:
            with self._lock:
                self._is_closed = True
            self._drain()

    def _drain(self) -> None:
        """Cancel all tasks, including those started during cleanup, then close the loop."""
        loop = self._loop
        try:
            while True:
                # SystemExit or KeyboardInterrupt of another task ends run_until_complete() while other tasks still
                # run, so try again. A task left by the previous round may cancel this one.
                with suppress(SystemExit, KeyboardInterrupt, asyncio.CancelledError):
                    loop.run_until_complete(_end_all_tasks())
                    break
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            loop.close()

    def _closed_error(self) -> RLError:
        state = "is closed" if self._death is None else f"died of {self._death!r}"
        return RLError(f"loop {self.name!r} {state}")


def stack_of_thread(name: str) -> str:
    """Return the formatted stack of the thread called `name`."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread.name == name and thread.ident in frames:
            return "".join(traceback.format_stack(frames[thread.ident]))
    return "(no such thread)"


async def _end_all_tasks() -> None:
    """Cancel all other tasks of the loop, including tasks that start meanwhile, and wait for them."""
    await asyncio.sleep(0)  # lets the loop create the tasks that were submitted last
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
