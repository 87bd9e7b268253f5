"""From a Hugging Face configuration, a layout and settings to this rank's parts of the model."""

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
"""Default of `MegatronEngineConfig.max_logits`: a core's cache, and 256 MiB."""


def build(
    hf_config: Any,
    partition: Partition,
    strategy: ParallelStrategy,
    config: MegatronEngineConfig,
    spec: FinetuneSpec,
    device: torch.device,
) -> list[PackedGPT]:
    """This rank's parts of the model, without their weights. Process groups must be there."""
    dtype = getattr(torch, spec.dtype)
    whole = replace(strategy, pipeline=1)  # the partition knows the stages
    settings: dict[str, Any] = transformer_kwargs(hf_config, whole, dtype=dtype)
    settings |= {
        "pipeline_model_parallel_size": strategy.pipeline,
        "virtual_pipeline_model_parallel_size": config.interleaved if config.interleaved > 1 else None,
        "sequence_parallel": config.sequence_parallel,
        "variable_seq_lengths": strategy.pipeline > 1 and config.interleaved == 1,
        "moe_token_dispatcher_type": "alltoall",  # the other does not take micro-batches of several lengths
        "batch_p2p_comm": config.interleaved == 1,  # else two ranks mix up what they send each other both ways
        "perform_initialization": False,
        # gradients are summed over ranks and micro-batches, and divided by the engine
        "calculate_per_token_loss": True,
        "finalize_model_grads_func": _finish_gradients,
        "attention_softmax_in_fp32": True,
        "transformer_impl": implementation(device, dtype) if config.transformer_engine else "local",
        # nothing else of TransformerEngine or apex is asked for
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
    """Undo what would keep parts that are used no more, and with them their memory and process groups.

    A dispatcher of tokens to experts keeps tensors of its last micro-batch, whose graph of autograd leads to hooks that
    hold the part: a circle that Python's collector does not see. The rotations of positions are kept in a cache of the
    class, with the module that made them, and TransformerEngine keeps groups whose size it was asked for.
    """
    for module in (module for part in parts for module in part.modules()):
        if isinstance(module, MoELayer):
            vars(module.token_dispatcher).clear()
    RotaryEmbedding.forward.cache_clear()
    engine = sys.modules.get("transformer_engine.pytorch.distributed")
    for name in ("get_distributed_world_size", "get_distributed_rank"):
        getattr(getattr(engine, name, None), "cache_clear", lambda: None)()


def _finish_gradients(model: list[Any], num_tokens: Any, **kwargs: Any) -> None:
    """Sum gradients over ranks, without a division of megatron-core's own."""
    finalize_model_grads(model, None, **kwargs)
