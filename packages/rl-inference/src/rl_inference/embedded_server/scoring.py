"""Scores: log-probs of given tokens. A score is a job as an answer is: it waits its turn for the decode thread."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_inference.embedded_server.model.slot_model import SlotModel
    from rl_inference.embedded_server.slots import SlotTable
    from rl_inference.embedded_server.weights import ServedWeights


@dataclass(eq=False)
class ScoreJob:
    """A sequence to be scored."""

    ids: list[int]
    """Token ids."""
    temperature: float
    """What logits are divided by."""
    before: bool = False
    """Whether at the weights that were served before the last commit; nothing may be staged meanwhile."""
    done: Future[tuple[list[float], int]] = field(default_factory=Future)
    """The log-probs, of which entry 0 is 0, and the version that is served when they are made."""
    logprobs: list[float] = field(default_factory=list)
    """Those of the parts so far."""
    version: int = -1
    """Under which these were made."""


class ScoreQueue:
    """Sequences that wait to be scored, first come first served. Belongs to the decode thread.

    A sequence goes through the model in one pass, and what is longer than `part` in several, over pages of the cache.

    Args:
        part: tokens of a pass at most; 0: any number.
    """

    def __init__(self, model: SlotModel, weights: ServedWeights, table: SlotTable, part: int) -> None:
        self.waiting: deque[ScoreJob] = deque()
        self.scored_tokens = 0
        self._model = model
        self._weights = weights
        self._table = table
        self._part = part and min(part, model.block)

    def step(self) -> None:
        """One pass, of the sequence that waits longest."""
        job, failure = self.waiting[0], None
        try:
            if not job.done.cancelled():
                with self._weights.before() if job.before else nullcontext():
                    self._score(job)
                if len(job.logprobs) < len(job.ids):
                    return
        except Exception as error:  # noqa: BLE001 - handed to the caller
            failure = error
        self.waiting.popleft()  # before the result: a client that has it no longer finds the job in the stats
        self._model.cache.pages.assign(self._model.cache.slots, [])
        if not job.done.set_running_or_notify_cancel():
            return
        if failure is None:
            job.done.set_result((job.logprobs, job.version))
        else:
            job.done.set_exception(failure)

    def _score(self, job: ScoreJob) -> None:
        """The next part, or all of it."""
        length, version = len(job.ids), self._weights.version
        if job.version != version:
            job.logprobs, job.version = [], version
        if not self._part or length <= self._part:
            job.logprobs = self._model.score(job.ids, job.temperature)
            self.scored_tokens += length
            return
        start = max(len(job.logprobs) - 1, 0)
        count = min(self._part, length - 1 - start)
        self._table.make_room(self._model.cache.slots, start + count)
        found = self._model.score_part(job.ids, start, count, job.temperature)
        job.logprobs = [*(job.logprobs or [0.0]), *found]
        self.scored_tokens += count

    def end(self, error: Exception) -> None:
        """Fail all that wait."""
        for job in self.waiting:
            if job.done.set_running_or_notify_cancel():
                job.done.set_exception(error)
        self.waiting.clear()
