"""Layers of a model: megatron-core's layers, with another RMSNorm and another attention.

Linear layers come from TransformerEngine if `TransformerConfig.transformer_impl` selects it. Names and shapes of
parameters are the same either way.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import HAVE_TE, TEColumnParallelLinear, TERowParallelLinear
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from rl_engines_megatron.model.architecture import Architecture
from rl_engines_megatron.model.attention import PackedAttention
from rl_engines_megatron.model.experts import expert_spec


def implementation(device: torch.device, dtype: torch.dtype) -> str:
    """Return the value of `TransformerConfig.transformer_impl`.

    Select TransformerEngine if it is installed, on a GPU and with a 16-bit dtype. It would multiply float32 as TF32,
    with 10 bits of mantissa, regardless of torch's settings.
    """
    return "transformer_engine" if HAVE_TE and device.type == "cuda" and dtype != torch.float32 else "local"


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm of torch with sequence parallelism and, for some families, the factor 1 + weight in float32.

    With sequence parallelism, the gradient of the weight is summed over tensor ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        self.from_one = config.layernorm_zero_centered_gamma
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalize a tensor [..., H]."""
        if not self.from_one:
            return super().forward(x)
        return F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).to(x.dtype)


class PostNorm:
    """Mixin for projections to the residual stream that normalizes their output."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)  # type: ignore[call-arg]
        self.post_norm = RMSNorm(config, output_size, config.layernorm_epsilon)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalized output, and the bias, as megatron-core's layers do."""
        output, bias = super().forward(x)  # type: ignore[misc]
        return self.post_norm(output), bias


class Matrices(LocalSpecProvider):
    """Layer classes of megatron-core, with linear layers selected by `TransformerConfig.transformer_impl`.

    Args:
        config: config of megatron-core.
        post_norms: whether outputs of attention and MLP are normalized.
    """

    def __init__(self, config: TransformerConfig, post_norms: bool = False) -> None:
        use_te = config.transformer_impl == "transformer_engine"
        self.column: type = TEColumnParallelLinear if use_te else ColumnParallelLinear
        self.row: type = TERowParallelLinear if use_te else RowParallelLinear
        if post_norms:
            self.row = type(f"Normed{self.row.__name__}", (PostNorm, self.row), {})

    def column_parallel_linear(self) -> type:
        """Return the class of linear layers whose outputs are split over tensor ranks."""
        return self.column

    def row_parallel_linear(self) -> type:
        """Return the class of linear layers whose inputs are split over tensor ranks."""
        return self.row

    def experts(self) -> Any:
        """Return the constructor of the experts of a layer on this rank, which are computed one after the other."""
        return partial(SequentialMLP, submodules=MLPSubmodules(linear_fc1=self.column, linear_fc2=self.row))


class RopedAttention(SelfAttention):
    """Self-attention that selects one of several concatenated rotary embeddings, [..., number of embeddings * D].

    Args:
        rope: index of the embedding.
    """

    def __init__(self, *args: Any, rope: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rope = rope

    def forward(self, *args: Any, rotary_pos_emb: Tensor, **kwargs: Any) -> Any:
        """Run megatron-core's attention with the selected rotary embedding."""
        width = self.config.kv_channels
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb.narrow(-1, self.rope * width, width), **kwargs)


def block_spec(config: TransformerConfig, architecture: Architecture, layers: range) -> TransformerBlockSubmodules:
    """Return the layer specs of the given layers of a decoder."""
    specs = [_layer(config, architecture, number) for number in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def _layer(config: TransformerConfig, architecture: Architecture, number: int) -> ModuleSpec:
    window, moe = architecture.windows[number], architecture.moe
    is_moe = moe is not None and number in moe.layers
    backend = Matrices(config, architecture.family.post_norms)
    qk_norm = RMSNorm if config.qk_layernorm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=backend.column_parallel_linear(),
        core_attention=partial(PackedAttention, window=window, cap=architecture.score_cap),
        linear_proj=backend.row_parallel_linear(),
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    kind, params = SelfAttention, {"attn_mask_type": AttnMaskType.causal}
    if architecture.window_rope is not None:
        kind, params = RopedAttention, params | {"rope": int(window is not None)}
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(module=kind, params=params, submodules=attention),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=expert_spec(Matrices(config).experts()) if is_moe else get_mlp_module_spec_for_backend(backend),
            mlp_bda=get_bias_dropout_add,
        ),
    )
