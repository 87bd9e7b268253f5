"""The decode thread: takes jobs, generates, and lets commands in between two passes."""

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

_IDLE_BEAT = 0.5
"""Seconds after which an idle thread shows that it is alive."""
_SHUTDOWN = {"type": "abort", "message": "the server is shutting down"}


class DecodeLoop:
    """Owns model, cache and weights while it runs.

    Whatever other threads want goes through one inbox of callables that the thread runs between two passes;
    so nothing here needs a lock, and a version can only change where no token is being made. Where both are wanted,
    answers and scores each get half of the thread's time.

    Args:
        on_crash: called in the decode thread if it dies; all unfinished jobs have been ended by then.
        rescore: see `SlotTable`.
    """

    def __init__(
        self,
        model: SlotModel,
        weights: ServedWeights,
        slots: int,
        prefill_tokens: int,
        on_crash: Callable[[BaseException], object],
        rescore: bool = False,
    ) -> None:
        self.model = model
        self.weights = weights
        self.table = SlotTable(model, slots, prefill_tokens, lambda: weights.version, rescore)
        self.scores = ScoreQueue(model, weights, self.table, 0 if rescore else prefill_tokens)
        self.beat = 0
        self.busy_seconds = 0.0
        self._on_crash = on_crash
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[GenerationJob] = deque()
        self._paused = False
        self._draining: list[Future[None]] = []
        self._paused_since = 0.0
        self._asleep = 0
        """Tokens that the cache had room for when its memory was given back; 0: it has it."""
        self._owed = 0.0
        self._suspects = 0
        """How many of the waiting jobs, from the left, may be what made a pass fail."""
        self._suspect: tuple[Any, int] = (None, 0)
        """The one that was let in last of them, and how many tokens it had."""
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="decode", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """End unfinished jobs as aborted and join the thread."""
        self._inbox.put(self._stop)
        self._thread.join(timeout)

    def submit(self, job: GenerationJob) -> None:
        """Queue a job."""
        self._inbox.put(lambda: self._waiting.append(job))

    def submit_score(self, job: ScoreJob) -> None:
        """Queue a sequence to be scored, also while generation is paused."""
        self._inbox.put(lambda: self.scores.waiting.append(job))

    def abort(self, wanted: Callable[[GenerationJob], bool], message: str) -> Future[int]:
        """End the jobs that `wanted` selects, with the tokens they have.

        Returns:
            how many there were.
        """
        return self.run(lambda: self._abort(wanted, message))

    def run(self, function: Callable[[], T]) -> Future[T]:
        """Call `function` in the decode thread between two passes."""
        future: Future[T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._stopping:
                    raise InferenceError("the decode thread has ended.")
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - handed to the caller
                future.set_exception(error)

        self._inbox.put(command)
        return future

    def pause(self, wait: bool) -> Future[None]:
        """Stop generating after the current pass, or (`wait`) once every running job has ended; waiting ones
        stay where they are."""
        future: Future[None] = Future()
        self._inbox.put(lambda: self._pause(wait, future))
        return future

    def resume(self) -> Future[float]:
        """Undo `pause`.

        Returns:
            how long nothing was generated, in seconds.
        """
        return self.run(self._resume)

    def sleep(self) -> Future[int]:
        """Give the memory of the cache back, while paused. Running answers are computed anew afterwards; scores wait.

        Returns:
            how many bytes less this process has.
        """
        return self.run(self._sleep)

    def wake(self) -> Future[None]:
        """Undo `sleep`; so does `resume`."""
        return self.run(self._wake)

    def commit(self, version: int, recompute: bool) -> Future[None]:
        """Serve the staged version from the next pass on.

        Args:
            recompute: compute the KV cache of running jobs anew with the new weights, else they go on with
        what they have."""
        return self.run(lambda: self._commit(version, recompute))

    def stats(self) -> dict[str, float]:
        """Counters; read from any thread."""
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
        except BaseException as error:  # the thread's boundary: recorded, and the process is ended
            logger.critical("the decode thread died", exc_info=error)
            self._end_all({"type": "error", "message": f"{type(error).__name__}: {error}"})
            self._on_crash(error)
        else:
            self._take_commands()  # answers what came in after the last turn
            self._end_all(_SHUTDOWN)

    def _turn(self) -> None:
        """Commands, then at most one pass, of answers or of a score."""
        self.beat += 1
        self._take_commands()
        if self._draining and not self.table.running:
            self._enter_pause()
        scoring = bool(self.scores.waiting) and not self._asleep
        admit = self._waiting and not self._paused and not self._draining and self.table.running < self.table.slots
        decode = not self._paused and bool(admit or self.table.running)
        if self._stopping or not (decode or scoring):
            return
        started = time.perf_counter()
        if scoring and not (decode and self._owed > 0):
            self.scores.step()
            self._owed = spent = time.perf_counter() - started
        else:
            try:
                if admit:
                    self._admit()
                if self.table.running:
                    self.table.step()
            except Exception as error:  # noqa: BLE001 - told to the job that it is about
                self._isolate(error)
            spent = time.perf_counter() - started
            self._owed -= min(spent, self._owed)  # answers get as much time as the score before took
        self._waiting.extendleft(self.table.take_evicted())
        self.busy_seconds += spent

    def _admit(self) -> None:
        """Let waiting jobs in. After a pass failed, one at a time: each must make a token before the next comes."""
        if self._on_trial() is not None:
            return
        coming = self._waiting
        if self._suspects:
            self._suspects -= 1
            first = self._waiting.popleft()
            self._suspect, coming = (first, len(first.output_ids)), deque([first])
        self.table.admit(coming)
        if coming is not self._waiting:
            self._waiting.extendleft(coming)

    def _on_trial(self) -> GenerationJob | None:
        """The suspect that runs and has not made a token yet."""
        suspect, had = self._suspect
        return next((job for job in self.table.jobs if job is suspect and len(job.output_ids) == had), None)

    def _isolate(self, error: Exception) -> None:
        """A pass failed: end the job whose doing it is, and do again what it was about. Where it is not known whose,
        all come back one by one, and the next time it is.

        Raises:
            Exception: the model cannot even read one token; it is no job's doing.
        """
        logger.error("a pass of %d answers failed", self.table.running, exc_info=error)
        suspect, jobs = self._on_trial(), self.table.take_all()
        self.table.forget_prefixes()
        suspect = jobs[0] if len(jobs) == 1 else suspect
        self._waiting.extendleft(reversed(jobs))
        self.model.warm_up()
        self._suspects += len(jobs)
        if suspect is not None:
            suspect.finish({"type": "error", "message": f"{type(error).__name__}: {error}"})
            self._waiting.remove(suspect)
            self._suspects -= 1

    def _take_commands(self) -> None:
        """Run what is in the inbox; wait a moment for something to arrive where there is nothing else to
        do."""
        idle = self._paused or not (self.table.running or self._waiting or self._draining)
        block = idle and not (self.scores.waiting and not self._asleep) and not self._stopping
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

    def _abort(self, wanted: Callable[[GenerationJob], bool], message: str) -> int:
        chosen = [job for job in [*self.table.jobs, *self._waiting] if wanted(job)]
        for job in chosen:
            job.finish({"type": "abort", "message": message})
        if chosen:
            self.table.compact()
            self._waiting = deque(job for job in self._waiting if job.finish_reason is None)
        return len(chosen)

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
            raise InferenceError("only a paused server sleeps; pause it before.")
        if self._asleep:
            return 0
        before = used_bytes(self.model.device)
        self._waiting.extendleft(reversed(self.table.take_all()))
        self.table.forget_prefixes()
        self._asleep = self.model.cache.tokens
        self.model.cache.allocate(0)
        return before - used_bytes(self.model.device)

    def _wake(self) -> None:
        if self._asleep:
            self.model.cache.allocate(self._asleep)
            self._asleep = 0

    def _resume(self) -> float:
        self._wake()
        paused = time.perf_counter() - self._paused_since if self._paused else 0.0
        self._enter_pause()  # answers whoever still waits for a drain that is now called off
        self._paused = False
        return paused

    def _commit(self, version: int, recompute: bool) -> None:
        # not by the version: a trainer that went back may give it to other weights
        changed = self.weights.staged_version == version
        self.weights.commit(version)
        if changed:
            self.table.forget_prefixes()
            if recompute:
                self._waiting.extendleft(reversed(self.table.take_all()))
        logger.info("serving version %d", version)
