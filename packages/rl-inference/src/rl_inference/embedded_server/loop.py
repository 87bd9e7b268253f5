"""Decode thread: generates for jobs, and runs commands between two passes."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from rl_contracts.errors import InferenceError
from rl_contracts.runtime.logging import get_logger
from rl_inference.embedded_server.job import GenerationJob
from rl_inference.embedded_server.model.memory import used_bytes
from rl_inference.embedded_server.model.pages import PAGE
from rl_inference.embedded_server.model.slot_model import SlotModel
from rl_inference.embedded_server.scoring import ScoreJob, ScoreQueue
from rl_inference.embedded_server.slots import SlotTable
from rl_inference.embedded_server.weights import ServedWeights

logger = get_logger("inference.server.loop")

T = TypeVar("T")

PREFILL_TOKENS = 2048
"""Maximum number of prompt or score tokens per forward pass, in addition to one token of each running completion.
Larger passes are hardly more efficient, and delay running completions. Longer inputs take several passes."""
_IDLE_BEAT = 0.5
"""Seconds between two increments of `DecodeLoop.beat` while the thread is idle."""
_SHUTDOWN = {"type": "abort", "message": "the server is shutting down"}


class DecodeLoop:
    """Decode thread, the owner of model, KV cache and weights while it runs.

    Other threads put callables into one inbox. The decode thread runs them between two passes. Therefore nothing here
    needs a lock, and a version can change only between two passes. If both completions and scores are requested, each
    gets half of the thread's time.

    Args:
        on_crash: called in the decode thread if it dies, after all unfinished jobs have ended.
        rescore: see `SlotTable`.
    """

    def __init__(
        self,
        model: SlotModel,
        weights: ServedWeights,
        slots: int,
        on_crash: Callable[[BaseException], object],
        rescore: bool = False,
    ) -> None:
        self.model = model
        self.weights = weights
        self.table = SlotTable(model, slots, PREFILL_TOKENS, lambda: weights.version, rescore)
        self.scores = ScoreQueue(model, weights, self.table, 0 if rescore else PREFILL_TOKENS)
        self.beat = 0
        self.busy_seconds = 0.0
        self._on_crash = on_crash
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[GenerationJob] = deque()
        self._paused = False
        self._draining: list[Future[None]] = []
        self._paused_since = 0.0
        self._sleeping_tokens = 0
        """Capacity in tokens of the KV cache before `sleep` freed it; 0 if the server does not sleep."""
        self._decode_seconds_due = 0.0
        """Time in seconds that generation gets before the next score."""
        self._suspect_count = 0
        """Number of jobs at the front of the queue that may have caused a failed pass."""
        self._admitted_suspect: tuple[Any, int] = (None, 0)
        """The suspect admitted last, and its number of generated tokens at that time."""
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="decode", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def stop(self, timeout: float = 10.0) -> None:
        """End unfinished jobs as aborted and join the thread."""
        self._inbox.put(self._stop)
        self._thread.join(timeout)

    def submit(self, job: GenerationJob) -> None:
        """Queue a job for generation."""
        self._inbox.put(lambda: self._waiting.append(job))

    def submit_score(self, job: ScoreJob) -> None:
        """Queue a sequence for scoring; scores run even while generation is paused."""
        self._inbox.put(lambda: self.scores.waiting.append(job))

    def abort(self, select: Callable[[GenerationJob], bool], message: str) -> Future[int]:
        """End the jobs for which `select` returns true, with the tokens generated so far.

        Returns:
            The number of these jobs.
        """
        return self.run(lambda: self._abort(select, message))

    def run(self, function: Callable[[], T]) -> Future[T]:
        """Call `function` in the decode thread between two passes, and return its result as a future."""
        future: Future[T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._stopping:
                    raise InferenceError("the decode thread has ended.")
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - passed to the caller
                future.set_exception(error)

        self._inbox.put(command)
        return future

    def pause(self, wait: bool) -> Future[None]:
        """Stop generation after the current pass, or (`wait`) once every running job has ended.

        Waiting jobs stay queued.
        """
        future: Future[None] = Future()
        self._inbox.put(lambda: self._pause(wait, future))
        return future

    def resume(self) -> Future[float]:
        """Resume generation after `pause`.

        Returns:
            The duration of the pause in seconds.
        """
        return self.run(self._resume)

    def sleep(self) -> Future[int]:
        """Free the memory of the KV cache while paused. Later, running jobs are prefilled again; scores wait.

        Returns:
            The number of bytes by which the memory of this process shrank.
        """
        return self.run(self._sleep)

    def wake(self) -> Future[None]:
        """Allocate the KV cache again after `sleep`; `resume` does it too."""
        return self.run(self._wake)

    def commit(self, version: int, recompute: bool) -> Future[None]:
        """Serve the staged version from the next pass.

        Args:
            recompute: whether to recompute the KV cache of running jobs with the new weights. If false, they keep
                their cache.
        """
        return self.run(lambda: self._commit(version, recompute))

    def stats(self) -> dict[str, float]:
        """Return the counters; callable from any thread."""
        return {
            "running": self.table.running,
            "waiting": len(self._waiting) + self._inbox.qsize(),
            "scoring": len(self.scores.waiting),
            "generated_tokens": self.table.generated_tokens,
            "prompt_tokens": self.table.prompt_tokens,
            "prefix_tokens": self.table.prefix_tokens,
            "cache_tokens": self.model.cache.tokens,
            "cache_free_tokens": len(self.model.cache.pages.free) * PAGE,
            "scored_tokens": self.scores.scored_tokens,
            "busy_seconds": self.busy_seconds,
            "version": self.weights.version,
            "paused": float(self._paused or bool(self._draining)),
        }

    def _main(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:  # the thread's boundary: log it and end the process
            logger.critical("the decode thread died", exc_info=error)
            self._end_all({"type": "error", "message": f"{type(error).__name__}: {error}"})
            self._on_crash(error)
        else:
            self._take_commands()  # fails the commands that arrived after the last turn
            self._end_all(_SHUTDOWN)

    def _turn(self) -> None:
        """Run the pending commands, then at most one pass, of completions or of a score."""
        self.beat += 1
        self._take_commands()
        if self._draining and not self.table.running:
            self._enter_pause()
        scoring = bool(self.scores.waiting) and not self._sleeping_tokens
        admit = self._waiting and not self._paused and not self._draining and self.table.running < self.table.slots
        decode = not self._paused and bool(admit or self.table.running)
        if self._stopping or not (decode or scoring):
            return
        started = time.perf_counter()
        if scoring and not (decode and self._decode_seconds_due > 0):
            self.scores.step()
            self._decode_seconds_due = spent = time.perf_counter() - started
        else:
            try:
                if admit:
                    self._admit()
                if self.table.running:
                    self.table.step()
            except Exception as error:  # noqa: BLE001 - reported to the job that caused it
                self._isolate(error)
            spent = time.perf_counter() - started
            # generation gets as much time as the last score took
            self._decode_seconds_due -= min(spent, self._decode_seconds_due)
        self._waiting.extendleft(self.table.take_evicted())
        self.busy_seconds += spent

    def _admit(self) -> None:
        """Admit waiting jobs.

        After a failed pass, admit one at a time: each must get a token before the next is admitted.
        """
        if self._running_suspect() is not None:
            return
        candidates = self._waiting
        if self._suspect_count:
            self._suspect_count -= 1
            first = self._waiting.popleft()
            self._admitted_suspect, candidates = (first, len(first.output_ids)), deque([first])
        self.table.admit(candidates)
        if candidates is not self._waiting:
            self._waiting.extendleft(candidates)

    def _running_suspect(self) -> GenerationJob | None:
        """Return the running suspect that has no new token since its admission, or None."""
        suspect, tokens_before = self._admitted_suspect
        return next((job for job in self.table.jobs if job is suspect and len(job.output_ids) == tokens_before), None)

    def _isolate(self, error: Exception) -> None:
        """Handle a failed pass: fail the job that caused it and requeue the others.

        If the cause is unknown, all jobs are requeued as suspects and admitted one by one, so that the next failure
        has a known cause.

        Raises:
            Exception: the model cannot even process one token, so no job is the cause.
        """
        logger.error("a pass of %d completions failed", self.table.running, exc_info=error)
        suspect, jobs = self._running_suspect(), self.table.take_all()
        self.table.forget_prefixes()
        suspect = jobs[0] if len(jobs) == 1 else suspect
        self._waiting.extendleft(reversed(jobs))
        self.model.warm_up()
        self._suspect_count += len(jobs)
        if suspect is not None:
            suspect.finish({"type": "error", "message": f"{type(error).__name__}: {error}"})
            self._waiting.remove(suspect)
            self._suspect_count -= 1

    def _take_commands(self) -> None:
        """Run the commands in the inbox. If the thread is idle, wait up to `_IDLE_BEAT` seconds for one."""
        idle = self._paused or not (self.table.running or self._waiting or self._draining)
        block = idle and not (self.scores.waiting and not self._sleeping_tokens) and not self._stopping
        while True:
            try:
                command = self._inbox.get(block=block, timeout=_IDLE_BEAT if block else None)
            except queue.Empty:
                return
            command()
            block = False

    def _stop(self) -> None:
        self._stopping = True
        self._end_all(_SHUTDOWN)

    def _end_all(self, reason: dict[str, str]) -> None:
        for job in [*self.table.take_all(), *self._waiting]:
            job.finish(reason)
        self._waiting.clear()
        ended = InferenceError("the decode thread has ended.")
        self.scores.end(ended)
        for future in self._draining:
            if future.set_running_or_notify_cancel():
                future.set_exception(ended)
        self._draining.clear()

    def _abort(self, select: Callable[[GenerationJob], bool], message: str) -> int:
        selected = [job for job in [*self.table.jobs, *self._waiting] if select(job)]
        for job in selected:
            job.finish({"type": "abort", "message": message})
        if selected:
            self.table.compact()
            self._waiting = deque(job for job in self._waiting if job.finish_reason is None)
        return len(selected)

    def _pause(self, wait: bool, future: Future[None]) -> None:
        self._draining.append(future)
        if self._paused or not (wait and self.table.running):
            self._enter_pause()

    def _enter_pause(self) -> None:
        if not self._paused:
            self._paused = True
            self._paused_since = time.perf_counter()
        for future in self._draining:
            if future.set_running_or_notify_cancel():
                future.set_result(None)
        self._draining.clear()

    def _sleep(self) -> int:
        if not self._paused:
            raise InferenceError("the server must be paused before it can sleep; call /pause_generation first.")
        if self._sleeping_tokens:
            return 0
        before = used_bytes(self.model.device)
        self._waiting.extendleft(reversed(self.table.take_all()))
        self.table.forget_prefixes()
        self._sleeping_tokens = self.model.cache.tokens
        self.model.cache.allocate(0)
        return before - used_bytes(self.model.device)

    def _wake(self) -> None:
        if self._sleeping_tokens:
            self.model.cache.allocate(self._sleeping_tokens)
            self._sleeping_tokens = 0

    def _resume(self) -> float:
        self._wake()
        paused = time.perf_counter() - self._paused_since if self._paused else 0.0
        self._enter_pause()  # completes the futures of callers that still wait for the canceled drain
        self._paused = False
        return paused

    def _commit(self, version: int, recompute: bool) -> None:
        # Comparing versions is not enough: a trainer that resumed from an older step may reuse a version number.
        changed = self.weights.staged_version == version
        self.weights.commit(version)
        if changed:
            self.table.forget_prefixes()
            if recompute:
                self._waiting.extendleft(reversed(self.table.take_all()))
        logger.info("serving version %d", version)
