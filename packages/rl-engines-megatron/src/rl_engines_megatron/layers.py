"""The layers that a model is made of: megatron-core's own, with RMSNorm and attention that do more than its own do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from rl_engines_megatron.attention import PackedAttention
from rl_engines_megatron.experts import expert_spec


class RMSNorm(torch.nn.RMSNorm):
    """torch's, which also knows sequence parallelism: its gradient is then summed over tensor ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def block_spec(config: TransformerConfig, layers: Iterable[int]) -> TransformerBlockSubmodules:
    """What decoder layers are made of.

    Args:
        layers: their numbers in the model, from 0.
    """
    kinds = {mixed: _layer_spec(config, mixed) for mixed in (False, True)}
    specs = [kinds[bool(config.num_moe_experts and config.moe_layer_freq[layer])] for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def _layer_spec(config: TransformerConfig, mixed: bool) -> ModuleSpec:
    """Of one layer, with experts or an MLP."""
    backend = LocalSpecProvider()
    qk_norm = RMSNorm if config.qk_layernorm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=backend.column_parallel_linear(),
        core_attention=PackedAttention,
        linear_proj=backend.row_parallel_linear(),
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=expert_spec() if mixed else get_mlp_module_spec_for_backend(backend),
            mlp_bda=get_bias_dropout_add,
        ),
    )
