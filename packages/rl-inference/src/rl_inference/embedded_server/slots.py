"""Decode slots: the position of each job in the KV cache, and the passes that advance all jobs.

One pass carries the next token of every completion and, within a budget, chunks of the prompts in prefill (chunked
prefill). Therefore a long prompt never delays the completions, and a short one costs no separate pass.
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
from rl_inference.embedded_server.model.vision import ImagePass, join
from rl_inference.embedded_server.sampling import SamplingBatch

NO_VERSION = -1
"""Cache version of a job whose keys and values come from other weights."""


class SlotTable:
    """Running jobs and their decode slots. Belongs to the decode thread.

    Args:
        model: the model and its cache.
        slots: maximum number of running sequences.
        prefill_tokens: maximum number of prompt tokens per pass.
        version: returns the current version of the weights, which is stamped on every sampled token.
        rescore: compute the log-probs of a completion in one forward pass over the whole sequence when it ends (see
            `ServeSpec.deterministic`). They are available only then, and no prompt uses a cached prefix.
    """

    def __init__(
        self, model: SlotModel, slots: int, prefill_tokens: int, version: Callable[[], int], rescore: bool = False
    ) -> None:
        self.model = model
        self.slots = slots
        self.generated_tokens = 0
        self.prompt_tokens = 0
        """Number of prompt tokens of all jobs that got a slot."""
        self.prefix_tokens = 0
        """Number of these tokens that came from a cached prefix."""
        self._prefill_tokens = prefill_tokens
        self._version = version
        self._rescore = rescore
        self._free_slots = list(range(slots))
        self._cached_slots: dict[int, None] = {}
        """Slots without a job that hold a cached prefix, the least recently used first."""
        self._prefixes = PrefixIndex()
        self._prefix_version = version()
        self._prefilling: deque[GenerationJob] = deque()
        self._decoding: list[GenerationJob] = []
        self._evicted: list[GenerationJob] = []
        self._passes_with_room = 0
        """Number of passes for which all decoding jobs have room in the cache."""
        self._rows: _DecodeRows | None = None

    @property
    def jobs(self) -> list[GenerationJob]:
        """Running jobs."""
        return [*self._decoding, *self._prefilling]

    @property
    def running(self) -> int:
        """Number of running jobs."""
        return len(self._decoding) + len(self._prefilling)

    @torch.inference_mode()
    def admit(self, waiting: deque[GenerationJob]) -> None:
        """Give free slots to waiting jobs, first come first served, as long as the cache has room for their prompts.

        Prefixes that another sequence prefilled with the current weights are shared instead of prefilled again. A
        job waits while another job prefills the same prompt: the members of a group share one prefill.
        """
        version = self._version()
        if version != self._prefix_version:
            self._clear_prefixes()
            self._prefix_version = version
        prefill_keys = {job.prefix_keys[-1] for job in self._prefilling if job.cache_version == version}
        skipped: list[GenerationJob] = []
        while waiting and (self._free_slots or self._cached_slots) and len(skipped) < self.slots:
            job = waiting.popleft()
            if job.keyed_length != job.length:
                job.prefix_keys, job.keyed_length = prefix_keys(job.identity), job.length
            key = job.prefix_keys[-1]
            if key in prefill_keys:
                skipped.append(job)
                continue
            if not self._assign_slot(job):
                skipped.append(job)
                break
            job.cache_version = version
            if job.read + 1 < job.length:
                prefill_keys.add(key)
            self._prefilling.append(job)
        waiting.extendleft(reversed(skipped))

    def _assign_slot(self, job: GenerationJob) -> bool:
        """Give a job a slot and pages for its tokens, and return whether there were enough pages.

        One page per running job stays in reserve.
        """
        cache = self.model.cache
        match = None if self._rescore else self._prefixes.find(job.identity, job.prefix_keys)
        source, read = match or (-1, 0)
        needed = pages_of(job.length + 1) + self.running
        if not self._evict(needed - read // PAGE, source):
            if self.running or not self._evict(needed):
                return False
            source, read = -1, 0
        if source in self._cached_slots and read >= self._prefixes.length(source) - 1:
            slot = source  # continues the cached sequence in its slot
        elif self._free_slots:
            slot = heapq.heappop(self._free_slots)
        else:
            slot = next((slot for slot in self._cached_slots if slot != source), source)
        self._cached_slots.pop(slot, None)
        self._prefixes.forget(slot)
        cache.copy(source, slot, read)
        if source in self._cached_slots:
            self._cached_slots[source] = self._cached_slots.pop(source)
        cache.grow(slot, job.length + 1)
        job.slot, job.read = slot, read
        self.prompt_tokens += job.length
        self.prefix_tokens += read
        return True

    def _evict(self, pages: int, protected_slot: int = -1) -> bool:
        """Free cached prefixes, the least recently used first, until `pages` pages are free; return whether they are.

        The prefix in `protected_slot` is never freed.
        """
        for slot in [slot for slot in self._cached_slots if slot != protected_slot]:
            if len(self.model.cache.pages.free) >= pages:
                break
            self._release_slot(slot)
        return len(self.model.cache.pages.free) >= pages

    def _grow(self, slot: int, tokens: int) -> bool:
        """Allocate pages for `tokens` positions in a slot, and return whether it succeeded.

        Cached prefixes are evicted if needed.
        """
        cache = self.model.cache
        return self._evict(pages_of(tokens) - len(cache.pages.of[slot])) and cache.grow(slot, tokens)

    @torch.inference_mode()
    def make_room(self, slot: int, tokens: int) -> None:
        """Allocate pages for `tokens` positions in a slot.

        If needed, evict the jobs that joined last (see `take_evicted`), which may include the job in this slot.
        """
        while not self._grow(slot, tokens):
            job = self._prefilling.pop() if self._prefilling else self._decoding.pop()
            self._release_slot(job.slot)
            self._evicted.append(job)
            self._rows = None
            if job.slot == slot:
                break

    def take_evicted(self) -> list[GenerationJob]:
        """Return the jobs that lost their slots for lack of memory, the youngest first.

        The caller admits them again.
        """
        evicted, self._evicted = self._evicted, []
        return evicted

    def _make_room_for_decoding(self) -> None:
        """Call `make_room` for the next token of every completion."""
        for job in list(self._decoding):
            if job not in self._evicted:
                self.make_room(job.slot, job.length)
        pages = self.model.cache.pages.of
        self._passes_with_room = min(
            (len(pages[job.slot]) * PAGE - job.length + 1 for job in self._decoding), default=1
        )

    def _release_slot(self, slot: int) -> None:
        """Discard the content of a slot and free its pages."""
        self._cached_slots.pop(slot, None)
        self._prefixes.forget(slot)
        self.model.cache.pages.assign(slot, [])
        heapq.heappush(self._free_slots, slot)

    def _clear_prefixes(self) -> None:
        self._prefixes.clear()
        for slot in list(self._cached_slots):
            self._release_slot(slot)

    @torch.inference_mode()
    def step(self) -> None:
        """Run one pass: the next token of every completion, and chunks of prompts within the budget."""
        if self._passes_with_room <= 0:
            self._make_room_for_decoding()
        self._passes_with_room -= 1
        chunks = self._next_chunks()
        if self._rows is None:  # some jobs have ended; the others continue from their last token
            self._rows = _DecodeRows(self._decoding, self.model.device)
        rows = self._rows
        prefilled = [job for job, count in chunks if job.read + count == job.length]
        if chunks:
            tokens, span = self._join(rows, chunks)
        else:
            tokens, span = rows.tokens, rows.span()
            span.images = self._images(rows, [])
        logits = self.model.run(tokens, span)
        for job, count in chunks:
            job.read += count
        if chunks:
            self._prefilling = deque(job for job in self._prefilling if job.read < job.length)
        if prefilled:
            self._passes_with_room = 0
        for job in prefilled:
            self._offer_prefix(job, job.identity)
        self._decoding.extend(prefilled)
        rows.advance(prefilled, self.model.device)
        if self._decoding:
            if rows.sampling is None:
                rows.sampling = SamplingBatch.of(self._decoding, self.model.device)
            rows.tokens, logprobs = rows.sampling.sample(logits, rows.positions)
            self._record(rows.tokens, logprobs)

    def _next_chunks(self) -> list[tuple[GenerationJob, int]]:
        """Return the jobs to prefill in this pass with their numbers of tokens; smaller chunks first."""
        budget, chunks = self._prefill_tokens, []
        for job in self._prefilling:
            count = min(job.length - job.read, budget)
            if not count:
                break
            chunks.append((job, count))
            budget -= count
        return sorted(chunks, key=lambda chunk: chunk[1])

    def _join(self, rows: _DecodeRows, chunks: list[tuple[GenerationJob, int]]) -> tuple[torch.Tensor, TokenPass]:
        """Build the pass over all completions and some chunks of prompts."""
        new_ids: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        logit_indices: list[int] = []
        segments: list[Segment] = []
        decode_count, singles = len(rows.slots), len(rows.slots)
        for job, count in chunks:
            first = decode_count + len(new_ids)
            new_ids += job.tokens[job.read : job.read + count]
            slots += [job.slot] * count
            positions += range(job.read, job.read + count)
            if count == 1:
                singles += 1
            else:
                segments.append(Segment(job.slot, job.read, first, count))
            if job.read + count == job.length:
                logit_indices.append(decode_count + len(new_ids) - 1)
        device = self.model.device
        new_tokens = torch.tensor([new_ids, slots, positions], device=device)
        return torch.cat((rows.tokens, new_tokens[0])), TokenPass(
            slots=torch.cat((rows.slots, new_tokens[1])),
            positions=torch.cat((rows.positions, new_tokens[2])),
            longest=max(rows.longest, max(positions)) + 1,
            singles=singles,
            segments=tuple(segments),
            logit_indices=torch.cat(
                (torch.arange(decode_count, device=device), torch.tensor(logit_indices, device=device).long())
            ),
            images=self._images(rows, chunks),
        )

    def _images(self, rows: _DecodeRows, chunks: list[tuple[GenerationJob, int]]) -> ImagePass | None:
        """Return the rotary positions of a pass and the images of its chunks, or None for a model of texts."""
        vision = self.model.vision
        if vision is None:
            return None
        none = torch.empty(0, dtype=torch.int64, device=self.model.device)
        parts = [ImagePass(rows.rotary(vision.axes), none)]
        for job, count in chunks:
            if job.images is None:
                positions = torch.arange(job.read, job.read + count, device=self.model.device)
                parts.append(ImagePass(positions.expand(vision.axes, -1), none))
            else:
                parts.append(vision.chunk(job.images, job.read, count))
        return join(parts)

    def _record(self, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Append the sampled tokens and end the completed jobs. This is the only transfer to the host in a pass."""
        ids, values = torch.stack((tokens.double(), logprobs.double())).tolist()
        version, ended = self._version(), False
        self.generated_tokens += len(ids)  # before a client can see that a completion is done
        for job, token, logprob in zip(self._decoding, map(int, ids), values, strict=True):
            job.append(token, None if self._rescore else logprob, version)
            reason = self._finish_reason(job, token, logprob)
            if reason is not None:
                if self._rescore:
                    job.logprobs = self.model.score(job.tokens, job.generation.temperature)[len(job.prompt) :]
                job.finish(reason)
                ended = True
        if ended:
            self.compact()

    def _finish_reason(self, job: GenerationJob, token: int, logprob: float) -> dict[str, Any] | None:
        """Return the reason why a job ends with its newest token, or None if it continues."""
        if not math.isfinite(logprob):
            return {
                "type": "error",
                "message": f"version {self._version()} of the weights produces a log-prob of {logprob}.",
            }
        if token in job.end_ids:
            return {"type": "stop", "matched": token}
        if job.generation.stop and (text := job.matched_stop(self.model.tokenizer)) is not None:
            return {"type": "stop", "matched": text}
        if len(job.output_ids) >= job.generation.max_new_tokens:
            return {"type": "length", "length": len(job.output_ids)}
        return None

    def compact(self) -> None:
        """Give up the slots of ended jobs. Their content stays usable as a prefix until the slot is assigned again."""
        for job in self._decoding:
            if job.finish_reason is not None and job.finish_reason["type"] != "error":
                self._offer_prefix(job, job.identity[:-1])  # the last token was not fed
        for job in self.jobs:
            if job.finish_reason is None:
                continue
            if job.slot in self._prefixes and job.finish_reason["type"] != "error":
                self._cached_slots[job.slot] = None
            else:  # the slot may contain NaN
                self._release_slot(job.slot)
        self._decoding = [job for job in self._decoding if job.finish_reason is None]
        self._prefilling = deque(job for job in self._prefilling if job.finish_reason is None)
        self._rows = None

    def take_all(self) -> list[GenerationJob]:
        """Empty the slots and return the jobs; they keep their tokens and can be admitted again."""
        jobs = self.jobs
        for job in jobs:
            self._release_slot(job.slot)
        self._decoding, self._prefilling, self._rows = [], deque(), None
        return [*jobs, *reversed(self.take_evicted())]

    def forget_prefixes(self) -> None:
        """Discard all cached prefixes and encoded images after a change of the weights.

        Later jobs cannot share prefixes of running jobs either.
        """
        self._clear_prefixes()
        if self.model.vision is not None:
            self.model.vision.forget()
        for job in self.jobs:
            job.cache_version = NO_VERSION

    def _offer_prefix(self, job: GenerationJob, tokens: list[int]) -> None:
        """Register the content of a job's slot as a prefix, if the current weights computed all of it."""
        if job.cache_version == self._version() == self._prefix_version:
            self._prefixes.hold(job.slot, tokens)


class _DecodeRows:
    """Tensors of the jobs that decode, one row per job, kept from pass to pass.

    Args:
        jobs: jobs in the order of the rows.
    """

    def __init__(self, jobs: list[GenerationJob], device: torch.device) -> None:
        positions = [job.length - 1 for job in jobs]
        slots = [job.slot for job in jobs]
        self.tokens = torch.tensor([(job.output_ids or job.prompt)[-1] for job in jobs], device=device).long()
        self.positions = torch.tensor(positions, device=device).long()
        self.slots = torch.tensor(slots, device=device).long()
        self.deltas = torch.tensor([_delta(job) for job in jobs], device=device).long()
        self.longest = max(positions, default=0)
        self.sampling: SamplingBatch | None = None

    def span(self) -> TokenPass:
        """Return the pass that feeds the last token of each completion."""
        return TokenPass(self.slots, self.positions, self.longest + 1, singles=len(self.slots))

    def rotary(self, axes: int) -> torch.Tensor:
        """Return the rotary positions of the last tokens, int64 [axes, rows]."""
        return (self.positions + self.deltas).expand(axes, -1)

    def advance(self, new_jobs: list[GenerationJob], device: torch.device) -> None:
        """Move each position to the next token after a pass, and add rows for the jobs that finished prefill."""
        self.positions = self.positions + 1
        self.longest += 1
        if not new_jobs:
            return
        lengths = [job.length for job in new_jobs]
        self.positions = torch.cat((self.positions, torch.tensor(lengths, device=device)))
        self.slots = torch.cat((self.slots, torch.tensor([job.slot for job in new_jobs], device=device)))
        self.deltas = torch.cat((self.deltas, torch.tensor([_delta(job) for job in new_jobs], device=device)))
        self.longest = max(self.longest, *lengths)
        self.sampling = None


def _delta(job: GenerationJob) -> int:
    return 0 if job.images is None else job.images.delta
