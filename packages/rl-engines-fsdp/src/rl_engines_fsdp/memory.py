"""Memory of a model per rank, computed from its shapes. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl_contracts.models.sizes import ModelSizes, layer_of

if TYPE_CHECKING:
    from rl_contracts.allocation import ParallelStrategy

GIB = 2**30
SAVE_MEMORY = ("gradient_checkpointing", "sync_every_micro_batch", "offload")
"""Settings that reduce memory, cheapest in time first."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
OPTIMIZER_BYTES = {"adamw": 8.0, "adamw8bit": 2.0, "muon": 4.0, "sgd": 0.0}
"""Bytes of optimizer state per trained parameter. `muon` has the value of matrices, and `sgd` the value without
momentum. Other optimizers are assumed to store two float32 moments."""
LOGITS_ON_GPU = 1 << 26
"""Entries of a block of logits on a GPU if `max_logits` is 0."""


def own_parameters(strategy: ParallelStrategy, sizes: ModelSizes, trained: bool = False) -> float:
    """Return the number of parameters, or only of trained ones, on the rank that stores most.

    `fully_shard` splits the first dimension of each parameter and rounds up.
    """

    def shard_size(name: str, shape: tuple[int, ...]) -> float:
        in_layer = layer_of(name) is not None
        ranks = strategy.data * strategy.context if in_layer else strategy.world_size
        tensor_ranks = strategy.tensor if in_layer and len(shape) > 1 else 1
        return math.ceil(math.prod(shape[:1]) / ranks) * math.prod(shape[1:]) / tensor_ranks

    omitted = sizes.frozen if trained else frozenset[str]()
    return sum(shard_size(name, shape) for name, shape in sizes.shapes.items() if name not in omitted)


def adapter_parameters(rank: int, modules: Sequence[str], strategy: ParallelStrategy, sizes: ModelSizes) -> float:
    """Return the number of adapter parameters that each process stores.

    Args:
        rank: rank of the adapter matrices.
        modules: name suffixes of the adapted layers; empty: all decoder matrices.
    """
    suffixes = tuple(f"{name}.weight" for name in modules)
    adapted = (
        shape
        for name, shape in sizes.shapes.items()
        if layer_of(name) is not None and len(shape) == 2 and (not suffixes or name.endswith(suffixes))
    )
    return rank * sum(map(sum, adapted)) / (strategy.data * strategy.context)


def activation_bytes(sizes: ModelSizes, compute: int, checkpointing: bool) -> float:
    """Return the activation bytes stored per token for backward.

    These are the inputs of norms, projections, attention and MLP of each layer. With gradient checkpointing they are
    the input of each layer, plus all activations of a single layer.

    Args:
        compute: bytes per element of the compute dtype.
    """
    queries, keys = sizes.heads * sizes.head_size, sizes.key_heads * sizes.head_size
    layer = compute * (4 * sizes.hidden + 3 * queries + 4 * keys + 4 * sizes.intermediate) + 8 * sizes.hidden
    if checkpointing:
        return float(compute * sizes.layers * sizes.hidden + layer)
    return float(sizes.layers * layer)
