"""The loop thread and supervised tasks: results, errors and deaths reach their owner."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import traceback
from concurrent.futures import CancelledError

import pytest

from rl_contracts.aio import LoopThread, TaskEndedError, supervise
from rl_contracts.errors import InferenceError, RLError, StalledError


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
        with pytest.raises(StalledError, match=r"slow did not finish within 0\.05 s"):
            thread.run(slow(), timeout=0.05)
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


async def test_supervise_task_that_fails_is_named_and_ends_the_others() -> None:
    ended: list[str] = []

    async def consumer() -> None:
        try:
            await _forever()
        finally:
            ended.append("consumer")

    with pytest.raises(TaskEndedError, match="'producer' failed: InferenceError: gone") as caught:
        await supervise(("consumer", consumer()), ("producer", _raise(InferenceError("gone"))))

    assert ended == ["consumer"]
    assert caught.value.task == "producer"
    assert caught.value.boundary == "inference"
    assert isinstance(caught.value.__cause__, InferenceError)


async def test_supervise_task_that_returns_is_an_error() -> None:
    with pytest.raises(TaskEndedError, match="'producer' returned"):
        await supervise(("consumer", _forever()), ("producer", asyncio.sleep(0)))


async def test_supervise_task_that_was_cancelled_is_an_error() -> None:
    async def cancels_itself() -> None:
        asyncio.current_task().cancel()  # type: ignore[union-attr]
        await _forever()

    with pytest.raises(TaskEndedError, match="'producer' was cancelled"):
        await supervise(("producer", cancels_itself()), ("consumer", _forever()))


async def test_supervise_second_error_during_cleanup_becomes_a_note() -> None:
    async def clumsy() -> None:
        try:
            await _forever()
        finally:
            raise ValueError("while cleaning up")

    with pytest.raises(TaskEndedError, match="'a' failed") as caught:
        await supervise(("b", clumsy()), ("a", _raise(RLError("first"))))

    assert caught.value.__notes__ == ["task 'b' failed as well: ValueError('while cleaning up')"]


async def test_supervise_task_that_does_not_end_is_named_and_left() -> None:
    release = asyncio.Event()

    async def stubborn() -> None:
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await release.wait()

    with pytest.raises(TaskEndedError) as caught:
        await supervise(("b", stubborn()), ("a", _raise(RLError("first"))), grace=0.05)
    release.set()

    assert "task 'b' did not end within 0.05 s" in caught.value.__notes__[0]


async def test_supervise_cancelled_ends_all_and_stays_a_cancellation() -> None:
    ended: list[str] = []
    started = asyncio.Event()

    async def task() -> None:
        started.set()
        try:
            await _forever()
        finally:
            ended.append("task")

    supervisor = asyncio.create_task(supervise(("task", task())))
    await started.wait()
    supervisor.cancel()
    with pytest.raises(asyncio.CancelledError):
        await supervisor

    assert ended == ["task"]
