"""Comparisons that refuse a model which would train on wrong numbers and say nothing: its packed forward with the plain
one of transformers, and that of several ranks with that of one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_contracts.errors import ModelError
from rl_contracts.parallel import ParallelContext
from rl_engines_fsdp.model import attention
from rl_engines_fsdp.model.attention import Segments
from rl_engines_fsdp.model.packed import PackedCausalLM, PackedModel
from rl_engines_fsdp.ranks.sharding import reshard

TOLERANCE = 5e-4
"""Largest difference between the packed and the plain forward, in float32: of log-probs absolute, of hidden states
relative to the largest."""
SPLIT_TOLERANCES = {"float32": 2e-3, "bfloat16": 0.25}
"""Largest mean difference of log-probs between one rank in float32 and all ranks, by the type they compute in."""


@torch.no_grad()
def verify(wrapped: PackedModel) -> None:
    """Compare two packed sequences with transformers' own forward of each alone.

    Of a language model the log-probs are compared, of a scalar head, which may be all zero, the hidden states.

    Raises:
        ModelError: they differ, or the packed forward fails.
    """
    model: Any = wrapped.model
    ids, positions, segments = _sequences(model, torch.device("cpu"))
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
        expected = torch.cat([_plain(model, row, of_logits) for row in ids.split(segments.lengths)])
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


@torch.no_grad()
def verify_split(
    model: PackedModel,
    source: PackedModel | None,
    device: torch.device,
    dtype: str,
    parallel: ParallelContext,
) -> None:
    """Compare a model that several ranks compute together with rank 0's whole one (collective).

    Of a scalar head that starts at zero the comparison shows only that the forward runs.

    Args:
        source: the whole model, on rank 0; None elsewhere.
        dtype: in which `model` computes.

    Raises:
        EngineError: they differ, or the forward fails, on every rank.
    """
    name, host = type(model.model).__name__, torch.device("cpu")
    expected = (torch.zeros(14) if source is None else _probe(source, host)).to(device)
    with parallel.agreeing("trying the model over several ranks"):
        try:
            found = _probe(model, device)
        except (TypeError, RuntimeError, ValueError, ModelError) as error:
            raise ModelError(f"{name}: the forward over several ranks fails: {error}") from error
    reshard(model)
    dist.broadcast(expected, src=0)
    difference = (found - expected).abs().mean().item()
    with parallel.agreeing("comparing the model over several ranks with one"):
        if not difference <= SPLIT_TOLERANCES[dtype]:
            raise ModelError(
                f"{name}: log-probs or values over {parallel.world_size} ranks differ by {difference:.3g} from those "
                f"of one (allowed {SPLIT_TOLERANCES[dtype]:g}). Does its plan for tensor parallelism "
                "fit? Use data parallelism (d) alone."
            )


def _probe(model: PackedModel, device: torch.device) -> Tensor:
    """Log-probs, or values of a scalar head, of `_sequences`, [14]."""
    ids, positions, segments = _sequences(model.model, device)
    outputs = model(ids, positions, torch.ones(14, device=device), segments)
    said: Tensor = outputs[0] if len(outputs) == 2 else outputs[2]
    return said


def _sequences(model: Any, device: torch.device) -> tuple[Tensor, Tensor, Segments]:
    """Ids and positions, int64 [14], of two packed sequences."""
    ids = (torch.arange(14, device=device) * 7 + 3) % model.get_input_embeddings().weight.shape[0]
    positions = torch.cat([torch.arange(length, device=device) for length in (5, 9)])
    return ids, positions, Segments((5, 9), torch.tensor([0, 5, 14], dtype=torch.int32, device=device))
