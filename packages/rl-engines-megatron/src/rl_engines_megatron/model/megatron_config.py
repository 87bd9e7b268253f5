"""Keyword arguments of megatron-core's `TransformerConfig` and `GPTModel` for a Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from rl_contracts.allocation import ParallelStrategy
from rl_engines_megatron.model.architecture import Architecture
from rl_engines_megatron.model.moe import MoESpec, expert_tensor
from rl_engines_megatron.model.partition import Partition, partition_of

ACTIVATIONS = {"silu": F.silu, "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh")}
"""Functions of `Family.activation`."""


def transformer_kwargs(
    hf_config: Any, strategy: ParallelStrategy, *, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Return the arguments of `megatron.core.transformer.TransformerConfig` that follow from the model and its split.

    The caller sets all others: initialization, recomputation, fusions, sequence parallelism.

    Args:
        hf_config: a transformers config of a supported family.
        strategy: parallel layout.
        dtype: dtype of the parameters, and of the tensors that pipeline stages exchange.

    Raises:
        ModelError: an unsupported model.
        ConfigError: the strategy does not fit the model; the message has the numbers.
    """
    architecture = _partition(hf_config, strategy).architecture
    family = architecture.family
    moe = {} if architecture.moe is None else _moe_kwargs(architecture, architecture.moe, strategy)
    return moe | {
        "num_layers": architecture.layers,
        "hidden_size": architecture.hidden,
        "ffn_hidden_size": architecture.intermediate,
        "num_attention_heads": architecture.heads,
        "num_query_groups": architecture.groups,
        "kv_channels": architecture.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": architecture.norm_eps,
        "qk_layernorm": family.qk_norm,
        "add_bias_linear": False,
        "add_qkv_bias": family.qkv_bias,
        "gated_linear_unit": True,
        "activation_func": ACTIVATIONS[family.activation],
        "layernorm_zero_centered_gamma": family.unit_norms,
        "softmax_scale": architecture.score_scale,
        "hidden_dropout": 0.0,
        "attention_dropout": architecture.attention_dropout,
        "tensor_model_parallel_size": strategy.tensor,
        "pipeline_model_parallel_size": strategy.pipeline,
        "context_parallel_size": strategy.context,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
    }


def gpt_model_kwargs(
    hf_config: Any, strategy: ParallelStrategy, *, pp_rank: int = 0, vocab_multiple: int = 1
) -> dict[str, Any]:
    """Return the arguments of `megatron.core.models.gpt.GPTModel` other than its config and its layer spec.

    Args:
        hf_config: a transformers config of a supported family.
        strategy: parallel layout.
        pp_rank: pipeline stage.
        vocab_multiple: as in `Partition`. The logits of padding rows are not part of the model: exclude them from every
            softmax.

    Raises:
        ModelError: an unsupported model.
        ConfigError: the strategy does not fit the model, or the stage does not exist; the message has the numbers.
    """
    partition = _partition(hf_config, strategy, vocab_multiple)
    partition.check_rank(0, pp_rank)
    architecture = partition.architecture
    return {
        "vocab_size": partition.padded_vocab,
        "max_sequence_length": architecture.max_positions,
        "pre_process": partition.is_first(pp_rank),
        "post_process": partition.is_last(pp_rank),
        "share_embeddings_and_output_weights": architecture.tied,
        "position_embedding_type": "rope",
        **rope_kwargs(architecture.rope),
    }


def _partition(hf_config: Any, strategy: ParallelStrategy, vocab_multiple: int = 1) -> Partition:
    architecture = Architecture.from_hugging_face(hf_config)
    return partition_of(architecture, strategy, strategy.pipeline, vocab_multiple)


def _moe_kwargs(architecture: Architecture, moe: MoESpec, strategy: ParallelStrategy) -> dict[str, Any]:
    return {
        "num_moe_experts": moe.experts,
        "moe_ffn_hidden_size": moe.width,
        "moe_router_topk": moe.chosen,
        "moe_router_pre_softmax": not moe.normalized,  # otherwise the softmax covers only the chosen experts
        "moe_layer_freq": [int(layer in moe.layers) for layer in range(architecture.layers)],
        "moe_router_load_balancing_type": "none",  # megatron-core's own auxiliary losses depend on micro-batches
        "moe_token_dispatcher_type": "alltoall",  # the allgather dispatcher requires micro-batches of one length
        "expert_model_parallel_size": strategy.expert,
        "expert_tensor_parallel_size": expert_tensor(strategy),
    }


def rope_kwargs(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of megatron-core's rotary embedding, named as in `GPTModel`.

    `Architecture` has validated `rope`.
    """
    kind, base = rope["rope_type"], {"rotary_percent": 1.0, "rotary_base": rope["rope_theta"]}
    if kind == "linear":
        return {**base, "seq_len_interpolation_factor": float(rope["factor"])}
    if kind == "llama3":
        return {**base, "rope_scaling": True, "rope_scaling_factor": float(rope["factor"])}
    return base
