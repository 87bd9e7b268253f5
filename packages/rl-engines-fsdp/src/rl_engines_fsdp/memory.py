"""How much of a model a rank holds, from shapes alone. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl_contracts.models.sizes import ModelSizes, layer_of

if TYPE_CHECKING:
    from rl_contracts.allocation import ParallelStrategy

GIB = 2**30
SAVE_MEMORY = ("gradient_checkpointing", "sync_every_micro_batch", "offload")
"""Settings that lower memory, those that cost least time first."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
OPTIMIZER_BYTES = {"adamw": 8.0, "adamw8bit": 2.0, "muon": 4.0, "sgd": 0.0}
"""Of state for each trained parameter, with `muon` and `sgd` for what is most of them; others are taken to have two
float32 moments."""
LOGITS_ON_GPU = 1 << 26
"""Entries of the block of logits where `max_logits` is 0."""


def own_parameters(strategy: ParallelStrategy, sizes: ModelSizes) -> float:
    """Parameters of the rank that has most: `fully_shard` divides the first dimension of each, and rounds up."""

    def part(name: str, shape: tuple[int, ...]) -> float:
        inside = layer_of(name) is not None
        ranks = strategy.data * strategy.context if inside else strategy.world_size
        split = strategy.tensor if inside and len(shape) > 1 else 1
        return math.ceil(math.prod(shape[:1]) / ranks) * math.prod(shape[1:]) / split

    return sum(part(name, shape) for name, shape in sizes.shapes.items())


def adapter_parameters(rank: int, modules: Sequence[str], strategy: ParallelStrategy, sizes: ModelSizes) -> float:
    """The same of the adapters of these layers, or of all matrices in the decoder where there are none."""
    ends = tuple(f"{name}.weight" for name in modules)
    adapted = (
        shape
        for name, shape in sizes.shapes.items()
        if layer_of(name) is not None and len(shape) == 2 and (not ends or name.endswith(ends))
    )
    return rank * sum(map(sum, adapted)) / (strategy.data * strategy.context)


def activation_bytes(sizes: ModelSizes, compute: int, checkpointing: bool) -> float:
    """Bytes that one token leaves for backward: inputs of the norms, projections, attention and MLP of each layer; with
    gradient checkpointing the input of each layer, and all this of one."""
    queries, keys = sizes.heads * sizes.head_size, sizes.key_heads * sizes.head_size
    layer = compute * (4 * sizes.hidden + 3 * queries + 4 * keys + 4 * sizes.intermediate) + 8 * sizes.hidden
    if checkpointing:
        return float(compute * sizes.layers * sizes.hidden + layer)
    return float(sizes.layers * layer)
