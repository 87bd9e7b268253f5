"""A comparison that refuses models whose layers mix packed sequences, or whose logits are made in an unknown way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_contracts.errors import ModelError
from rl_engines_fsdp.model import attention
from rl_engines_fsdp.model.attention import Segments
from rl_engines_fsdp.model.causal_lm import PackedCausalLM
from rl_engines_fsdp.model.packed_model import PackedModel

TOLERANCE = 5e-4
"""Largest difference between the packed and the plain forward, in float32: of log-probs absolute, of hidden states
relative to the largest."""


@torch.no_grad()
def verify(wrapped: PackedModel) -> None:
    """Compare two packed sequences with transformers' own forward of each alone.

    Of a language model the log-probs are compared, of a scalar head, which may be all zero, the hidden states.

    Raises:
        ModelError: they differ, or the packed forward fails.
    """
    model: Any = wrapped.model
    lengths = (5, 9)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(sum(lengths)) * 7 + 3) % vocabulary
    positions = torch.cat([torch.arange(length) for length in lengths])
    segments = Segments(lengths, torch.tensor([0, 5, 14], dtype=torch.int32))
    of_logits = isinstance(wrapped, PackedCausalLM)
    try:
        if of_logits:
            found = wrapped(ids, positions, torch.ones(len(ids)), segments)[0]
        else:
            found = wrapped.hidden(ids, positions, segments)
    except (TypeError, RuntimeError, ValueError) as error:
        raise ModelError(f"{type(model).__name__}: the packed forward fails: {error}") from error
    model.set_attn_implementation("eager")
    try:
        expected = torch.cat([_plain(model, row, of_logits) for row in ids.split(lengths)])
    finally:
        model.set_attn_implementation(attention.NAME)
    scale = 1.0 if of_logits else max(expected.abs().max().item(), 1e-6)
    difference = (found - expected).abs().max().item() / scale
    if not difference <= TOLERANCE:
        raise ModelError(
            f"{type(model).__name__}: {'log-probs' if of_logits else 'hidden states'} of packed sequences differ by "
            f"{difference:.3g} from those of each alone (allowed {TOLERANCE:g}): its layers mix packed sequences, or "
            "its logits are made in a way that this engine does not know. The model cannot be trained here."
        )


def _plain(model: Any, row: Tensor, of_logits: bool) -> Tensor:
    """One sequence alone: log-probs [L], or hidden states [L, H]."""
    if not of_logits:
        states: Tensor = model.base_model(row[None], use_cache=False)[0][0]
        return states
    logits = model(row[None], use_cache=False).logits[0].float()
    logprobs = logits[:-1].log_softmax(-1).gather(1, row[1:, None])[:, 0]
    return torch.cat([logprobs.new_zeros(1), logprobs])
