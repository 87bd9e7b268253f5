"""Scoring of given tokens: like a generation, a score is a job that waits for the decode thread."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rl_inference.embedded_server.requests import Score, check_ids, check_temperature

if TYPE_CHECKING:
    from rl_inference.embedded_server.model.slot_model import SlotModel
    from rl_inference.embedded_server.slots import SlotTable
    from rl_inference.embedded_server.weights import ServedWeights


@dataclass(eq=False)
class ScoreJob:
    """A sequence to score."""

    ids: list[int]
    """Token ids of the sequence."""
    temperature: float
    """Sampling temperature, by which the logits are divided."""
    before: bool = False
    """Score with the weights served before the last commit. Nothing may be staged meanwhile."""
    done: Future[tuple[list[float], int]] = field(default_factory=Future)
    """Future of the log-probs (entry 0 is 0) and of the version whose weights computed them."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probs computed so far."""
    version: int = -1
    """Version of the weights that computed `logprobs`."""


def to_score_job(request: Score, model: SlotModel) -> ScoreJob:
    """Return the job of a request.

    Raises:
        InferenceError: the request is invalid.
    """
    job = ScoreJob(check_ids(request.input_ids, model), check_temperature(request.temperature), request.before)
    if model.vision is not None:
        model.vision.check_placeholders(job.ids)
    return job


class ScoreQueue:
    """Sequences that wait to be scored, first come first served. Belongs to the decode thread.

    A sequence of up to `part` tokens takes one pass. A longer sequence takes several passes, and stores its keys and
    values in pages of the cache.

    Args:
        part: maximum number of tokens per pass; 0: no limit.
    """

    def __init__(self, model: SlotModel, weights: ServedWeights, table: SlotTable, part: int) -> None:
        self.waiting: deque[ScoreJob] = deque()
        self.scored_tokens = 0
        self._model = model
        self._weights = weights
        self._table = table
        self._chunk = part and min(part, model.block)

    def step(self) -> None:
        """Run one pass, for the sequence that has waited longest."""
        job, failure = self.waiting[0], None
        try:
            if not job.done.cancelled():
                with self._weights.before() if job.before else nullcontext():
                    self._score(job)
                if len(job.logprobs) < len(job.ids):
                    return
        except Exception as error:  # noqa: BLE001 - passed to the caller
            failure = error
        self.waiting.popleft()  # before the result is set, so that the stats count no job with a delivered result
        self._model.cache.pages.assign(self._model.cache.slots, [])
        if not job.done.set_running_or_notify_cancel():
            return
        if failure is None:
            job.done.set_result((job.logprobs, job.version))
        else:
            job.done.set_exception(failure)

    def _score(self, job: ScoreJob) -> None:
        """Score the next chunk of the sequence, or all of it."""
        length, version = len(job.ids), self._weights.version
        if job.version != version:
            job.logprobs, job.version = [], version
        if not self._chunk or length <= self._chunk:
            job.logprobs = self._model.score(job.ids, job.temperature)
            self.scored_tokens += length
            return
        start = max(len(job.logprobs) - 1, 0)
        count = min(self._chunk, length - 1 - start)
        self._table.make_room(self._model.cache.slots, start + count)
        logprobs = self._model.score_part(job.ids, start, count, job.temperature)
        job.logprobs = [*(job.logprobs or [0.0]), *logprobs]
        self.scored_tokens += count

    def end(self, error: Exception) -> None:
        """Fail all waiting jobs with `error`."""
        for job in self.waiting:
            if job.done.set_running_or_notify_cancel():
                job.done.set_exception(error)
        self.waiting.clear()
