"""The slots: which job is where in the cache, and the passes that move all of them on.

One pass carries the next token of every answer and, within a budget, parts of the prompts that are still being read
(chunked prefill); so a long prompt never holds up the answers, and reading a short one costs no pass of its own.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from rl_inference.embedded_server.job import GenerationJob
from rl_inference.embedded_server.model.attention import Segment, TokenPass
from rl_inference.embedded_server.model.pages import PAGE, PrefixIndex, pages_of, prefix_keys
from rl_inference.embedded_server.model.slot_model import SlotModel
from rl_inference.embedded_server.sampling import SamplingBatch

NO_VERSION = -1
"""Cache version of a job whose slot holds what other weights have read."""


class SlotTable:
    """Running jobs. Belongs to the decode thread.

    Args:
        model: the model and its cache.
        slots: how many sequences at the same time.
        prefill_tokens: prompt tokens of one pass at most.
        version: the version of the weights now, stamped on every token at the step that samples it.
        rescore: take the log-probs of an answer from one forward pass over all of it when it ends (see
            `ServeSpec.deterministic`); they appear with its end only. Every prompt is then read from its start.
    """

    def __init__(
        self, model: SlotModel, slots: int, prefill_tokens: int, version: Callable[[], int], rescore: bool = False
    ) -> None:
        self.model = model
        self.slots = slots
        self.generated_tokens = 0
        self.prompt_tokens = 0
        """Of all jobs that got a slot."""
        self.prefix_tokens = 0
        """Of these, what another sequence had read."""
        self._prefill_tokens = prefill_tokens
        self._version = version
        self._rescore = rescore
        self._empty = list(range(slots))
        self._idle: dict[int, None] = {}
        """Slots without a job that hold a prefix, the least recently used first."""
        self._prefixes = PrefixIndex()
        self._prefix_version = version()
        self._reading: deque[GenerationJob] = deque()
        self._writing: list[GenerationJob] = []
        self._lost: list[GenerationJob] = []
        self._passes = 0
        """So many passes have room in the cache."""
        self._rows: _Rows | None = None

    @property
    def jobs(self) -> list[GenerationJob]:
        """Running jobs."""
        return [*self._writing, *self._reading]

    @property
    def running(self) -> int:
        """How many jobs run."""
        return len(self._writing) + len(self._reading)

    @torch.inference_mode()
    def admit(self, waiting: deque[GenerationJob]) -> None:
        """Give free slots to waiting jobs, first come first served, as long as there is memory for their prompts.

        What another sequence has read with the weights that are served now is shared instead of read again. A job
        whose prompt is just being read by another one waits for it: the members of a group share one prefill.
        """
        version = self._version()
        if version != self._prefix_version:
            self._clear_prefixes()
            self._prefix_version = version
        being_read = {job.prefix_keys[-1] for job in self._reading if job.cache_version == version}
        left: list[GenerationJob] = []
        while waiting and (self._empty or self._idle) and len(left) < self.slots:
            job = waiting.popleft()
            if job.keyed_length != job.length:
                job.prefix_keys, job.keyed_length = prefix_keys(job.tokens), job.length
            key = job.prefix_keys[-1]
            if key in being_read:
                left.append(job)
                continue
            if not self._place(job):
                left.append(job)
                break
            job.cache_version = version
            if job.read + 1 < job.length:
                being_read.add(key)
            self._reading.append(job)
        waiting.extendleft(reversed(left))

    def _place(self, job: GenerationJob) -> bool:
        """Give a job a slot and pages for its tokens; False if there are too few. Each answer that runs is left one."""
        cache = self.model.cache
        found = None if self._rescore else self._prefixes.find(job.tokens, job.prefix_keys)
        source, read = found or (-1, 0)
        needed = pages_of(job.length + 1) + self.running
        if not self._evict(needed - read // PAGE, source):
            if self.running or not self._evict(needed):
                return False
            source, read = -1, 0
        if source in self._idle and read >= self._prefixes.length(source) - 1:
            slot = source  # it goes on where that one ended
        elif self._empty:
            slot = heapq.heappop(self._empty)
        else:
            slot = next((slot for slot in self._idle if slot != source), source)
        self._idle.pop(slot, None)
        self._prefixes.forget(slot)
        cache.copy(source, slot, read)
        if source in self._idle:
            self._idle[source] = self._idle.pop(source)
        cache.grow(slot, job.length + 1)
        job.slot, job.read = slot, read
        self.prompt_tokens += job.length
        self.prefix_tokens += read
        return True

    def _evict(self, pages: int, kept: int = -1) -> bool:
        """Have so many free pages, at the cost of prefixes, those used least recently first; `kept` is left."""
        for slot in [slot for slot in self._idle if slot != kept]:
            if len(self.model.cache.pages.free) >= pages:
                break
            self._vacate(slot)
        return len(self.model.cache.pages.free) >= pages

    def _grow(self, slot: int, tokens: int) -> bool:
        """Have pages for so many positions in a slot, at the cost of prefixes."""
        cache = self.model.cache
        return self._evict(pages_of(tokens) - len(cache.pages.of[slot])) and cache.grow(slot, tokens)

    @torch.inference_mode()
    def make_room(self, slot: int, tokens: int) -> None:
        """Have pages for so many positions in a slot, if need be those of the jobs that joined last (see
        `take_evicted`), perhaps of the slot's own."""
        while not self._grow(slot, tokens):
            job = self._reading.pop() if self._reading else self._writing.pop()
            self._vacate(job.slot)
            self._lost.append(job)
            self._rows = None
            if job.slot == slot:
                break

    def take_evicted(self) -> list[GenerationJob]:
        """Jobs that gave up their slots for want of memory, to be admitted again; the youngest first."""
        lost, self._lost = self._lost, []
        return lost

    def _make_rooms(self) -> None:
        """`make_room` for the next token of every answer."""
        for job in list(self._writing):
            if job not in self._lost:
                self.make_room(job.slot, job.length)
        pages = self.model.cache.pages.of
        self._passes = min((len(pages[job.slot]) * PAGE - job.length + 1 for job in self._writing), default=1)

    def _vacate(self, slot: int) -> None:
        """What is in a slot is not needed any more."""
        self._idle.pop(slot, None)
        self._prefixes.forget(slot)
        self.model.cache.pages.assign(slot, [])
        heapq.heappush(self._empty, slot)

    def _clear_prefixes(self) -> None:
        self._prefixes.clear()
        for slot in list(self._idle):
            self._vacate(slot)

    @torch.inference_mode()
    def step(self) -> None:
        """One pass: the next token of every answer, and of the prompts what the budget allows."""
        if self._passes <= 0:
            self._make_rooms()
        self._passes -= 1
        parts = self._next_parts()
        if self._rows is None:  # some have ended; each of the others goes on from its last token
            self._rows = _Rows(self._writing, self.model.device)
        rows = self._rows
        finished = [job for job, count in parts if job.read + count == job.length]
        if parts:
            tokens, span = self._join(rows, parts)
        else:
            tokens, span = rows.tokens, rows.span()
        logits = self.model.run(tokens, span)
        for job, count in parts:
            job.read += count
        if parts:
            self._reading = deque(job for job in self._reading if job.read < job.length)
        if finished:
            self._passes = 0
        for job in finished:
            self._hold(job, job.tokens)
        self._writing.extend(finished)
        rows.advance(finished, self.model.device)
        if self._writing:
            if rows.sampling is None:
                rows.sampling = SamplingBatch.of(self._writing, self.model.device)
            rows.tokens, logprobs = rows.sampling.sample(logits, rows.positions)
            self._record(rows.tokens, logprobs)

    def _next_parts(self) -> list[tuple[GenerationJob, int]]:
        """Which prompts are read on in this pass, and by how many tokens; shorter parts first."""
        room, parts = self._prefill_tokens, []
        for job in self._reading:
            count = min(job.length - job.read, room)
            if not count:
                break
            parts.append((job, count))
            room -= count
        return sorted(parts, key=lambda part: part[1])

    def _join(self, rows: _Rows, parts: list[tuple[GenerationJob, int]]) -> tuple[torch.Tensor, TokenPass]:
        """The pass of all answers and of some prompts' parts."""
        new: list[int] = []
        slots: list[int] = []
        places: list[int] = []
        wanted: list[int] = []
        segments: list[Segment] = []
        answers, singles = len(rows.slots), len(rows.slots)
        for job, count in parts:
            first = answers + len(new)
            new += job.tokens[job.read : job.read + count]
            slots += [job.slot] * count
            places += range(job.read, job.read + count)
            if count == 1:
                singles += 1
            else:
                segments.append(Segment(job.slot, job.read, first, count))
            if job.read + count == job.length:
                wanted.append(answers + len(new) - 1)
        device = self.model.device
        both = torch.tensor([new, slots, places], device=device)
        return torch.cat((rows.tokens, both[0])), TokenPass(
            slots=torch.cat((rows.slots, both[1])),
            positions=torch.cat((rows.positions, both[2])),
            longest=max(rows.longest, max(places)) + 1,
            singles=singles,
            segments=tuple(segments),
            wanted=torch.cat((torch.arange(answers, device=device), torch.tensor(wanted, device=device).long())),
        )

    def _record(self, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Append the sampled tokens and end the jobs that are done. The one transfer to the host per pass."""
        ids, values = torch.stack((tokens.double(), logprobs.double())).tolist()
        version, ended = self._version(), False
        self.generated_tokens += len(ids)  # before anybody learns that an answer is done
        for job, token, logprob in zip(self._writing, map(int, ids), values, strict=True):
            job.append(token, None if self._rescore else logprob, version)
            reason = self._end_of(job, token, logprob)
            if reason is not None:
                if self._rescore:
                    job.logprobs = self.model.score(job.tokens, job.generation.temperature)[len(job.prompt) :]
                job.finish(reason)
                ended = True
        if ended:
            self.compact()

    def _end_of(self, job: GenerationJob, token: int, logprob: float) -> dict[str, Any] | None:
        """Why a job ends with the token that it got last; None if it goes on."""
        if not math.isfinite(logprob):
            return {"type": "error", "message": f"version {self._version()} of the weights computes {logprob}"}
        if token in job.end_ids:
            return {"type": "stop", "matched": token}
        if job.generation.stop and (text := job.matched_stop(self.model.tokenizer)) is not None:
            return {"type": "stop", "matched": text}
        if len(job.output_ids) >= job.generation.max_new_tokens:
            return {"type": "length", "length": len(job.output_ids)}
        return None

    def compact(self) -> None:
        """Give up the slots of ended jobs. What they hold stays usable as a prefix until a slot is given away."""
        for job in self._writing:
            if job.finish_reason is not None and job.finish_reason["type"] != "error":
                self._hold(job, job.tokens[:-1])  # the last token was not fed
        for job in self.jobs:
            if job.finish_reason is None:
                continue
            if job.slot in self._prefixes and job.finish_reason["type"] != "error":
                self._idle[job.slot] = None
            else:  # there may be nan in it
                self._vacate(job.slot)
        self._writing = [job for job in self._writing if job.finish_reason is None]
        self._reading = deque(job for job in self._reading if job.finish_reason is None)
        self._rows = None

    def take_all(self) -> list[GenerationJob]:
        """Empty the slots; the jobs keep their tokens and can be admitted again."""
        jobs = self.jobs
        for job in jobs:
            self._vacate(job.slot)
        self._writing, self._reading, self._rows = [], deque(), None
        return [*jobs, *reversed(self.take_evicted())]

    def forget_prefixes(self) -> None:
        """The weights changed: nothing that was read before, by running jobs either, may be used by another job."""
        self._clear_prefixes()
        for job in self.jobs:
            job.cache_version = NO_VERSION

    def _hold(self, job: GenerationJob, tokens: list[int]) -> None:
        """Offer what is in a job's slot as a prefix, if one version of the weights, the one of now, read all of it."""
        if job.cache_version == self._version() == self._prefix_version:
            self._prefixes.hold(job.slot, tokens)


class _Rows:
    """Tensors of the answers, one row each, kept from pass to pass.

    Args:
        jobs: in the order of the rows.
    """

    def __init__(self, jobs: list[GenerationJob], device: torch.device) -> None:
        places = [job.length - 1 for job in jobs]
        slots = [job.slot for job in jobs]
        self.tokens = torch.tensor([(job.output_ids or job.prompt)[-1] for job in jobs], device=device).long()
        self.positions = torch.tensor(places, device=device).long()
        self.slots = torch.tensor(slots, device=device).long()
        self.longest = max(places, default=0)
        self.sampling: SamplingBatch | None = None

    def span(self) -> TokenPass:
        """The pass that feeds each answer's last token."""
        return TokenPass(self.slots, self.positions, self.longest + 1, singles=len(self.slots))

    def advance(self, joined: list[GenerationJob], device: torch.device) -> None:
        """After a pass: each position is that of the token to come; jobs whose prompt is read become rows."""
        self.positions = self.positions + 1
        self.longest += 1
        if not joined:
            return
        lengths = [job.length for job in joined]
        self.positions = torch.cat((self.positions, torch.tensor(lengths, device=device)))
        self.slots = torch.cat((self.slots, torch.tensor([job.slot for job in joined], device=device)))
        self.longest = max(self.longest, *lengths)
        self.sampling = None
