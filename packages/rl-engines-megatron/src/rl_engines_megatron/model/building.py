"""Construction of this rank's model chunks from a Hugging Face config, a layout and settings."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.data import FinetuneSpec
from rl_engines_megatron.config import MegatronEngineConfig
from rl_engines_megatron.cpu import SETTINGS
from rl_engines_megatron.model.gpt import PackedGPT, make_model
from rl_engines_megatron.model.layers import implementation
from rl_engines_megatron.model.megatron_config import gpt_model_kwargs, transformer_kwargs
from rl_engines_megatron.model.partition import Partition

MAX_LOGITS = {"cpu": 1 << 19, "cuda": 1 << 26}
"""Default of `MegatronEngineConfig.max_logits` per device: 2 MiB, which fits in the cache of a core, and 256 MiB."""


def build(
    hf_config: Any,
    partition: Partition,
    strategy: ParallelStrategy,
    config: MegatronEngineConfig,
    spec: FinetuneSpec,
    device: torch.device,
) -> list[PackedGPT]:
    """Build this rank's model chunks with uninitialized weights. Requires existing process groups."""
    dtype = getattr(torch, spec.dtype)
    whole = replace(strategy, pipeline=1)  # the partition knows the stages
    settings: dict[str, Any] = transformer_kwargs(hf_config, whole, dtype=dtype)
    settings |= {
        "pipeline_model_parallel_size": strategy.pipeline,
        "virtual_pipeline_model_parallel_size": config.interleaved if config.interleaved > 1 else None,
        "sequence_parallel": config.sequence_parallel,
        "variable_seq_lengths": strategy.pipeline > 1 and config.interleaved == 1,
        "moe_token_dispatcher_type": "alltoall",  # the allgather dispatcher requires micro-batches of one length
        "batch_p2p_comm": config.interleaved == 1,  # batched messages between interleaved stages get mixed up
        "perform_initialization": False,
        # megatron-core only sums gradients over ranks and micro-batches; the engine divides by the denominator
        "calculate_per_token_loss": True,
        "finalize_model_grads_func": _sum_gradients,
        "attention_softmax_in_fp32": True,
        "transformer_impl": implementation(device, dtype) if config.transformer_engine else "local",
        # no other features of TransformerEngine or apex are used
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
    }
    if strategy.pipeline > 1:
        settings["pipeline_model_parallel_layout"] = partition.megatron_layout()
    if config.recompute:
        settings["recompute_granularity"] = config.recompute
    if config.recompute == "full":
        settings |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    if device.type == "cpu":
        settings |= SETTINGS
    gpt = gpt_model_kwargs(hf_config, whole)
    gpt = {name: value for name, value in gpt.items() if name not in ("pre_process", "post_process")}
    if spec.head != "lm":
        gpt["share_embeddings_and_output_weights"] = False
    parts = make_model(
        TransformerConfig(**settings),
        partition,
        config.interleaved,
        config.max_logits or MAX_LOGITS[device.type],
        spec.entropy_grad,
        gpt,
    )
    return [part.to(device) for part in parts]


def release(parts: list[PackedGPT]) -> None:
    """Clear references that would keep unused model chunks, their memory and their process groups alive.

    - The token dispatcher of an MoE layer keeps tensors of its last micro-batch. Their autograd graph leads to hooks
      that reference the model, a cycle that Python's garbage collector does not see.
    - Rotary embeddings are cached in a cache of the class, together with their module.
    - TransformerEngine caches the size and rank of process groups.
    """
    for module in (module for part in parts for module in part.modules()):
        if isinstance(module, MoELayer):
            vars(module.token_dispatcher).clear()
    RotaryEmbedding.forward.cache_clear()
    te_module = sys.modules.get("transformer_engine.pytorch.distributed")
    for name in ("get_distributed_world_size", "get_distributed_rank"):
        getattr(getattr(te_module, name, None), "cache_clear", lambda: None)()


def _sum_gradients(model: list[Any], num_tokens: Any, **kwargs: Any) -> None:
    """Sum gradients over ranks, without megatron-core's division by the number of tokens."""
    finalize_model_grads(model, None, **kwargs)
