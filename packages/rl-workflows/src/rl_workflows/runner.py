"""Running many coroutines at once, but not more than a limit."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from typing import Any

Start = Callable[..., Coroutine[Any, Any, None]]
"""Makes the coroutine of a job when its turn comes."""


class Job:
    """One submission. Cancel it through its runner.

    It forgets how it starts once it did: with that it would hold its owner, which holds it, and every finished group
    would be left to the garbage collector.
    """

    __slots__ = ("start", "task")

    def __init__(self) -> None:
        self.start: tuple[Start, tuple[Any, ...]] | None = None
        """What to call with which arguments, while it waits for its turn."""
        self.task: asyncio.Task[None] | None = None
        """From its start on."""


class AsyncTaskRunner:
    """Runs jobs as tasks of the running loop, at most `limit` at a time, in order of submission.

    A job reports its own outcome; what it raises is a defect of its owner, and is handed to `on_crash`. All methods
    belong to the loop's thread.

    Args:
        limit: tasks at the same time.
        on_crash: told of an exception that left a job.
    """

    def __init__(self, limit: int, on_crash: Callable[[BaseException], None]) -> None:
        self.limit, self._on_crash = limit, on_crash
        self._waiting: deque[Job] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._on_end, self._context = self._ended, copy_context()  # one of each for all tasks

    @property
    def running(self) -> int:
        """Tasks that run now."""
        return len(self._tasks)

    @property
    def closed(self) -> bool:
        """Whether everything was, or is being, cancelled."""
        return self._closed

    def submit(self, start: Start, *arguments: Any) -> Job:
        """Run `start(*arguments)` as a task, now or when one ends."""
        job = Job()
        if self._closed:
            return job
        if len(self._tasks) < self.limit:
            self._launch(job, start(*arguments))
        else:
            job.start = (start, arguments)
            self._waiting.append(job)
        return job

    def cancel(self, job: Job) -> None:
        """End a job, or see that it never starts. Nothing happens if it is over."""
        job.start = None
        if job.task is not None:
            job.task.cancel()

    async def close(self) -> None:
        """Cancel everything and wait until it has ended."""
        self._closed = True
        self._waiting.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)  # not gather, which a caller with a deadline could not leave

    def _launch(self, job: Job, coroutine: Coroutine[Any, Any, None]) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        job.task = self._loop.create_task(coroutine)
        self._tasks.add(job.task)
        job.task.add_done_callback(self._on_end, context=self._context)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_crash(error)
        while self._waiting and len(self._tasks) < self.limit and not self._closed:
            job = self._waiting.popleft()
            if job.start is not None:
                (start, arguments), job.start = job.start, None
                self._launch(job, start(*arguments))
