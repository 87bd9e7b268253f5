"""The loop thread: results, errors and deaths reach whoever waits."""

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


def test_run_gives_the_result_from_another_thread() -> None:
    async def where() -> str:
        return threading.current_thread().name

    with LoopThread("rollout-loop") as thread:
        assert thread.run(where(), timeout=5) == "rollout-loop"


def test_run_error_crosses_with_its_traceback() -> None:
    with LoopThread("l") as thread, pytest.raises(InferenceError, match="refused") as caught:
        thread.run(_raise(InferenceError("refused")), timeout=5)

    assert "_raise" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_run_past_its_deadline_is_cancelled_and_named() -> None:
    cancelled = threading.Event()

    async def slow() -> None:
        try:
            await _forever()
        finally:
            cancelled.set()

    with LoopThread("l") as thread:
        thread.run(asyncio.sleep(0), timeout=5)  # it runs
        with pytest.raises(StalledError, match=r"slow did not finish within 0\.3 s"):
            thread.run(slow(), timeout=0.3)
        assert cancelled.wait(5)


def test_run_timeout_of_the_coroutine_itself_stays_a_timeout() -> None:
    with LoopThread("l") as thread, pytest.raises(TimeoutError, match="own"):
        thread.run(_raise(TimeoutError("own")), timeout=5)


def test_run_from_the_loops_own_thread_is_refused() -> None:
    async def nested(thread: LoopThread) -> None:
        thread.run(_forever(), timeout=5)

    with LoopThread("l") as thread, pytest.raises(RLError, match="own thread; await it"):
        thread.run(nested(thread), timeout=5)


def test_submit_future_can_be_cancelled_from_outside() -> None:
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


def test_close_cancels_what_is_left_also_what_starts_during_cleanup() -> None:
    seen: list[str] = []

    async def last_words() -> None:
        try:
            await _forever()
        finally:
            seen.append("child")

    async def parent() -> None:
        try:
            await _forever()
        finally:
            seen.append("parent")
            parent.child = asyncio.create_task(last_words())  # type: ignore[attr-defined]
            await asyncio.sleep(0)

    thread = LoopThread("l")
    future = thread.submit(parent())
    thread.run(asyncio.sleep(0), timeout=5)
    thread.close(timeout=5)
    thread.close(timeout=5)

    assert future.cancelled()
    assert seen == ["parent", "child"]
    assert "l" not in [t.name for t in threading.enumerate()]


def test_close_task_that_ignores_cancellation_is_named() -> None:
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


def test_submit_after_close_is_refused() -> None:
    thread = LoopThread("l")
    thread.close()

    with pytest.raises(RLError, match="'l' is closed"):
        thread.submit(_forever())


def test_waiting_run_when_the_loop_is_closed_gets_an_error() -> None:
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


def test_loop_that_dies_tells_waiting_and_later_callers() -> None:
    thread = LoopThread("l")
    other = thread.submit(_forever())

    with pytest.raises(SystemExit):
        thread.run(_raise(SystemExit(3)), timeout=5)

    with pytest.raises(CancelledError):
        other.result(timeout=5)
    with pytest.raises(RLError, match=r"died of SystemExit\(3\)"):
        thread.run(_forever(), timeout=5)
    thread.close(timeout=5)


def test_run_while_something_blocks_the_loop_names_the_place() -> None:
    released = threading.Event()

    async def blocks() -> None:
        released.wait(30)

    with LoopThread("l") as thread:
        thread.submit(blocks())
        with pytest.raises(StalledError, match=r"'l' is blocked for more than 0\.1 s[\s\S]*in blocks"):
            thread.run(_forever(), blocked=0.1)
        released.set()


@pytest.mark.slow
def test_run_of_a_loop_that_turns_waits_beyond_what_may_block() -> None:
    with LoopThread("l") as thread:
        thread.run(asyncio.sleep(1.3), blocked=0.5)
        with pytest.raises(StalledError, match=r"sleep did not finish within 0\.1 s"):
            thread.run(asyncio.sleep(60), timeout=0.1, blocked=0.5)


def test_waiting_run_when_the_loop_dies_gets_what_killed_it() -> None:
    thread = LoopThread("l")
    timer = threading.Timer(0.2, lambda: thread.submit(_raise(SystemExit(3))))
    timer.start()
    with pytest.raises(RLError, match=r"died of SystemExit\(3\)") as caught:
        thread.run(_forever(), timeout=30)
    assert isinstance(caught.value.__cause__, SystemExit)
    thread.close(timeout=5)
