"""Sampling and penalties, vectorized over sequences, with randomness that depends only on seed and position.

Each sequence draws one uniform number per position from a counter-based generator and inverts the cumulative
distribution with it. Therefore the same seed, prompt and weights give the same tokens in any batch and after any
interruption.
"""

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


def _shift(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """Apply the finalizer of splitmix64 (Steele, Lea and Flood 2014), on int64 with wrap-around."""
    bits = (bits ^ _shift(bits, 30)) * _MIX_1
    bits = (bits ^ _shift(bits, 27)) * _MIX_2
    return bits ^ _shift(bits, 31)


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return a number in [0, 1) per (seed, position), the same on every device.

    The number is the position-th output of the seed's splitmix64 stream. The start of the stream is mixed too, so that
    neighboring seeds give independent streams.

    Args:
        seeds, positions: int64 [rows].

    Returns:
        float64 [rows].
    """
    bits = _mix(_mix(seeds + _GOLDEN) + (positions + 1) * _GOLDEN)
    return _shift(bits, 11).double() * 2.0**-53


class Penalties:
    """Presence, frequency and repetition penalties of some rows of a batch, and the token counts of their sequences.

    With c the number of times that a token occurs in the completion, and its logit x:

        x <- x / r if x > 0 else x * r     if prompt or completion contain the token (r: repetition; Keskar et al.
                                           2019, CTRL, section 4.1, which has only the division)
        x <- x - f * c - p * [c > 0]       (f: frequency, p: presence; as in OpenAI's API)

    The penalties apply in this order, before the temperature, as in vLLM (`apply_penalties`). Tokens of an interrupted
    completion at the end of the prompt count as completion.

    Args:
        rows: indices of the rows with penalties.
        jobs: jobs of these rows, in the same order.
    """

    def __init__(self, rows: list[int], jobs: Sequence[GenerationJob], device: torch.device) -> None:
        self.rows = torch.tensor(rows, device=device)
        settings = [
            (s.repetition_penalty, s.frequency_penalty, s.presence_penalty) for s in (j.generation for j in jobs)
        ]
        repetition, frequency, presence = torch.tensor(settings, device=device).T[:, :, None]
        self._repetition, self._frequency, self._presence = repetition, frequency, presence
        # includes the tokens of an interrupted completion at the end of the prompt
        completions = [job.prompt[len(job.prompt) - job.resumed :] + job.output_ids for job in jobs]
        self._prompt_indices = _token_indices([job.prompt for job in jobs], device)
        self._completion_indices = _token_indices(completions, device)
        self._seen = torch.empty(0)
        self._counts: torch.Tensor | None = None

    @classmethod
    def of(cls, jobs: Sequence[GenerationJob], device: torch.device) -> Penalties | None:
        """Return the penalties of a batch of jobs, or None if no job has any."""
        rows = [row for row, job in enumerate(jobs) if job.generation.penalizes]
        return cls(rows, [jobs[row] for row in rows], device) if rows else None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the penalized logits of the rows with penalties.

        Args:
            logits: logits of the whole batch, before the temperature, float32 [batch, vocab].

        Returns:
            float32 [rows, vocab].
        """
        if self._counts is None:
            shape = (len(self.rows), logits.shape[1])
            self._counts = logits.new_zeros(shape).index_put_(
                self._completion_indices, logits.new_ones(()), accumulate=True
            )
            self._seen = (self._counts > 0).index_put_(
                self._prompt_indices, torch.ones_like(self._counts[0, 0], dtype=torch.bool)
            )
        penalized = logits[self.rows]
        repeated = torch.where(penalized > 0, penalized / self._repetition, penalized * self._repetition)
        penalized = torch.where(self._seen, repeated, penalized)
        return penalized - self._frequency * self._counts - self._presence * (self._counts > 0)

    def count(self, tokens: torch.Tensor) -> None:
        """Add the sampled tokens to the counts that the penalties use.

        Args:
            tokens: one sampled token per row of the batch, int64 [batch]; rows without penalties are ignored.
        """
        assert self._counts is not None
        sampled = tokens[self.rows, None]
        self._counts.scatter_add_(1, sampled, torch.ones_like(sampled, dtype=self._counts.dtype))
        self._seen.scatter_(1, sampled, True)


def _token_indices(rows: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the (row, token) pairs of all tokens, int64 [tokens] each."""
    lengths = torch.tensor([len(row) for row in rows])
    row = torch.arange(len(rows)).repeat_interleave(lengths)
    token = torch.tensor(list(chain.from_iterable(rows)), dtype=torch.int64)
    return row.to(device), token.to(device)


@dataclass
class SamplingBatch:
    """Sampling settings of a batch as tensors, one row per job.

    Built when the rows change, and used for many steps.
    """

    temperature: torch.Tensor
    """float32 [rows, 1]; 1 for greedy rows."""
    seeds: torch.Tensor
    """int64 [rows]."""
    greedy: torch.Tensor | None
    """Whether each row is greedy, bool [rows]; None if no row is greedy."""
    any_random: bool
    """True if at least one row is not greedy."""
    tempered: bool
    """True if at least one temperature is not 1."""
    blocked: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    """Blocked tokens: (row, token id, first position at which it is allowed), int64 [pairs] each, or None."""
    truncated: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None
    """Truncation: (indices of rows that truncate, top_k [r, 1], top_p [r, 1], min_p [r, 1]), or None if no row
    truncates."""
    penalties: Penalties | None = None
    """Penalties of the rows that have some, with token counts; None if no row has any."""

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
        truncating = [settings[row] for row in rows]

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
                tensor([s.top_k or 2**62 for s in truncating], torch.int64)[:, None],
                tensor([s.top_p for s in truncating], torch.float32)[:, None],
                tensor([s.min_p for s in truncating], torch.float32)[:, None],
            )
            if rows
            else None,
            penalties=Penalties.of(jobs, device),
        )

    def sample(self, logits: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw the next token of every row.

        Args:
            logits: any float dtype, [rows, vocab].
            positions: positions of the drawn tokens, int64 [rows].

        Returns:
            Token ids int64 [rows], and their log_softmax(logits / temperature) over the full vocabulary, float32
            [rows], before penalties and truncation.
        """
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
        """Return penalized and tempered logits in the rows with penalties, and log-probs in the other rows."""
        if self.penalties is None:
            return logprobs
        rows = self.penalties.rows
        return logprobs.index_copy(0, rows, self.penalties.apply(logits) / self.temperature[rows])

    def _block(self, logprobs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Mask end tokens before the minimum length of a row."""
        if self.blocked is None:
            return logprobs
        rows, tokens, allowed_from = self.blocked
        values = logprobs[rows, tokens].masked_fill(positions[rows] < allowed_from, float("-inf"))
        return logprobs.index_put((rows, tokens), values)

    def _truncate(self, logprobs: torch.Tensor) -> torch.Tensor:
        """Apply top-k, then top-p to the remaining tokens, then min-p relative to the likeliest token.

        Other tokens get -inf.
        """
        if self.truncated is None:
            return logprobs
        rows, top_k, top_p, min_p = self.truncated
        selected = logprobs[rows]
        ordered, order = selected.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(ordered.shape[-1], device=ordered.device)
        ordered = ordered.masked_fill(rank >= top_k, float("-inf"))
        probs = ordered.softmax(-1)
        before = probs.cumsum(-1) - probs
        # top-p = 1 keeps all tokens: rounding of the sum must not cut the tail
        keep = ((before < top_p) | (top_p >= 1)) & (probs >= min_p * probs[:, :1]) & (rank < top_k)
        keep[:, 0] = True  # even if a tiny top-p underflows in float32
        allowed = torch.empty_like(keep).scatter_(1, order, keep)
        return logprobs.index_copy(0, rows, selected.masked_fill(~allowed, float("-inf")))

    def _draw(self, logprobs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Draw the token whose interval of the cumulative distribution contains the row's uniform number.

        A token of mass 0 is never drawn: the first entry that exceeds u * total always has mass, and u < 1.
        """
        peak = logprobs.amax(-1, keepdim=True)
        mass = (logprobs - peak).exp_().cumsum(-1, dtype=torch.float64)
        threshold = uniforms(self.seeds, positions)[:, None] * mass[:, -1:]
        return torch.searchsorted(mass, threshold, right=True)[:, 0].clamp_(max=logprobs.shape[1] - 1)
