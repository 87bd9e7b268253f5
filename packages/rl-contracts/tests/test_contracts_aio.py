"""The loop thread: results, errors and crashes reach the waiting callers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import traceback
from concurrent.futures import CancelledError

import pytest

from rl_contracts.errors import InferenceError, RLError, StalledError
from rl_contracts.runtime.aio import LoopThread


async def _raise(error: BaseException) -> None:
    raise error


async def _forever() -> None:
    await asyncio.Event().wait()


def test_run_error_keeps_traceback() -> None:
    with LoopThread("l") as thread, pytest.raises(InferenceError, match="refused") as caught:
        thread.run(_raise(InferenceError("refused")), timeout=5)

    assert "_raise" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_run_past_deadline_cancels_and_names_coroutine() -> None:
    cancelled = threading.Event()

    async def slow() -> None:
        try:
            await _forever()
        finally:
            cancelled.set()

    with LoopThread("l") as thread:
        thread.run(asyncio.sleep(0), timeout=5)  # the loop runs
        with pytest.raises(StalledError, match=r"slow .*0\.3 s"):
            thread.run(slow(), timeout=0.3)
        assert cancelled.wait(5)


def test_run_timeout_error_of_coroutine_is_raised_unchanged() -> None:
    with LoopThread("l") as thread, pytest.raises(TimeoutError, match="own"):
        thread.run(_raise(TimeoutError("own")), timeout=5)


def test_run_from_own_thread_raises() -> None:
    async def nested(thread: LoopThread) -> None:
        thread.run(_forever(), timeout=5)

    with LoopThread("l") as thread, pytest.raises(RLError, match=r"run\(_forever\).*own thread"):
        thread.run(nested(thread), timeout=5)


def test_submit_cancelled_future_cancels_task() -> None:
    ended = threading.Event()

    async def task() -> None:
        try:
            await _forever()
        finally:
            ended.set()

    with LoopThread("l") as thread:
        future = thread.submit(task())
        thread.run(asyncio.sleep(0), timeout=5)
        future.cancel()
        assert ended.wait(5)


def test_close_cancels_remaining_tasks_and_those_started_in_cleanup() -> None:
    ended: list[str] = []

    async def child() -> None:
        try:
            await _forever()
        finally:
            ended.append("child")

    async def parent() -> None:
        try:
            await _forever()
        finally:
            ended.append("parent")
            parent.child = asyncio.create_task(child())  # type: ignore[attr-defined]
            await asyncio.sleep(0)

    thread = LoopThread("l")
    future = thread.submit(parent())
    thread.run(asyncio.sleep(0), timeout=5)
    thread.close(timeout=5)
    thread.close(timeout=5)

    assert future.cancelled()
    assert ended == ["parent", "child"]
    assert "l" not in [t.name for t in threading.enumerate()]


def test_close_task_ignoring_cancellation_raises_its_name() -> None:
    release = threading.Event()

    async def stubborn() -> None:
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    thread = LoopThread("l")
    thread.submit(stubborn())
    thread.run(asyncio.sleep(0), timeout=5)
    with pytest.raises(StalledError, match="stubborn"):
        thread.close(timeout=0.1)
    release.set()
    thread.close(timeout=5)


def test_submit_after_close_raises() -> None:
    thread = LoopThread("l")
    thread.close()

    with pytest.raises(RLError, match="'l' is closed"):
        thread.submit(_forever())


def test_run_loop_closed_meanwhile_raises() -> None:
    thread = LoopThread("l")
    started = threading.Event()
    errors: list[BaseException] = []

    async def wait() -> None:
        started.set()
        await _forever()

    def call() -> None:
        try:
            thread.run(wait(), timeout=30)
        except RLError as error:
            errors.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    assert started.wait(5)
    thread.close(timeout=5)
    caller.join(5)

    assert [str(error) for error in errors] == ["loop 'l' is closed"]


def test_loop_crash_raises_for_waiting_and_later_callers() -> None:
    thread = LoopThread("l")
    other = thread.submit(_forever())

    with pytest.raises(SystemExit):
        thread.run(_raise(SystemExit(3)), timeout=5)

    with pytest.raises(CancelledError):
        other.result(timeout=5)
    with pytest.raises(RLError, match=r"SystemExit\(3\)"):
        thread.run(_forever(), timeout=5)
    thread.close(timeout=5)


def test_run_blocked_loop_shows_stack() -> None:
    released = threading.Event()

    async def blocks() -> None:
        released.wait(30)

    with LoopThread("l") as thread:
        thread.submit(blocks())
        with pytest.raises(StalledError, match=r"'l' .*blocked.* 0\.1 s[\s\S]*in blocks"):
            thread.run(_forever(), blocked=0.1)
        released.set()


@pytest.mark.slow
def test_run_responsive_loop_may_exceed_blocked_limit() -> None:
    with LoopThread("l") as thread:
        thread.run(asyncio.sleep(1.3), blocked=0.5)
        with pytest.raises(StalledError, match=r"sleep .*0\.1 s"):
            thread.run(asyncio.sleep(60), timeout=0.1, blocked=0.5)


def test_run_loop_crash_raises_with_cause() -> None:
    thread = LoopThread("l")
    timer = threading.Timer(0.2, lambda: thread.submit(_raise(SystemExit(3))))
    timer.start()
    with pytest.raises(RLError, match=r"SystemExit\(3\)") as caught:
        thread.run(_forever(), timeout=30)
    assert isinstance(caught.value.__cause__, SystemExit)
    thread.close(timeout=5)
