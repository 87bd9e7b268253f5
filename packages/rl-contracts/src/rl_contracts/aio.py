"""An asyncio loop in a thread, for code that is not asynchronous; and tasks that must not end.

Both keep one promise: what dies in the background is seen by whoever started it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

from rl_contracts.errors import RLError, StalledError, boundary_of
from rl_contracts.logging import get_logger

T = TypeVar("T")
logger = get_logger("aio")


class TaskEndedError(RLError):
    """A task that should run as long as its owner ended. Its `boundary` is that of the error that ended it."""

    def __init__(self, message: str, task: str, cause: BaseException | None) -> None:
        super().__init__(message)
        self.task = task
        if cause is not None:
            self.boundary = boundary_of(cause)


class LoopThread:
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

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop, for `call_soon_threadsafe` and the like."""
        return self._loop

    @property
    def death(self) -> BaseException | None:
        """What ended the loop, if it was not closed: `SystemExit` or `KeyboardInterrupt` of a task."""
        return self._death

    def submit(self, coro: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine in the loop, from any thread. Its error or result is in the future.

        Raises:
            RLError: the loop is closed or has died.
        """
        with self._lock:
            if not self._closing:
                return asyncio.run_coroutine_threadsafe(coro, self._loop)
        coro.close()
        raise self._closed_error()

    def run(self, coro: Coroutine[Any, Any, T], timeout: float) -> T:
        """Run a coroutine in the loop and wait for its result; its error is raised here with its traceback.

        Args:
            coro: what to run.
            timeout: seconds after which it is cancelled.

        Raises:
            StalledError: it did not finish in time.
            RLError: called from the loop's own thread, which could only deadlock; or the loop is closed.
        """
        what = getattr(coro, "__qualname__", repr(coro))
        if threading.current_thread() is self._thread:
            coro.close()
            raise RLError(f"loop {self.name!r}: run({what}) was called from the loop's own thread; await it instead")
        future = self.submit(coro)
        try:
            return future.result(timeout)
        except CancelledError as error:
            if self._closing:
                raise self._closed_error() from error
            raise
        except TimeoutError as error:
            if future.done():
                raise  # the coroutine's own, not ours
            raise StalledError(f"loop {self.name!r}: {what} did not finish within {timeout:g} s") from error
        finally:
            future.cancel()

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
            left = ", ".join(sorted(_describe(task) for task in asyncio.all_tasks(self._loop)))
            raise StalledError(f"loop {self.name!r}: still not ended {timeout:g} s after it was closed: {left}")

    def __enter__(self) -> Self:
        return self

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
            ended = False
            while not ended:
                # SystemExit and KeyboardInterrupt of one more task leave the loop again, while the others still must
                # end; what was left of the round before may cancel this one
                with suppress(SystemExit, KeyboardInterrupt, asyncio.CancelledError):
                    loop.run_until_complete(_end_all_tasks())
                    ended = True
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            loop.close()

    def _closed_error(self) -> RLError:
        if self._death is None:
            return RLError(f"loop {self.name!r} is closed")
        error = RLError(f"loop {self.name!r} died of {self._death!r}")
        error.__cause__ = self._death
        return error


async def supervise(*tasks: tuple[str, Coroutine[Any, Any, Any]], grace: float = 10.0) -> NoReturn:
    """Run tasks that should never end, until the first of them does; that is an error, also a clean return.

    The others are then cancelled. So the death of a producer can never become its consumer's silent wait. Cancel
    the call itself to end all of them; they are waited for in that case too.

    Args:
        tasks: (name, coroutine) of each.
        grace: seconds that cancelled tasks have to clean up; those that take longer are named and left behind.

    Raises:
        TaskEndedError: names the task that ended and has its error as the cause. Further errors are notes.
    """
    running = [asyncio.create_task(coro, name=name) for name, coro in tasks]
    try:
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        await _cancel(running, grace)
        raise
    first = next(task for task in running if task in done)
    stuck = await _cancel(running, grace)
    error = _ended(first)
    for task in running:
        if task in stuck:
            error.add_note(f"task {task.get_name()!r} did not end within {grace:g} s of its cancellation")
        elif task is not first and not task.cancelled() and task.exception() is not None:
            error.add_note(f"task {task.get_name()!r} failed as well: {task.exception()!r}")
    raise error from error.__cause__


async def _end_all_tasks() -> None:
    """Cancel all other tasks of the loop, those too that begin meanwhile, and wait for them."""
    await asyncio.sleep(0)  # tasks submitted last now exist
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _ended(task: asyncio.Task[Any]) -> TaskEndedError:
    name = task.get_name()
    if task.cancelled():
        return TaskEndedError(f"task {name!r} was cancelled while its owner still runs", name, None)
    cause = task.exception()
    if cause is None:
        return TaskEndedError(f"task {name!r} returned, but it should run until it is cancelled", name, None)
    error = TaskEndedError(f"task {name!r} failed: {type(cause).__name__}: {cause}", name, cause)
    error.__cause__ = cause
    return error


async def _cancel(tasks: list[asyncio.Task[Any]], grace: float) -> set[asyncio.Task[Any]]:
    """Cancel what still runs and wait for it; what did not end in time is returned."""
    for task in tasks:
        task.cancel()
    _, stuck = await asyncio.wait(tasks, timeout=grace)
    return stuck


def _describe(task: asyncio.Task[Any]) -> str:
    coro = task.get_coro()
    return f"{task.get_name()} ({getattr(coro, '__qualname__', coro)})"


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
