"""Whether a model computes over slots what it computes by itself, asked once when it is loaded.

Attention is replaced from outside, so a model that does something else with it (both directions, a difference of two
softmaxes, a bias of its own) would serve wrong numbers without a word. One short sequence shows it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_contracts.errors import ModelError
from rl_inference.server.attention import IMPLEMENTATION, Segment, TokenPass
from rl_inference.server.compiled import uncompiled

if TYPE_CHECKING:
    from rl_inference.server.model import SlotModel

_PARTS = (7, 5, 1, 1, 3)
"""Tokens of each pass over the slots: the start of a prompt, a further part of it, single tokens."""
_TOLERANCE = {torch.float32: 1e-3}
_TOLERANCE_HALF = 0.2
"""Mean absolute difference of the log-probs that rounding may make; what is wrong differs by whole nats in some."""


@torch.inference_mode()
def check_numbers(model: SlotModel) -> None:
    """Compare log-probs of a sequence that was read in parts into a slot with the model's own attention.

    Raises:
        ModelError: they differ, or the model cannot be run over slots at all.
    """
    count = sum(_PARTS)
    ids = (torch.arange(count, device=model.device) * 7919 + 3) % model.vocab_size
    name = type(model.model).__name__
    try:
        found = _over_slots(model, ids)
        expected = _by_itself(model, ids)
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
        raise ModelError(
            f"{name} cannot be run over the slots of the embedded server ({type(error).__name__}: {error}). Use "
            "another engine for this model."
        ) from error
    allowed = _TOLERANCE.get(model.model.dtype, _TOLERANCE_HALF)
    difference = (found - expected).abs().mean().item()
    if not difference <= allowed:
        raise ModelError(
            f"{name} computes other numbers over the slots of the embedded server than by itself: log-probs differ by "
            f"{difference:.2g} on average, at most {allowed:g} is rounding. Use another engine for this model."
        )


def _over_slots(model: SlotModel, ids: torch.Tensor) -> torch.Tensor:
    """Log-probs [tokens, vocab], read in parts into slot 0."""
    parts, start = [], 0
    for count in _PARTS:
        places = torch.arange(start, start + count, device=ids.device)
        one = count == 1
        span = TokenPass(
            slots=torch.zeros_like(places),
            positions=places,
            longest=start + count,
            singles=1 if one else 0,
            segments=() if one else (Segment(0, start, 0, count),),
            in_place=one,
        )
        parts.append(model.run(ids[start : start + count], span))
        start += count
    return torch.log_softmax(torch.cat(parts).float(), -1)


def _by_itself(model: SlotModel, ids: torch.Tensor) -> torch.Tensor:
    """Log-probs [tokens, vocab] with the model's own attention and no cache."""
    model.model.set_attn_implementation("eager")
    try:
        with uncompiled():
            logits = model.model(input_ids=ids[None], use_cache=False).logits[0]
    finally:
        model.model.set_attn_implementation(IMPLEMENTATION)
    return torch.log_softmax(logits.float(), -1)
