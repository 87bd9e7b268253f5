"""`torch.compile` of the decoder's layers."""

from __future__ import annotations

import torch

from rl_engines_fsdp.model.packed_model import PackedModel
from rl_engines_fsdp.ranks.sharding import decoder_layers


def compile_layers(model: PackedModel) -> None:
    """Compile each layer's forward, in place, before the model is sharded.

    Layers of one kind share their code. Attention stays as it is (`packed_attention` is left out of graphs): it loops
    over sequences whose lengths differ in every micro-batch. Sharding's hooks run outside.
    """
    for layer in decoder_layers(model):
        layer.forward = torch.compile(layer.forward, dynamic=True)  # type: ignore[method-assign]
