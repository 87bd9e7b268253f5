"""Run a plain reward function from an event loop without ever blocking it."""

from __future__ import annotations

import asyncio
import contextlib
import pkgutil
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rl_contracts.config import require
from rl_contracts.errors import ConfigError, RewardError
from rl_contracts.reward import CompositeReward
from rl_contracts.reward_worker import messages
from rl_contracts.reward_worker.process import WorkerProcess
from rl_contracts.runtime.metrics import Metrics, record, record_all

_START_TIMEOUT = 120.0
_END_TIMEOUT = 10.0

_Call = tuple[bytes, "Future[dict[str, Any]]"]
"""A call as it goes to the worker, and what gets the answer."""


class AsyncRewardWrapper:
    """Scores samples in worker processes that are killed and replaced when they are stuck or crash.

    Whatever goes wrong in a call is a `RewardError` of that call, never a value. The workers start at the first call,
    or in `start`, and import the function once; each has a thread that waits for it, so that no event loop does. They
    end with `close` and with this process. `time/reward` is recorded: seconds of work per process, which come near
    `time/step` where rewards are what a run waits for.

    Args:
        target: name installed under `rl.rewards`, dotted path `package.module:function`, or a function that can be
            imported by its module and name.
        workers: processes, each of which scores one sample at a time.
        timeout: seconds for one call, counted from when a worker starts on it.
        logs: a file for each worker, to which what the function prints and logs is appended.
        heads: wrappers of the run whose `time/reward` are added up.

    Raises:
        ConfigError: the function object cannot be imported by name; says why.
    """

    def __init__(
        self,
        target: str | Callable[..., Any],
        workers: int = 1,
        timeout: float = 30.0,
        logs: Sequence[Path] = (),
        heads: int = 1,
    ) -> None:
        require(workers >= 1, "reward.workers", "at least 1", workers)
        require(timeout > 0, "reward.timeout", "more than 0 seconds", timeout)
        self.target = target if isinstance(target, str) else importable_name(target)
        self._limit, self._timeout, self._logs = workers, timeout, logs
        self._processes_in_all = workers * heads
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: dict[threading.Thread, Future[None]] = {}
        """Each with what is done when its function is imported, or a `ConfigError` if it cannot be."""
        self._processes: set[WorkerProcess] = set()
        self._closed = False

    async def __call__(
        self, prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
    ) -> float:
        """The reward of one sample; see `rl_contracts.reward.RewardFunction`. Figures that the function recorded (see
        `rl_contracts.runtime.metrics.record`) are recorded here.

        Raises:
            RewardError: the function raised, was too slow, ended its process, or gave no finite number; or an entry of
                the data is no JSON value. Names the function.
            ConfigError: the function cannot be imported.
        """
        answer: Future[dict[str, Any]] = Future()
        call = self._encode(prompt, completions, prompt_ids, completion_ids, data)
        with self._lock:
            self._start_workers()
            self._calls.put((call, answer))
        found = await asyncio.wrap_future(answer)
        record("time/reward", found["seconds"] / self._processes_in_all, kind="sum")
        record_all(Metrics.from_json(found.get("figures", {})))
        if "error" in found:
            raise RewardError(f"reward {self.target!r} raised {found['error']}")
        return CompositeReward(**found["parts"]) if found["parts"] else float(found["value"])

    async def start(self) -> None:
        """Start all workers and wait until they have imported the function.

        Raises:
            ConfigError: it cannot be imported, or takes too long.
        """
        with self._lock:
            self._start_workers()
            started = [asyncio.wrap_future(future) for future in self._threads.values()]
        await asyncio.gather(*started)

    def close(self) -> None:
        """End all workers and wait until they are gone. Calls that wait fail with a `RewardError`."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
        for _ in threads:
            self._calls.put(None)
        for process in list(self._processes):
            process.kill()
        for thread in threads:
            thread.join(_END_TIMEOUT)
        self._fail_waiting(self._closed_meanwhile())

    async def aclose(self) -> None:
        """`close` without blocking the event loop."""
        await asyncio.to_thread(self.close)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _encode(self, prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, data: Any) -> bytes:
        call = (prompt, completions, _plain(prompt_ids), _plain(completion_ids), data)
        try:
            return messages.encode(call)
        except (TypeError, ValueError, RecursionError):
            names = ("prompt", "completions", "prompt_ids", "completion_ids")
            for name, value in [*zip(names, call, strict=False), *data.items()]:
                try:
                    messages.encode(value)
                except (TypeError, ValueError, RecursionError) as error:
                    raise RewardError(
                        f"reward {self.target!r}: {name!r} cannot be sent to the worker: expected a JSON value, "
                        f"found {type(value).__name__} ({error})."
                    ) from error
            raise

    def _start_workers(self) -> None:
        """Start the threads that are missing."""
        if self._closed:
            raise RewardError(f"reward {self.target!r}: used after close().")
        while len(self._threads) < self._limit:
            started: Future[None] = Future()
            started.set_running_or_notify_cancel()
            log = self._logs[len(self._threads)] if self._logs else None
            thread = threading.Thread(target=self._work, args=(started, log), name=f"reward {self.target}", daemon=True)
            self._threads[thread] = started
            thread.start()

    def _work(self, started: Future[None], log: Path | None) -> None:
        """A thread: keep one process after the other, until there are to be none."""
        try:
            while not self._closed:
                self._serve_calls(started, log)
        except ConfigError as error:  # the next would not start either
            if not started.done():
                started.set_exception(error)
            with self._lock:
                del self._threads[threading.current_thread()]
                self._fail_waiting(error)

    def _serve_calls(self, started: Future[None], log: Path | None) -> None:
        """The life of one process: give it one call after the other. Where one ends it, it is replaced at once, so that
        the next call finds the function imported."""
        process = WorkerProcess(self.target, self._timeout, log)
        self._processes.add(process)
        try:
            if self._closed:
                return
            process.start(_START_TIMEOUT)
            if not started.done():
                started.set_result(None)
            while (call := self._calls.get()) is not None:
                if not process.is_alive():  # it was killed while it had nothing to do
                    self._calls.put(call)
                    return
                if call[1].set_running_or_notify_cancel() and not self._settle(process, *call):
                    return
        finally:
            process.close()
            self._processes.remove(process)

    def _settle(self, process: WorkerProcess, frame: bytes, answer: Future[dict[str, Any]]) -> bool:
        """Settle one call; whether the process can take another."""
        begin = time.perf_counter()
        try:
            found = process.score(frame, self._timeout)
        except Exception as error:  # noqa: BLE001 - a call without a reply would wait forever
            known = error if isinstance(error, RewardError) else RewardError(f"reward {self.target!r}: {error!r}")
            answer.set_exception(self._closed_meanwhile() if self._closed else known)
            return False
        answer.set_result({**found, "seconds": time.perf_counter() - begin})
        return True

    def _fail_waiting(self, error: Exception) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                call = self._calls.get_nowait()
                if call is not None and call[1].set_running_or_notify_cancel():
                    call[1].set_exception(type(error)(str(error)))

    def _closed_meanwhile(self) -> RewardError:
        return RewardError(f"reward {self.target!r}: closed while a call waited.")


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
        found = pkgutil.resolve_name(f"{module}:{name}")
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{where} cannot be imported as {module}:{name}: {error}. {advice}") from error
    if found is not function:
        raise ConfigError(f"{where}: {module}:{name} is another object (decorated or bound?). {advice}")
    return f"{module}:{name}"


def _plain(ids: Any) -> Any:
    """Token ids as a list, also from an array or a tensor."""
    return ids.tolist() if hasattr(ids, "tolist") else list(ids)
