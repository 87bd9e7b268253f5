"""Running many coroutines at once, but not more than a limit."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

Start = Callable[[], Coroutine[Any, Any, None]]
"""Makes the coroutine of a job when its turn comes."""


class Job:
    """One submission. Cancel it through its runner."""

    __slots__ = ("start", "task")

    def __init__(self, start: Start) -> None:
        self.start: Start | None = start
        self.task: asyncio.Task[None] | None = None


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

    @property
    def running(self) -> int:
        """Tasks that run now."""
        return len(self._tasks)

    def submit(self, start: Start) -> Job:
        """Run `start()` as a task, now or when one ends."""
        job = Job(start)
        if self._closed:
            job.start = None
        elif len(self._tasks) < self.limit:
            self._launch(job, start)
        else:
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
        await asyncio.gather(*tasks, return_exceptions=True)

    def _launch(self, job: Job, start: Start) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        job.task = self._loop.create_task(start())
        self._tasks.add(job.task)
        job.task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_crash(error)
        while self._waiting and len(self._tasks) < self.limit and not self._closed:
            job = self._waiting.popleft()
            if job.start is not None:
                self._launch(job, job.start)
