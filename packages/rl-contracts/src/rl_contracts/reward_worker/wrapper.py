"""Run a plain reward function from an event loop without blocking the loop."""

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
"""Encoded call for the worker, and the future for its reply."""


class AsyncRewardWrapper:
    """Pool of worker processes that score samples. Workers that hang or crash are killed and replaced.

    A failure in a call raises a `RewardError` for that call; it never becomes a reward value. The workers start at the
    first call or in `start`, and import the function once. A thread per worker waits for replies, so that the event
    loop never blocks. Workers end with `close` or with this process.

    The metric `time/reward` is the working time in seconds per worker. If it is close to `time/step`, rewards are the
    bottleneck of the run.

    Args:
        target: name installed under `rl.rewards`, dotted path `package.module:function`, or a function that can be
            imported by its module and name.
        workers: number of worker processes; each scores one sample at a time.
        timeout: time limit of one call in seconds, counted from when a worker starts it.
        logs: one file per worker, to which the output and logs of the function are appended.
        heads: number of wrappers in the run, one per data-parallel leader, whose `time/reward` values are summed.

    Raises:
        ConfigError: the function object cannot be imported by name. The message has the reason.
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
        self._num_workers, self._timeout, self._logs = workers, timeout, logs
        self._total_workers = workers * heads
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: dict[threading.Thread, Future[None]] = {}
        """Worker threads, each with a future that is done once its worker has imported the function.

        The future has a `ConfigError` if the import failed.
        """
        self._processes: set[WorkerProcess] = set()
        self._closed = False

    async def __call__(
        self, prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
    ) -> float:
        """Return the reward of one sample; see `rl_contracts.reward.RewardFunction`.

        Metrics that the function records with `rl_contracts.runtime.metrics.record` are recorded in this process.

        Raises:
            RewardError: the function raised an error, timed out, ended its process or returned no finite number; or
                `data` is not JSON.
            ConfigError: the function cannot be imported.
        """
        future: Future[dict[str, Any]] = Future()
        call = self._encode(prompt, completions, prompt_ids, completion_ids, data)
        with self._lock:
            self._start_threads()
            self._calls.put((call, future))
        reply = await asyncio.wrap_future(future)
        record("time/reward", reply["seconds"] / self._total_workers, kind="sum")
        record_all(Metrics.from_json(reply.get("metrics", {})))
        if "error" in reply:
            raise RewardError(f"reward {self.target!r} raised {reply['error']}")
        return CompositeReward(**reply["components"]) if reply["components"] else float(reply["value"])

    async def start(self) -> None:
        """Start all workers and wait until they have imported the function.

        Raises:
            ConfigError: the import fails or takes too long.
        """
        with self._lock:
            self._start_threads()
            started = [asyncio.wrap_future(future) for future in self._threads.values()]
        await asyncio.gather(*started)

    def close(self) -> None:
        """Kill all workers and wait until they exit. Pending calls fail with a `RewardError`."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
        for _ in threads:
            self._calls.put(None)
        for process in list(self._processes):
            process.kill()
        for thread in threads:
            thread.join(_END_TIMEOUT)
        self._fail_waiting(self._closed_error())

    async def aclose(self) -> None:
        """Run `close` without blocking the event loop."""
        await asyncio.to_thread(self.close)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _encode(self, prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, data: Any) -> bytes:
        call = (prompt, completions, _to_list(prompt_ids), _to_list(completion_ids), data)
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

    def _start_threads(self) -> None:
        """Start threads until there is one per worker."""
        if self._closed:
            raise RewardError(f"reward {self.target!r}: used after close().")
        while len(self._threads) < self._num_workers:
            started: Future[None] = Future()
            started.set_running_or_notify_cancel()
            log = self._logs[len(self._threads)] if self._logs else None
            thread = threading.Thread(
                target=self._run_thread, args=(started, log), name=f"reward {self.target}", daemon=True
            )
            self._threads[thread] = started
            thread.start()

    def _run_thread(self, started: Future[None], log: Path | None) -> None:
        """Run worker processes one after the other in this thread, until the wrapper is closed."""
        try:
            while not self._closed:
                self._run_worker(started, log)
        except ConfigError as error:  # another process would not start either
            if not started.done():
                started.set_exception(error)
            with self._lock:
                del self._threads[threading.current_thread()]
                self._fail_waiting(error)

    def _run_worker(self, started: Future[None], log: Path | None) -> None:
        """Start a process and send it calls until a call ends it or the wrapper is closed.

        The caller starts a new process immediately, so that the function is imported before the next call.
        """
        process = WorkerProcess(self.target, self._timeout, log)
        self._processes.add(process)
        try:
            if self._closed:
                return
            process.start(_START_TIMEOUT)
            if not started.done():
                started.set_result(None)
            while (call := self._calls.get()) is not None:
                if not process.is_ready():  # it was killed while it was idle
                    self._calls.put(call)
                    return
                if call[1].set_running_or_notify_cancel() and not self._run_call(process, *call):
                    return
        finally:
            process.close()
            self._processes.remove(process)

    def _run_call(self, process: WorkerProcess, frame: bytes, future: Future[dict[str, Any]]) -> bool:
        """Run one call and set the result of its future; return whether the process can run another call."""
        begin = time.perf_counter()
        try:
            reply = process.score(frame, self._timeout)
        except Exception as error:  # noqa: BLE001 - without a result, the caller would wait forever
            failure = error if isinstance(error, RewardError) else RewardError(f"reward {self.target!r}: {error!r}")
            future.set_exception(self._closed_error() if self._closed else failure)
            return False
        future.set_result({**reply, "seconds": time.perf_counter() - begin})
        return True

    def _fail_waiting(self, error: Exception) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                call = self._calls.get_nowait()
                if call is not None and call[1].set_running_or_notify_cancel():
                    call[1].set_exception(type(error)(str(error)))

    def _closed_error(self) -> RewardError:
        return RewardError(f"reward {self.target!r}: the wrapper was closed while a call was waiting.")


def importable_name(function: Callable[..., Any]) -> str:
    """Return the `module:qualname` of a function object.

    Raises:
        ConfigError: another process could not import the function by that name. The message has the reason.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    subject = f"reward function {function!r}"
    advice = "Move it to a module that can be imported, at the top level, and pass it or 'package.module:name'."
    if not module or not name:
        raise ConfigError(f"{subject}: expected a function, found a {type(function).__name__} without a name. {advice}")
    if module == "__main__":
        raise ConfigError(f"{subject} is defined in the main program, which a worker process cannot import. {advice}")
    if "<" in name:
        raise ConfigError(f"{subject} is a lambda or is defined inside another function. {advice}")
    try:
        resolved = pkgutil.resolve_name(f"{module}:{name}")
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{subject} cannot be imported as {module}:{name}: {error}. {advice}") from error
    if resolved is not function:
        raise ConfigError(f"{subject}: {module}:{name} is a different object (decorated or bound?). {advice}")
    return f"{module}:{name}"


def _to_list(ids: Any) -> Any:
    """Convert token ids to a list, also from an array or a tensor."""
    return ids.tolist() if hasattr(ids, "tolist") else list(ids)
