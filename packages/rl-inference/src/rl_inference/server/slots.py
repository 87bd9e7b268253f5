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

from rl_inference.server.attention import Segment, TokenPass
from rl_inference.server.cache import BLOCK
from rl_inference.server.job import GenerationJob
from rl_inference.server.model import SlotModel
from rl_inference.server.sampling import SamplingBatch

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
        self._prefill_tokens = prefill_tokens
        self._version = version
        self._rescore = rescore
        self._free = list(range(slots))
        self._prefixes = PrefixIndex()
        self._prefix_version = version()
        self._reading: deque[GenerationJob] = deque()
        self._writing: list[GenerationJob] = []
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
        """Give free slots to waiting jobs, first come first served.

        What another sequence has read with the weights that are served now is copied instead of read again. A job
        whose prompt is just being read by another one waits for it: the members of a group share one prefill.
        """
        version = self._version()
        if version != self._prefix_version:
            self._prefixes.clear()
            self._prefix_version = version
        being_read = {tuple(job.tokens) for job in self._reading if job.cache_version == version}
        copies: list[tuple[int, int, int]] = []
        left: list[GenerationJob] = []
        while waiting and self._free:
            job = waiting.popleft()
            tokens = job.tokens
            if (key := tuple(tokens)) in being_read:
                left.append(job)
                continue
            known = None if self._rescore else self._prefixes.find(tokens)
            job.slot, job.cache_version = heapq.heappop(self._free), version
            self._prefixes.forget(job.slot)
            job.read = 0
            if known is not None:
                source, job.read = known
                copies.append((source, job.slot, job.read))
            if job.read + 1 < len(tokens):
                being_read.add(key)
            self._reading.append(job)
        waiting.extendleft(reversed(left))
        moved = [copy for copy in copies if copy[0] != copy[1]]
        if moved:
            sources, targets, _ = torch.tensor(moved, device=self.model.device).T
            self.model.cache.copy_slots(sources, targets, max(length for *_, length in moved))

    @torch.inference_mode()
    def step(self) -> None:
        """One pass: the next token of every answer, and of the prompts what the budget allows."""
        parts = self._next_parts()
        if self._rows is None:  # some have ended; each of the others goes on from its last token
            self._writing.sort(key=lambda job: job.slot)
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
        for job, token, logprob in zip(self._writing, map(int, ids), values, strict=True):
            job.append(token, None if self._rescore else logprob, version)
            reason = self._end_of(job, token, logprob)
            if reason is not None:
                if self._rescore:
                    job.logprobs = self.model.score(job.tokens, job.generation.temperature)[len(job.prompt) :]
                job.finish(reason)
                ended = True
        self.generated_tokens += len(ids)
        if ended:
            self.compact()

    def _end_of(self, job: GenerationJob, token: int, logprob: float) -> dict[str, Any] | None:
        """Why a job ends with the token that it got last; None if it goes on."""
        if math.isnan(logprob):
            return {"type": "error", "message": f"version {self._version()} of the weights computes nan"}
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
            if job.finish_reason is not None:
                self._hold(job, job.tokens[:-1])  # the last token was not fed
        for job in self.jobs:
            if job.finish_reason is not None:
                heapq.heappush(self._free, job.slot)
        self._writing = [job for job in self._writing if job.finish_reason is None]
        self._reading = deque(job for job in self._reading if job.finish_reason is None)
        self._rows = None

    def take_all(self) -> list[GenerationJob]:
        """Empty the slots; the jobs keep their tokens and can be admitted again."""
        jobs = self.jobs
        for job in jobs:
            heapq.heappush(self._free, job.slot)
        self._writing, self._reading, self._rows = [], deque(), None
        return jobs

    def forget_prefixes(self) -> None:
        """The weights changed: nothing that was read before, by running jobs either, may be used by another job."""
        self._prefixes.clear()
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
        self.in_place = slots == list(range(len(slots)))
        self.sampling: SamplingBatch | None = None

    def span(self) -> TokenPass:
        """The pass that feeds each answer's last token."""
        return TokenPass(self.slots, self.positions, self.longest + 1, singles=len(self.slots), in_place=self.in_place)

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
        self.in_place = False
        self.sampling = None


class PrefixIndex:
    """Sequences by their prefixes, under one version of the weights.

    A sequence is found by hashes of its whole blocks and of all of it; a hash only proposes, tokens decide. What a slot
    held stays usable until the slot is given away, also after its job has ended.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[list[int], list[int]]] = {}
        self._slot_of: dict[int, int] = {}

    def hold(self, slot: int, tokens: list[int]) -> None:
        """Keys and values of `tokens` are in `slot` from position 0 on."""
        self.forget(slot)
        keys = _keys(tokens)
        self._held[slot] = tokens, keys
        self._slot_of.update(dict.fromkeys(keys, slot))

    def find(self, tokens: list[int]) -> tuple[int, int] | None:
        """The longest known prefix that leaves at least one token to be read.

        Returns:
            slot and length, or None.
        """
        for key in reversed(_keys(tokens)):
            slot = self._slot_of.get(key)
            if slot is None:
                continue
            held, _ = self._held[slot]
            longest = min(len(held), len(tokens))
            shared = longest if held[:longest] == tokens[:longest] else longest // BLOCK * BLOCK
            while shared and held[:shared] != tokens[:shared]:
                shared -= BLOCK
            if shared > 0:
                return slot, min(shared, len(tokens) - 1)
        return None

    def forget(self, slot: int) -> None:
        """The slot gets another sequence."""
        _, keys = self._held.pop(slot, ((), ()))
        for key in keys:
            if self._slot_of.get(key) == slot:
                del self._slot_of[key]

    def clear(self) -> None:
        """The weights changed: nothing that was read before may be used."""
        self._held.clear()
        self._slot_of.clear()


def _keys(tokens: list[int]) -> list[int]:
    """Chained hashes of the whole blocks, and last that of all tokens."""
    keys, last = [], 0
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        last = hash((last, *tokens[start : start + BLOCK]))
        keys.append(last)
    keys.append(hash((last, "end", *tokens[len(keys) * BLOCK :])))
    return keys
