"""The slots: which job is in which row, and the forward passes that move them on.

Running jobs always occupy rows 0..n-1, so every pass works on a view of the cache. When one ends, the last
one moves into its place."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from rl_inference.server.job import GenerationJob
from rl_inference.server.model import SlotModel
from rl_inference.server.sampling import SamplingBatch
from rl_inference.server.stops import matched_stop


class SlotTable:
    """Running jobs by row. Belongs to the decode thread.

    Args:
        model: the model and its cache.
        slots: rows.
        prefill_tokens: tokens, padding included, of one prefill pass at most.
        version: the version of the weights now, stamped on every token at the step that samples it.
        rescore: take the log-probs of an answer from one forward pass over all of it when it ends (see
            `ServerConfig.deterministic`); they appear with its end only.
    """

    def __init__(
        self, model: SlotModel, slots: int, prefill_tokens: int, version: Callable[[], int], rescore: bool = False
    ) -> None:
        self.model = model
        self.slots = slots
        self.jobs: list[GenerationJob] = []
        self.generated_tokens = 0
        self._prefill_tokens = prefill_tokens
        self._version = version
        self._rescore = rescore
        self._sampling: SamplingBatch | None = None
        self._inputs = torch.empty(0)
        self._positions = torch.empty(0)
        self._longest = 0

    @torch.inference_mode()
    def admit(self, waiting: deque[GenerationJob]) -> None:
        """Give free rows to the first waiting jobs, as many as one prefill pass has room for.

        The members of a group share their prompt: only the first of them is prefilled, and sampled from. The
        others copy its keys and values and join the next decode step with the prompt's last token. The first
        may be running already, as long as its prompt was read with the weights that are served now.
        """
        firsts, copies = self._choose(waiting)
        first, version = len(self.jobs), self._version()
        self._sampling = None
        self.jobs.extend(firsts)
        logits = self.model.prefill([job.tokens for job in firsts], first) if firsts else None
        if copies:
            row_of = {id(job): row for row, job in enumerate(self.jobs)}
            sources = [row_of[id(source)] for source, _ in copies]
            targets = range(len(self.jobs), len(self.jobs) + len(copies))
            self.model.cache.copy_rows(sources, list(targets), max(job.length for _, job in copies))
            self.jobs.extend(job for _, job in copies)
        for job in self.jobs[first:]:
            job.cache_version = version
        if logits is not None:
            positions = torch.tensor([job.length for job in firsts], device=logits.device)
            self._record(firsts, *SamplingBatch.of(firsts, logits.device).sample(logits, positions))

    def _choose(
        self, waiting: deque[GenerationJob]
    ) -> tuple[list[GenerationJob], list[tuple[GenerationJob, GenerationJob]]]:
        """Take jobs from the front.

        Returns:
            those to prefill, and (source, job) where another one has the same tokens in its cache.
        """
        version, longest = self._version(), 0
        known = {tuple(job.prompt): job for job in self.jobs if job.cache_version == version}
        firsts: list[GenerationJob] = []
        copies: list[tuple[GenerationJob, GenerationJob]] = []
        while waiting and len(self.jobs) + len(firsts) + len(copies) < self.slots:
            tokens = tuple(waiting[0].tokens)
            if tokens in known:
                copies.append((known[tokens], waiting.popleft()))
                continue
            if firsts and max(longest, len(tokens)) * (len(firsts) + 1) > self._prefill_tokens:
                break
            longest = max(longest, len(tokens))
            known[tokens] = waiting[0]
            firsts.append(waiting.popleft())
        return firsts, copies

    @torch.inference_mode()
    def step(self) -> None:
        """Generate one token for every running job."""
        if self._sampling is None:
            self._gather()
        assert self._sampling is not None
        logits = self.model.decode(self._inputs, self._positions, self._longest)
        self._positions += 1
        self._longest += 1
        self._inputs, logprobs = self._sampling.sample(logits, self._positions)
        self._record(self.jobs, self._inputs, logprobs)

    def _gather(self) -> None:
        """Make the tensors of the running jobs anew, after rows changed. Each goes on from its last token."""
        device = self.model.device
        places = [job.length - 1 for job in self.jobs]
        self._sampling = SamplingBatch.of(self.jobs, device)
        self._inputs = torch.tensor([(job.output_ids or job.prompt)[-1] for job in self.jobs], device=device)
        self._positions = torch.tensor(places, device=device)
        self._longest = max(places)

    def _record(self, jobs: list[GenerationJob], tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Append the sampled tokens and end the jobs that are done. The one transfer to the host per pass."""
        ids, values = torch.stack((tokens.double(), logprobs.double())).tolist()
        version, ended = self._version(), False
        for job, token, logprob in zip(jobs, map(int, ids), values, strict=True):
            job.append(token, None if self._rescore else logprob, version)
            reason = self._end_of(job, token, logprob)
            if reason is not None:
                if self._rescore:
                    job.logprobs = self.model.score(job.tokens, job.generation.temperature)[len(job.prompt) :]
                job.finish(reason)
                ended = True
        self.generated_tokens += len(jobs)
        if ended:
            self.compact()

    def _end_of(self, job: GenerationJob, token: int, logprob: float) -> dict[str, Any] | None:
        """Why a job ends with the token that it got last; None if it goes on."""
        if math.isnan(logprob):
            return {"type": "error", "message": f"version {self._version()} of the weights computes nan"}
        if token in job.end_ids:
            return {"type": "stop", "matched": token}
        if job.generation.stop and (text := matched_stop(job, self.model.tokenizer)) is not None:
            return {"type": "stop", "matched": text}
        if len(job.output_ids) >= job.generation.max_new_tokens:
            return {"type": "length", "length": len(job.output_ids)}
        return None

    @torch.inference_mode()
    def compact(self) -> None:
        """Give up the rows of ended jobs, moving the last running ones into them."""
        running = [row for row, job in enumerate(self.jobs) if job.finish_reason is None]
        kept = len(running)
        movers = [row for row in running if row >= kept]
        holes = [row for row in range(kept) if self.jobs[row].finish_reason is not None]
        if movers:
            self.model.cache.copy_rows(movers, holes, max(self.jobs[row].length for row in movers))
        for source, target in zip(movers, holes, strict=True):
            self.jobs[target] = self.jobs[source]
        del self.jobs[kept:]
        self._sampling = None

    def take_all(self) -> list[GenerationJob]:
        """Empty the slots; the jobs keep their tokens and can be admitted again."""
        jobs, self.jobs, self._sampling = self.jobs, [], None
        return jobs
