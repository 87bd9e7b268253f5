"""Sampling and penalties, vectorised over rows, with randomness that depends on nothing but seed and position.

A row draws one uniform number per position from a counter-based generator and inverts the cumulative
distribution with it. So the same seed, prompt and weights give the same tokens whatever else is in the batch
and wherever an interrupted answer is continued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from rl_inference.embedded_server.job import GenerationJob

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def _shift(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014), on int64 with wrap-around."""
    bits = (bits ^ _shift(bits, 30)) * _MIX_1
    bits = (bits ^ _shift(bits, 27)) * _MIX_2
    return bits ^ _shift(bits, 31)


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A number in [0, 1) per (seed, position): the position-th output of the seed's own splitmix64 stream,
    whose start is itself mixed so that neighbouring seeds share nothing. The same on every device.

    Args:
        seeds, positions: int64 [rows].

    Returns:
        float64 [rows].
    """
    bits = _mix(_mix(seeds + _GOLDEN) + (positions + 1) * _GOLDEN)
    return _shift(bits, 11).double() * 2.0**-53


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
        # tokens that came back with the prompt included
        answers = [job.prompt[len(job.prompt) - job.resumed :] + job.output_ids for job in jobs]
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


def _places(rows: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(row, token) of every token, int64 [tokens] each."""
    lengths = torch.tensor([len(row) for row in rows])
    row = torch.arange(len(rows)).repeat_interleave(lengths)
    token = torch.tensor(list(chain.from_iterable(rows)), dtype=torch.int64)
    return row.to(device), token.to(device)


@dataclass
class SamplingBatch:
    """The sampling settings of some rows as tensors. Made when the rows change, used for many steps."""

    temperature: torch.Tensor
    """float32 [rows, 1]; 1 for greedy rows."""
    seeds: torch.Tensor
    """int64 [rows]."""
    greedy: torch.Tensor | None
    """bool [rows]; None if no row is."""
    any_random: bool
    """Whether some row is not greedy."""
    tempered: bool
    """Whether some temperature is not 1."""
    blocked: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    """(row, token id, first position at which it is allowed), int64 [pairs] each; None if nothing is ever
    blocked."""
    truncated: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None
    """(rows that truncate, top_k [r, 1], top_p [r, 1], min_p [r, 1]); None if none does."""
    penalties: Penalties | None = None
    """Those of the rows that have some, counting along; None if none does."""

    @classmethod
    def of(cls, jobs: Sequence[GenerationJob], device: torch.device) -> SamplingBatch:
        """Gather the settings of `jobs`, one row each."""
        settings = [job.generation for job in jobs]
        greedy = [s.greedy for s in settings]
        pairs = [
            (row, token, job.first_stop_position)
            for row, job in enumerate(jobs)
            if job.first_stop_position > job.length
            for token in job.blocked_ids
        ]
        rows = [row for row, s in enumerate(settings) if s.truncates]
        column = [settings[row] for row in rows]

        def tensor(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            temperature=tensor([s.temperature or 1.0 for s in settings], torch.float32)[:, None],
            seeds=tensor([job.seed for job in jobs], torch.int64),
            greedy=tensor(greedy, torch.bool) if any(greedy) else None,
            any_random=not all(greedy),
            tempered=any(s.temperature not in (0.0, 1.0) for s in settings),
            blocked=tuple(tensor(list(part), torch.int64) for part in zip(*pairs, strict=True)) if pairs else None,  # type: ignore[arg-type]
            truncated=(
                tensor(rows, torch.int64),
                tensor([s.top_k or 2**62 for s in column], torch.int64)[:, None],
                tensor([s.top_p for s in column], torch.float32)[:, None],
                tensor([s.min_p for s in column], torch.float32)[:, None],
            )
            if rows
            else None,
            penalties=Penalties.of(jobs, device),
        )

    def sample(self, logits: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw the next token of every row.

        Args:
            logits: of any float dtype, [rows, vocab].
            positions: where the drawn tokens will stand, int64 [rows].

        Returns:
            token ids int64 [rows], and their log_softmax(logits / temperature) over the full vocabulary,
        float32 [rows], before penalties and truncation."""
        logits = logits.float()
        logprobs = torch.log_softmax(logits / self.temperature if self.tempered else logits, dim=-1)
        allowed = self._truncate(self._block(self._penalize(logits, logprobs), positions))
        tokens = allowed.argmax(-1) if self.greedy is not None else None
        if self.any_random:
            drawn = self._draw(allowed, positions)
            tokens = drawn if tokens is None else torch.where(self.greedy, tokens, drawn)  # type: ignore[arg-type]
        assert tokens is not None
        if self.penalties is not None:
            self.penalties.count(tokens)
        return tokens, logprobs.gather(1, tokens[:, None])[:, 0]

    def _penalize(self, logits: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
        """Tempered and penalised logits in the rows that have penalties, log-probs in the others."""
        if self.penalties is None:
            return logprobs
        rows = self.penalties.rows
        return logprobs.index_copy(0, rows, self.penalties.apply(logits) / self.temperature[rows])

    def _block(self, logprobs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Forbid end tokens before a row's minimum length."""
        if self.blocked is None:
            return logprobs
        rows, tokens, allowed_from = self.blocked
        values = logprobs[rows, tokens].masked_fill(positions[rows] < allowed_from, float("-inf"))
        return logprobs.index_put((rows, tokens), values)

    def _truncate(self, logprobs: torch.Tensor) -> torch.Tensor:
        """Top-k, then top-p of what is left, then min-p relative to the likeliest; -inf elsewhere."""
        if self.truncated is None:
            return logprobs
        rows, top_k, top_p, min_p = self.truncated
        some = logprobs[rows]
        ordered, order = some.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(ordered.shape[-1], device=ordered.device)
        ordered = ordered.masked_fill(rank >= top_k, float("-inf"))
        probs = ordered.softmax(-1)
        before = probs.cumsum(-1) - probs
        # a top-p of 1 is off: rounding of the sum must not cut the tail
        keep = ((before < top_p) | (top_p >= 1)) & (probs >= min_p * probs[:, :1]) & (rank < top_k)
        keep[:, 0] = True  # whatever float32 makes of a tiny top-p
        kept = torch.empty_like(keep).scatter_(1, order, keep)
        return logprobs.index_copy(0, rows, some.masked_fill(~kept, float("-inf")))

    def _draw(self, logprobs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The token whose part of the cumulative distribution the row's uniform number falls into. Never one
        of mass 0: the first entry that exceeds u * total always has some, and u < 1."""
        peak = logprobs.amax(-1, keepdim=True)
        mass = (logprobs - peak).exp_().cumsum(-1, dtype=torch.float64)
        threshold = uniforms(self.seeds, positions)[:, None] * mass[:, -1:]
        return torch.searchsorted(mass, threshold, right=True)[:, 0].clamp_(max=logprobs.shape[1] - 1)
