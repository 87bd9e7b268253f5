"""Penalties on tokens that prompt or answer already have, vectorised over the rows that ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch

from rl_inference.server.job import GenerationJob


class Penalties:
    """Presence, frequency and repetition penalties of some rows, and what their sequences hold so far.

    With c the number of times that a token stands in the answer, and its logit x:

        x <- x / r if x > 0 else x * r     where prompt or answer have the token (r: repetition; Keskar et al.
                                           2019, CTRL, section 4.1, which has only the division)
        x <- x - f * c - p * [c > 0]       (f: frequency, p: presence; as in OpenAI's API)

    in this order, before the temperature, which is what vLLM does (`apply_penalties`). Tokens of an
    interrupted answer that came back with the prompt count as its answer.

    Args:
        rows: which rows of the batch ask for penalties.
        jobs: their jobs, in that order.
    """

    def __init__(self, rows: list[int], jobs: Sequence[GenerationJob], device: torch.device) -> None:
        self.rows = torch.tensor(rows, device=device)
        settings = [
            (s.repetition_penalty, s.frequency_penalty, s.presence_penalty) for s in (j.generation for j in jobs)
        ]
        repetition, frequency, presence = torch.tensor(settings, device=device).T[:, :, None]
        self._repetition, self._frequency, self._presence = repetition, frequency, presence
        answers = [_answer(job) for job in jobs]
        self._prompts = _places([job.prompt for job in jobs], device)
        self._answers = _places(answers, device)
        self._seen = torch.empty(0)
        self._counts: torch.Tensor | None = None

    @classmethod
    def of(cls, jobs: Sequence[GenerationJob], device: torch.device) -> Penalties | None:
        """Those of a batch's jobs; None if none asks for any."""
        rows = [row for row, job in enumerate(jobs) if job.generation.penalizes]
        return cls(rows, [jobs[row] for row in rows], device) if rows else None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """The penalised logits of these rows.

        Args:
            logits: of the whole batch, before the temperature, float32 [batch, vocab].

        Returns:
            float32 [rows, vocab].
        """
        if self._counts is None:
            shape = (len(self.rows), logits.shape[1])
            self._counts = logits.new_zeros(shape).index_put_(self._answers, logits.new_ones(()), accumulate=True)
            self._seen = (self._counts > 0).index_put_(
                self._prompts, torch.ones_like(self._counts[0, 0], dtype=torch.bool)
            )
        some = logits[self.rows]
        repeated = torch.where(some > 0, some / self._repetition, some * self._repetition)
        some = torch.where(self._seen, repeated, some)
        return some - self._frequency * self._counts - self._presence * (self._counts > 0)

    def count(self, tokens: torch.Tensor) -> None:
        """Note what was drawn.

        Args:
            tokens: of the whole batch, int64 [batch]."""
        assert self._counts is not None
        drawn = tokens[self.rows, None]
        self._counts.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=self._counts.dtype))
        self._seen.scatter_(1, drawn, True)


def _answer(job: GenerationJob) -> list[int]:
    """Tokens of the answer, those included that came back with the prompt."""
    return job.prompt[len(job.prompt) - job.resumed :] + job.output_ids


def _places(rows: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(row, token) of every token, int64 [tokens] each."""
    lengths = torch.tensor([len(row) for row in rows])
    row = torch.arange(len(rows)).repeat_interleave(lengths)
    token = torch.tensor(list(chain.from_iterable(rows)), dtype=torch.int64)
    return row.to(device), token.to(device)
