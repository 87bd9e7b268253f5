"""Run a plain reward function from an event loop without ever blocking it."""

from __future__ import annotations

import asyncio
import importlib
import subprocess
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from rl_contracts.config import require
from rl_contracts.errors import ConfigError, RewardError
from rl_contracts.metrics import record_all
from rl_contracts.reward_worker import wire
from rl_contracts.reward_worker.process import Call, WorkerProcess

_START_TIMEOUT = 120.0
_END_TIMEOUT = 10.0


class AsyncRewardWrapper:
    """Scores samples in worker processes that are killed and replaced when they are stuck or crash.

    Whatever goes wrong in a call is a `RewardError` of that call, never a value. The workers start at the first call,
    or in `start`, import the function once, and belong to the event loop that runs then; they end with `close`, with
    their loop's thread, and with this process.

    Args:
        target: name installed under `rl.rewards`, dotted path `package.module:function`, or a function that can be
            imported by its module and name.
        workers: processes, each of which scores one sample at a time.
        timeout: seconds for one call, counted from when a worker starts on it.

    Raises:
        ConfigError: the function object cannot be imported by name; says why.
    """

    def __init__(self, target: str | Callable[..., Any], workers: int = 1, timeout: float = 30.0) -> None:
        require(workers >= 1, "reward.workers", "at least 1", workers)
        require(timeout > 0, "reward.timeout", "more than 0 seconds", timeout)
        self.target = target if isinstance(target, str) else importable_name(target)
        self._limit, self._timeout = workers, timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._workers: list[WorkerProcess] = []
        self._idle: deque[WorkerProcess] = deque()
        self._queue: deque[Call] = deque()
        self._ending: list[subprocess.Popen[bytes]] = []
        self._closed = False

    async def __call__(
        self, prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
    ) -> float:
        """The reward of one sample; see `rl_contracts.reward.RewardFunction`. Figures that the function recorded (see
        `rl_contracts.metrics.record`) are recorded here.

        Raises:
            RewardError: the function raised, was too slow, ended its process, or gave no finite number; or an entry of
                the data is no JSON value. Names the function.
            ConfigError: the function cannot be imported.
        """
        loop = self._bind()
        call = Call(self._encode(prompt, completions, prompt_ids, completion_ids, data), loop.create_future())
        self._queue.append(call)
        self._dispatch()
        try:
            return await call.result
        finally:
            if call.figures is not None:
                record_all(call.figures)

    async def start(self) -> None:
        """Start all workers and wait until they have imported the function.

        Raises:
            ConfigError: it cannot be imported, or takes too long.
        """
        self._bind()
        for _ in range(self._limit - len(self._workers)):
            self._spawn()
        if not self._workers:
            raise ConfigError(f"reward {self.target!r}: no worker process can be started.")
        await asyncio.gather(*(worker.started for worker in self._workers))

    def close(self) -> None:
        """End all workers and wait until they are gone. Calls that wait fail with a `RewardError`."""
        loop = self._loop
        if loop is not None and loop.is_running() and not _runs_here(loop):
            asyncio.run_coroutine_threadsafe(self.aclose(), loop).result(_END_TIMEOUT)
            return
        self._closed = True
        self._kill_all(RewardError(f"reward {self.target!r}: closed while a call waited."))
        self._reap()

    async def aclose(self) -> None:
        """`close` without blocking the event loop."""
        self._closed = True
        self._kill_all(RewardError(f"reward {self.target!r}: closed while a call waited."))
        await asyncio.to_thread(self._reap)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _bind(self) -> asyncio.AbstractEventLoop:
        """Make sure that the workers belong to the running loop."""
        if self._closed:
            raise RewardError(f"reward {self.target!r}: used after close().")
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            if self._workers:
                self._kill_all(RewardError(f"reward {self.target!r}: called from another event loop meanwhile."))
            self._loop = loop
        return loop

    def _encode(self, prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, data: Any) -> bytes:
        call = (prompt, completions, _plain(prompt_ids), _plain(completion_ids), data)
        try:
            return wire.encode(call)
        except (TypeError, ValueError, RecursionError):
            names = ("prompt", "completions", "prompt_ids", "completion_ids")
            for name, value in [*zip(names, call, strict=False), *data.items()]:
                try:
                    wire.encode(value)
                except (TypeError, ValueError, RecursionError) as error:
                    raise RewardError(
                        f"reward {self.target!r}: {name!r} cannot be sent to the worker: expected a JSON value, "
                        f"found {type(value).__name__} ({error})."
                    ) from error
            raise

    def _dispatch(self) -> None:
        while self._queue:
            if self._queue[0].result.done():  # its caller was cancelled
                self._queue.popleft()
            elif self._idle:
                self._idle.popleft().submit(self._queue.popleft())
            elif len(self._workers) < self._limit and self._starting < len(self._queue):
                self._spawn()
            else:
                return

    @property
    def _starting(self) -> int:
        return sum(not worker.started.done() for worker in self._workers)

    def _spawn(self) -> None:
        """Start one more worker; where that is impossible, the calls that wait fail."""
        try:
            worker = WorkerProcess(self.target, self._timeout, _START_TIMEOUT, self._on_idle, self._on_end)
        except OSError as error:
            self._fail_queue(ConfigError(f"reward {self.target!r}: its worker process cannot be started: {error}"))
        else:
            self._workers.append(worker)

    def _on_idle(self, worker: WorkerProcess) -> None:
        self._idle.append(worker)
        self._dispatch()

    def _on_end(self, worker: WorkerProcess, had_call: bool) -> None:
        self._workers.remove(worker)
        if worker in self._idle:
            self._idle.remove(worker)
        self._bury(worker)
        error = worker.started.exception()
        if error is not None:  # the next would not start either
            self._fail_queue(error)
        elif had_call:
            self._spawn()  # so that the next call finds the function imported
        self._dispatch()

    def _fail_queue(self, error: BaseException) -> None:
        waiting, self._queue = list(self._queue), deque()
        for call in waiting:
            call.fail(ConfigError(str(error)))

    def _kill_all(self, reason: RewardError) -> None:
        for worker in self._workers:
            worker.kill(reason)
            self._bury(worker)
        for call in self._queue:
            if not call.result.get_loop().is_closed():
                call.fail(reason)
        self._workers, self._idle, self._queue = [], deque(), deque()

    def _bury(self, worker: WorkerProcess) -> None:
        self._ending = [process for process in [*self._ending, worker.process] if process.poll() is None]

    def _reap(self) -> None:
        for process in self._ending:
            process.wait(_END_TIMEOUT)
        self._ending = []


def importable_name(function: Callable[..., Any]) -> str:
    """`module:qualname` of a function object.

    Raises:
        ConfigError: another process would not find it under that name; says why and what to do.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    where = f"reward function {function!r}"
    advice = "Move it to a module that can be imported, at the top level, and pass it or 'package.module:name'."
    if not module or not name:
        raise ConfigError(f"{where}: expected a function, found a {type(function).__name__} without a name. {advice}")
    if module == "__main__":
        raise ConfigError(f"{where} lives in the main program, which a worker process cannot import. {advice}")
    if "<" in name:
        raise ConfigError(f"{where} is a lambda or lies inside another function. {advice}")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{where} cannot be imported as {module}:{name}: {error}. {advice}") from error
    if found is not function:
        raise ConfigError(f"{where}: {module}:{name} is another object (decorated or bound?). {advice}")
    return f"{module}:{name}"


def _plain(ids: Any) -> Any:
    """Token ids as a list, also from an array or a tensor."""
    return ids.tolist() if hasattr(ids, "tolist") else list(ids)


def _runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
