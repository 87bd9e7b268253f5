"""Parameters of megatron-core's GPT model (local layer spec) and their Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rl_engines_megatron.model.architecture import Architecture
from rl_engines_megatron.model.moe import MoESpec
from rl_engines_megatron.model.partition import Partition
from rl_engines_megatron.weights.layouts import FusedQKV, Layout, Replicated, Split

__all__ = ["Parameter", "layer_parameters"]

EMBEDDING, HEAD, SCORE = "model.embed_tokens.weight", "lm_head.weight", "score.weight"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a pipeline stage."""

    name: str
    """Name in megatron-core; layers are numbered from 0 within the stage."""
    sources: tuple[str, ...]
    """Hugging Face names, in the order that `layout` expects."""
    layout: Layout
    """Mapping from the Hugging Face tensors to the shards of (expert) tensor-parallel ranks."""
    is_expert: bool = False
    """True if it belongs to an expert. Then expert ranks hold different parameters under the same name."""


def model_sources(partition: Partition) -> set[str]:
    """Return the Hugging Face names of all parameters of the model."""
    ranks = [(stage, ep) for stage in range(partition.pp_size) for ep in range(partition.ep_size)]
    return {
        source for rank in ranks for parameter in stage_parameters(partition, *rank) for source in parameter.sources
    }


def stage_parameters(partition: Partition, pp_rank: int, ep_rank: int = 0) -> Iterator[Parameter]:
    """Yield the parameters of a pipeline stage that an expert rank holds.

    The last stage of a model with tied embeddings holds a copy of the embedding as its output layer, unless it is also
    the first stage.
    """
    architecture = partition.architecture
    vocabulary = Split((architecture.vocab, architecture.hidden), padded=partition.padded_vocab)
    if partition.is_first(pp_rank):
        yield Parameter("embedding.word_embeddings.weight", (EMBEDDING,), vocabulary)
    for local, layer in enumerate(partition.stage_layers(pp_rank)):
        to, of = f"decoder.layers.{local}", f"model.layers.{layer}"
        if architecture.moe is not None and layer in architecture.moe.layers:
            yield from _attention_parameters(architecture, to, of)
            yield from _moe_parameters(partition, architecture.moe, to, of, ep_rank)
        else:
            yield from (architecture.family.layer_parameters or layer_parameters)(architecture, to, of)
    if partition.is_last(pp_rank):
        yield Parameter("decoder.final_layernorm.weight", ("model.norm.weight",), Replicated((architecture.hidden,)))
        if partition.head != "lm":
            yield Parameter("score.weight", (SCORE,), Replicated((1, architecture.hidden)))
        elif not (architecture.tied and partition.is_first(pp_rank)):
            source = EMBEDDING if architecture.tied else HEAD
            yield Parameter("output_layer.weight", (source,), vocabulary)


def layer_parameters(architecture: Architecture, to: str, of: str) -> Iterator[Parameter]:
    """Yield the parameters of a dense layer with the prefix `to` in megatron-core and `of` in Hugging Face."""
    yield from _attention_parameters(architecture, to, of)
    yield from _mlp_parameters(architecture, to, of)


def _attention_parameters(architecture: Architecture, to: str, of: str) -> Iterator[Parameter]:
    """Yield the parameters of attention, and all norms."""
    hidden, heads, groups, family = architecture.hidden, architecture.heads, architecture.groups, architecture.family
    head_dim, attention = architecture.head_dim, f"{of}.self_attn"

    yield Parameter(f"{to}.input_layernorm.weight", (f"{of}.input_layernorm.weight",), Replicated((hidden,)))
    for kind, trailing in (("weight", (hidden,)), ("bias", ())):
        if kind == "weight" or family.qkv_bias:
            sources = tuple(f"{attention}.{part}_proj.{kind}" for part in "qkv")
            qkv = FusedQKV(heads, groups, head_dim, trailing)
            yield Parameter(f"{to}.self_attention.linear_qkv.{kind}", sources, qkv)
    if family.qk_norm:
        for part in "qk":
            norm = Replicated((head_dim,))
            yield Parameter(f"{to}.self_attention.{part}_layernorm.weight", (f"{attention}.{part}_norm.weight",), norm)
    output = Split((hidden, heads * head_dim), dim=1)
    yield Parameter(f"{to}.self_attention.linear_proj.weight", (f"{attention}.o_proj.weight",), output)
    norms = {"pre_mlp_layernorm": "post_attention_layernorm"}
    if family.post_norms:
        norms = {
            "self_attention.linear_proj.post_norm": "post_attention_layernorm",
            "pre_mlp_layernorm": "pre_feedforward_layernorm",
            "mlp.linear_fc2.post_norm": "post_feedforward_layernorm",
        }
    for megatron_norm, hf_norm in norms.items():
        yield Parameter(f"{to}.{megatron_norm}.weight", (f"{of}.{hf_norm}.weight",), Replicated((hidden,)))


def _mlp_parameters(architecture: Architecture, to: str, of: str) -> Iterator[Parameter]:
    hidden, intermediate, mlp = architecture.hidden, architecture.intermediate, f"{of}.mlp"
    gate_up = (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight")
    yield Parameter(f"{to}.mlp.linear_fc1.weight", gate_up, Split((intermediate, hidden), count=2))
    down = Split((hidden, intermediate), dim=1)
    yield Parameter(f"{to}.mlp.linear_fc2.weight", (f"{mlp}.down_proj.weight",), down)


def _moe_parameters(partition: Partition, moe: MoESpec, to: str, of: str, ep_rank: int) -> Iterator[Parameter]:
    """Yield the router, which all ranks hold, and the experts of one expert rank."""
    hidden, names, block = partition.architecture.hidden, moe.names, f"{of}.{moe.names.block}"
    yield Parameter(f"{to}.mlp.router.weight", (f"{block}.gate.weight",), Replicated((moe.experts, hidden)))
    for local in range(partition.local_experts):
        expert = f"{block}.experts.{ep_rank * partition.local_experts + local}"
        prefix = f"{to}.mlp.experts.local_experts.{local}"
        gate_up = (f"{expert}.{names.gate}.weight", f"{expert}.{names.up}.weight")
        split = Split((moe.width, hidden), count=2)
        yield Parameter(f"{prefix}.linear_fc1.weight", gate_up, split, is_expert=True)
        down = Split((hidden, moe.width), dim=1)
        yield Parameter(f"{prefix}.linear_fc2.weight", (f"{expert}.{names.down}.weight",), down, is_expert=True)
