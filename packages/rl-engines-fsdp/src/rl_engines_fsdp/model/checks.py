"""Checks that reject a model which would silently train on wrong values.

They compare the packed forward with the plain forward of transformers, and the forward on several ranks with the
forward on one rank.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.errors import ModelError, RLError
from rl_contracts.images import Image, read_image
from rl_contracts.models.attention_windows import apply_windows, short_windows
from rl_engines_fsdp.model.attention import Segments
from rl_engines_fsdp.model.loading import packed_implementation
from rl_engines_fsdp.model.packed import PackedCausalLM, PackedModel
from rl_engines_fsdp.model.rope import chooses
from rl_engines_fsdp.model.vision import VisionInputs
from rl_engines_fsdp.ranks.sharding import reshard

TOLERANCE = 5e-4
"""Largest difference between the packed and the plain forward, in float32.

For hidden states it is relative to the largest absolute value. For log-probs it is in nats, or relative to their range
if the range is below one nat.
"""
LEAK = 1e-4
"""Largest change of a sequence when another sequence changes, relative to the change of the other sequence."""
LENGTHS = (5, 9)
"""Tokens of each test sequence."""
SHORT = 6
"""Window and original RoPE length of the model during the check, between the lengths of the test sequences."""
SPLIT_TOLERANCES = {"float32": 2e-3, "bfloat16": 0.25}
"""Largest mean log-prob difference between one rank in float32 and all ranks, by the dtype of all ranks."""


@torch.no_grad()
def verify(wrapped: PackedModel) -> None:
    """Check the packed forward of a model on two sequences.

    It must equal transformers' forward of each sequence alone, neither sequence may affect the other, and forward
    passes with and without gradients must agree. Hidden states are compared, and for a language model log-probs too.

    During the check, attention windows and the lengths at which rotary embeddings change are shortened, so that the
    test sequences exceed them.

    Raises:
        ModelError: the results differ, one sequence affects the other, the forward is random, or the packed forward
            fails.
    """
    model: Any = wrapped.model
    name = type(model).__name__
    ids, positions, segments = _test_sequences(model, torch.device("cpu"))
    changed_ids = torch.cat([ids[: LENGTHS[0]].flip(0), ids[LENGTHS[0] :]])
    with _short_lengths(model):
        try:
            states, logprobs = _packed(wrapped, ids, positions, segments)
            changed_states = wrapped.hidden(changed_ids, positions, segments)
            with torch.enable_grad():
                grad_states = [wrapped.hidden(ids, positions, segments).detach() for _ in range(2)]
        except Exception as error:  # model code may raise anything on packed input
            raise ModelError(f"{name}: the packed forward fails: {error}") from error
        wrapped.frequencies.rows()
        model.set_attn_implementation("eager")
        try:
            plain = [_plain(wrapped, sequence) for sequence in ids.split(LENGTHS)]
        finally:
            model.set_attn_implementation(packed_implementation(model.config))
    expected_states, expected = (torch.cat(parts) for parts in zip(*plain, strict=True))
    scale = expected_states.abs().max().item()
    noise = max((grad_state - states).abs().max().item() for grad_state in grad_states)
    if not noise <= TOLERANCE * scale:
        raise ModelError(
            f"{name}: forward passes with gradients differ by {noise:.3g} from one without (allowed "
            f"{TOLERANCE * scale:.2g}): the model is random in evaluation mode, so the trained policy would differ "
            "from the sampled one. This engine cannot train the model."
        )
    first_change, second_change = (
        (changed_states - states).abs().split(LENGTHS)[sequence].max().item() for sequence in (0, 1)
    )
    if not second_change <= LEAK * first_change:
        raise ModelError(
            f"{name}: a packed sequence changes by {second_change:.3g} when the previous one changes by "
            f"{first_change:.3g}: the layers mix packed sequences. This engine cannot train the model."
        )
    for quantity, packed_values, plain_values, magnitude in (
        ("hidden states", states, expected_states, scale),
        ("log-probs", logprobs, expected, min(1.0, (expected.max() - expected.min()).item())),
    ):
        difference = (packed_values - plain_values).abs().max().item()
        if not difference <= TOLERANCE * magnitude:
            raise ModelError(
                f"{name}: {quantity} of packed sequences differ by {difference:.3g} from the same sequences run alone "
                f"(allowed {TOLERANCE * magnitude:.2g}): the engine computes the layers or logits of this "
                "model differently from transformers. This engine cannot train the model."
            )


@torch.no_grad()
def verify_images(wrapped: PackedModel, vision: VisionInputs) -> None:
    """Check packed sequences with and without images against transformers, and set `VisionInputs.bidirectional`.

    Raises:
        ModelError: the hidden states differ, or the model fails.
    """
    model: Any = wrapped.model
    name = type(model).__name__
    rows = [_images((24, 32)), (), _images((32, 16), (16, 24))]
    ids = [torch.tensor([3, 5, *vision.image_ids(row), 7, 2]) for row in rows]
    try:
        model.set_attn_implementation("eager")
        alone = [vision(sequence, [len(sequence)], [row]) for sequence, row in zip(ids, rows, strict=True)]
        expected = torch.cat(
            [
                model.base_model(input_ids=sequence[None], use_cache=False, **inputs)[0][0]
                for sequence, inputs in zip(ids, alone, strict=True)
            ]
        )
        model.set_attn_implementation(packed_implementation(model.config))
        lengths = [len(sequence) for sequence in ids]
        edges = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        tokens, inputs = torch.cat(ids), vision(torch.cat(ids), lengths, rows)
        differences = []
        for vision.bidirectional in (False, True):
            segments = Segments(tuple(lengths), edges, images=vision.blocks(tokens))
            states = wrapped.hidden(tokens, torch.zeros_like(tokens), segments, inputs)
            differences.append((states - expected).abs().max().item() / expected.abs().max().item())
            if differences[-1] <= TOLERANCE:
                return
    except RLError:
        raise
    except Exception as error:  # model code may raise anything on packed input
        raise ModelError(f"{name}: the packed forward with images fails: {error}") from error
    raise ModelError(
        f"{name}: hidden states of packed sequences with images differ by {min(differences):.3g} from the same "
        f"sequences run alone (allowed {TOLERANCE:.2g}). This engine cannot train the model with images."
    )


def _images(*sizes: tuple[int, int]) -> tuple[Image, ...]:
    """Return images of noise."""
    from PIL import Image as Picture

    noise = random.Random(0)
    return tuple(read_image(Picture.frombytes("RGB", size, noise.randbytes(3 * size[0] * size[1]))) for size in sizes)


def _packed(wrapped: PackedModel, ids: Tensor, positions: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Return hidden states [N, H] and log-probs [N] of packed sequences.

    The log-probs are zeros for a scalar head: its outputs are not compared, because they may all be zero.
    """
    states, zeros = wrapped.hidden(ids, positions, segments), torch.zeros(len(ids))
    is_language_model = isinstance(wrapped, PackedCausalLM)
    return states, wrapped(ids, positions, torch.ones(len(ids)), segments)[0] if is_language_model else zeros


def _plain(wrapped: PackedModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden states and log-probs of one sequence alone, as transformers computes them."""
    model: Any = wrapped.model
    states, logprobs = model.base_model(ids[None], use_cache=False)[0][0], torch.zeros(len(ids))
    if isinstance(wrapped, PackedCausalLM):
        logits = model(ids[None], use_cache=False).logits[0, :-1].float()
        logprobs[1:] = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return states, logprobs


@contextmanager
def _short_lengths(model: nn.Module) -> Iterator[None]:
    """Set attention windows, and lengths at which rotary embeddings change, to `SHORT` within the context."""
    with ExitStack() as undo:
        undo.enter_context(short_windows(model, SHORT))
        for module in model.modules():
            config = getattr(module, "config", None)
            if config is not None and chooses(getattr(module, "rope_type", None)):
                rope = config.rope_parameters
                for settings in (
                    vars(config),
                    rope,
                    *(layer_rope for layer_rope in rope.values() if isinstance(layer_rope, dict)),
                ):
                    apply_windows(
                        settings, ("max_position_embeddings", "original_max_position_embeddings"), SHORT, undo
                    )
                apply_windows(vars(module), ("original_max_seq_len", "max_seq_len_cached"), SHORT, undo)
        yield


def _test_sequences(model: Any, device: torch.device) -> tuple[Tensor, Tensor, Segments]:
    """Return ids and positions, int64 [14], of two packed sequences, and their boundaries."""
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
    """Compare a model that is split over several ranks with the whole model of rank 0 (collective).

    For a scalar head that starts at zero, this only checks that the forward runs.

    Args:
        source: whole model on rank 0; None on the other ranks.
        dtype: compute dtype of `model`.

    Raises:
        EngineError: the outputs differ, or the forward fails; raised on every rank.
    """
    name, host = type(model.model).__name__, torch.device("cpu")
    expected = torch.zeros(sum(LENGTHS), device=device)
    # agree here, because the other ranks would wait for a failed rank 0 in the model's collectives
    with parallel.agree_on_errors("running the model on one rank"):
        if source is not None:
            expected = _outputs_of(source, host).to(device)
    with parallel.agree_on_errors("running the model over several ranks"):
        try:
            outputs = _outputs_of(model, device)
        except Exception as error:
            raise ModelError(f"{name}: the forward pass over several ranks failed: {error}") from error
    reshard(model)
    dist.broadcast(expected, src=0)
    difference = (outputs - expected).abs().mean().item()
    with parallel.agree_on_errors("comparing the model over several ranks with one"):
        if not difference <= SPLIT_TOLERANCES[dtype]:
            raise ModelError(
                f"{name}: log-probs or values over {parallel.world_size} ranks differ by {difference:.3g} from one "
                f"rank (allowed {SPLIT_TOLERANCES[dtype]:g}). The tensor-parallel plan of the model may be "
                "wrong; use only data parallelism (d)."
            )


def _outputs_of(model: PackedModel, device: torch.device) -> Tensor:
    """Return log-probs, or values of a scalar head, of the test sequences, [14]."""
    ids, positions, segments = _test_sequences(model.model, device)
    outputs = model(ids, positions, torch.ones(len(ids), device=device), segments)
    result: Tensor = outputs[0] if len(outputs) == 2 else outputs[2]
    return result
