"""Comparisons that refuse a model which would train on wrong numbers and say nothing: its packed forward with the plain
one of transformers, and that of several ranks with that of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.errors import ModelError
from rl_contracts.models.attention_windows import apply_windows, short_windows
from rl_engines_fsdp.model import attention
from rl_engines_fsdp.model.attention import Segments
from rl_engines_fsdp.model.packed import PackedCausalLM, PackedModel
from rl_engines_fsdp.model.rope import chooses
from rl_engines_fsdp.ranks.sharding import reshard

TOLERANCE = 5e-4
"""Largest difference between the packed and the plain forward, in float32: of hidden states relative to the largest, of
log-probs in nats, or relative to their range where that is below one nat."""
LEAK = 1e-4
"""How far a row may move when another one changes, relative to how far that one moves."""
LENGTHS = (5, 9)
"""Tokens of the rows that are tried."""
SHORT = 6
"""Window and original length of rope that models have while they are tried: between the lengths of the rows."""
SPLIT_TOLERANCES = {"float32": 2e-3, "bfloat16": 0.25}
"""Largest mean difference of log-probs between one rank in float32 and all ranks, by the type they compute in."""


@torch.no_grad()
def verify(wrapped: PackedModel) -> None:
    """Compare two packed rows with transformers' own forward of each alone, see that neither sees the other, and that
    passes with gradients give what one without does.

    Windows, and lengths at which rotary embeddings change, are so short for the time being that the rows meet them.
    Hidden states are compared, and of a language model the log-probs.

    Raises:
        ModelError: they differ, one row moves the other, a pass is random, or the packed forward fails.
    """
    model: Any = wrapped.model
    name = type(model).__name__
    ids, positions, segments = _rows(model, torch.device("cpu"))
    other = torch.cat([ids[: LENGTHS[0]].flip(0), ids[LENGTHS[0] :]])
    with _short_lengths(model):
        try:
            states, found = _packed(wrapped, ids, positions, segments)
            moved = wrapped.hidden(other, positions, segments)
            with torch.enable_grad():
                trained = [wrapped.hidden(ids, positions, segments).detach() for _ in range(2)]
        except Exception as error:  # whatever the code of a model raises on rows that it was not written for
            raise ModelError(f"{name}: the packed forward fails: {error}") from error
        wrapped.frequencies.rows()
        model.set_attn_implementation("eager")
        try:
            plain = [_plain(wrapped, row) for row in ids.split(LENGTHS)]
        finally:
            model.set_attn_implementation(attention.NAME)
    expected_states, expected = (torch.cat(parts) for parts in zip(*plain, strict=True))
    scale = expected_states.abs().max().item()
    random = max((each - states).abs().max().item() for each in trained)
    if not random <= TOLERANCE * scale:
        raise ModelError(
            f"{name}: passes of training over the same rows differ by {random:.3g} from one without gradients (allowed "
            f"{TOLERANCE * scale:.2g}): something in it stays random in evaluation mode, and the policy that learns "
            "would not be the one that answered. The model cannot be trained here."
        )
    first, second = ((moved - states).abs().split(LENGTHS)[row].max().item() for row in (0, 1))
    if not second <= LEAK * first:
        raise ModelError(
            f"{name}: a packed sequence moves by {second:.3g} when the one before it moves by {first:.3g}: its layers "
            "mix packed sequences. The model cannot be trained here."
        )
    for what, ours, theirs, size in (
        ("hidden states", states, expected_states, scale),
        ("log-probs", found, expected, min(1.0, (expected.max() - expected.min()).item())),
    ):
        difference = (ours - theirs).abs().max().item()
        if not difference <= TOLERANCE * size:
            raise ModelError(
                f"{name}: {what} of packed sequences differ by {difference:.3g} from those of each alone (allowed "
                f"{TOLERANCE * size:.2g}): its layers or its logits are computed in a way that this engine does not "
                "know. The model cannot be trained here."
            )


def _packed(wrapped: PackedModel, ids: Tensor, positions: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Hidden states [N, H] of packed rows, and log-probs [N]: zeros for a scalar head, which may be all zero itself."""
    states, nothing = wrapped.hidden(ids, positions, segments), torch.zeros(len(ids))
    of_logits = isinstance(wrapped, PackedCausalLM)
    return states, wrapped(ids, positions, torch.ones(len(ids)), segments)[0] if of_logits else nothing


def _plain(wrapped: PackedModel, row: Tensor) -> tuple[Tensor, Tensor]:
    """The same of one row alone, as transformers computes it."""
    model: Any = wrapped.model
    states, logprobs = model.base_model(row[None], use_cache=False)[0][0], torch.zeros(len(row))
    if isinstance(wrapped, PackedCausalLM):
        logits = model(row[None], use_cache=False).logits[0, :-1].float()
        logprobs[1:] = logits.log_softmax(-1).gather(1, row[1:, None])[:, 0]
    return states, logprobs


@contextmanager
def _short_lengths(model: nn.Module) -> Iterator[None]:
    """Set windows, and lengths from which rotary embeddings change, to `SHORT` in this block."""
    with ExitStack() as undo:
        undo.enter_context(short_windows(model, SHORT))
        for module in model.modules():
            config = getattr(module, "config", None)
            if config is not None and chooses(getattr(module, "rope_type", None)):
                rope = config.rope_parameters
                for part in (vars(config), rope, *(kind for kind in rope.values() if isinstance(kind, dict))):
                    apply_windows(part, ("max_position_embeddings", "original_max_position_embeddings"), SHORT, undo)
                apply_windows(vars(module), ("original_max_seq_len", "max_seq_len_cached"), SHORT, undo)
        yield


def _rows(model: Any, device: torch.device) -> tuple[Tensor, Tensor, Segments]:
    """Ids and positions int64 [14] of two packed rows, and where they lie."""
    ids = (torch.arange(sum(LENGTHS), device=device) * 7 + 3) % len(model.get_input_embeddings().weight)
    positions = torch.cat([torch.arange(length, device=device) for length in LENGTHS])
    edges = torch.tensor([0, LENGTHS[0], sum(LENGTHS)], dtype=torch.int32, device=device)
    return ids, positions, Segments(LENGTHS, edges)


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
    expected = torch.zeros(sum(LENGTHS), device=device)
    with parallel.agree_on_errors(
        "trying the model on one rank"
    ):  # before the others meet it in the model's own exchanges
        if source is not None:
            expected = _outputs_of(source, host).to(device)
    with parallel.agree_on_errors("trying the model over several ranks"):
        try:
            found = _outputs_of(model, device)
        except Exception as error:
            raise ModelError(f"{name}: the forward over several ranks fails: {error}") from error
    reshard(model)
    dist.broadcast(expected, src=0)
    difference = (found - expected).abs().mean().item()
    with parallel.agree_on_errors("comparing the model over several ranks with one"):
        if not difference <= SPLIT_TOLERANCES[dtype]:
            raise ModelError(
                f"{name}: log-probs or values over {parallel.world_size} ranks differ by {difference:.3g} from those "
                f"of one (allowed {SPLIT_TOLERANCES[dtype]:g}). Does its plan for tensor parallelism "
                "fit? Use data parallelism (d) alone."
            )


def _outputs_of(model: PackedModel, device: torch.device) -> Tensor:
    """Log-probs, or values of a scalar head, of the rows that are tried, [14]."""
    ids, positions, segments = _rows(model.model, device)
    outputs = model(ids, positions, torch.ones(len(ids), device=device), segments)
    said: Tensor = outputs[0] if len(outputs) == 2 else outputs[2]
    return said
