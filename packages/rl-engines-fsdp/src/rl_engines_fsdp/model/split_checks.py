"""Checks of what several ranks share; without them each would train on wrong numbers and say nothing."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from rl_contracts.errors import EngineError, ModelError
from rl_contracts.parallel import ParallelContext
from rl_engines_fsdp.model.attention import Segments
from rl_engines_fsdp.model.packed_model import PackedModel
from rl_engines_fsdp.ranks.sharding import reshard

if TYPE_CHECKING:
    from tensordict import TensorDict

TOLERANCES = {"float32": 2e-3, "bfloat16": 0.25}
"""Largest mean difference of log-probs between one rank in float32 and all ranks, by the type they compute in."""


def check_same_rows(batch: TensorDict, parallel: ParallelContext) -> None:
    """See that all ranks of a replica were given the same rows (collective).

    Raises:
        EngineError: they were not, on every rank.
    """
    if parallel.dp_size == parallel.world_size:
        return
    tokens = batch["input_ids"][batch["attention_mask"]]
    everyone = parallel.gather_json([len(batch), zlib.crc32(tokens.numpy().tobytes())])
    size = parallel.world_size // parallel.dp_size
    for first in range(0, parallel.world_size, size):
        other = next((r for r in range(first, first + size) if everyone[r] != everyone[first]), None)
        if other is not None:
            raise EngineError(
                f"batch: ranks {first} to {first + size - 1} hold one replica and need the same rows, but rank {first} "
                f"has {everyone[first][0]} rows and rank {other} has {everyone[other][0]}, or others. Choose rows by "
                "parallel.dp_rank, not by rank."
            )


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
    vocabulary = model.model.get_input_embeddings().weight.shape[0]
    expected = torch.zeros(14)
    if source is not None:
        expected = _probe(source, vocabulary, torch.device("cpu"))
    error: ModelError | None = None
    name = type(model.model).__name__
    try:
        found = _probe(model, vocabulary, device)
    except (TypeError, RuntimeError, ValueError, ModelError) as failure:
        error = ModelError(f"{name}: the forward over several ranks fails: {failure}")
        error.__cause__ = failure
    parallel.agree(error, "trying the model over several ranks")
    reshard(model)
    expected = expected.to(device)
    dist.broadcast(expected, src=0)
    difference = (found - expected).abs().mean().item()
    if not difference <= TOLERANCES[dtype]:
        error = ModelError(
            f"{name}: log-probs or values over {parallel.world_size} ranks differ by {difference:.3g} from those "
            f"of one (allowed {TOLERANCES[dtype]:g}). Does its plan for tensor parallelism "
            "fit? Use data parallelism (d) alone."
        )
    parallel.agree(error, "comparing the model over several ranks with one")


def _probe(model: PackedModel, vocabulary: int, device: torch.device) -> Tensor:
    """Log-probs, or values of a scalar head, of two packed sequences of 14 tokens in all."""
    lengths = (5, 9)
    ids = (torch.arange(sum(lengths)) * 7 + 3) % vocabulary
    positions = torch.cat([torch.arange(length) for length in lengths])
    edges = torch.tensor([0, 5, 14], dtype=torch.int32, device=device)
    outputs = model(ids.to(device), positions.to(device), torch.ones(14, device=device), Segments(lengths, edges))
    said: Tensor = outputs[0] if len(outputs) == 2 else outputs[2]
    return said
