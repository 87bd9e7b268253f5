"""The parameters of megatron-core's GPT model (local layer spec) and the Hugging Face names they are made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rl_engines_megatron.architecture import Architecture
from rl_engines_megatron.partition import Partition
from rl_engines_megatron.sharding import FusedQKV, Layout, Replicated, Split

EMBEDDING, HEAD, SCORE = "model.embed_tokens.weight", "lm_head.weight", "score.weight"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a pipeline stage."""

    name: str
    """In megatron-core, its layer number counted within the stage."""
    sources: tuple[str, ...]
    """In Hugging Face, in the order that `layout` takes them."""
    layout: Layout
    """How it is made of them and split over tensor-parallel ranks."""


def stage_parameters(partition: Partition, pp_rank: int) -> Iterator[Parameter]:
    """Every parameter of a pipeline stage.

    The last stage of a model with tied embeddings holds a copy of the embedding as its output layer, unless it is
    the first stage too.
    """
    architecture = partition.architecture
    vocabulary = Split((architecture.vocab, architecture.hidden), padded=partition.padded_vocab)
    if partition.is_first(pp_rank):
        yield Parameter("embedding.word_embeddings.weight", (EMBEDDING,), vocabulary)
    for local, layer in enumerate(partition.stage_layers(pp_rank)):
        yield from _layer_parameters(architecture, f"decoder.layers.{local}", f"model.layers.{layer}")
    if partition.is_last(pp_rank):
        yield Parameter("decoder.final_layernorm.weight", ("model.norm.weight",), Replicated((architecture.hidden,)))
        if partition.head != "lm":
            yield Parameter("score.weight", (SCORE,), Replicated((1, architecture.hidden)))
        elif not (architecture.tied and partition.is_first(pp_rank)):
            source = EMBEDDING if architecture.tied else HEAD
            yield Parameter("output_layer.weight", (source,), vocabulary)


def _layer_parameters(architecture: Architecture, to: str, of: str) -> Iterator[Parameter]:
    hidden, heads, groups = architecture.hidden, architecture.heads, architecture.groups
    head_dim, intermediate = architecture.head_dim, architecture.intermediate
    attention, mlp = f"{of}.self_attn", f"{of}.mlp"

    yield Parameter(f"{to}.input_layernorm.weight", (f"{of}.input_layernorm.weight",), Replicated((hidden,)))
    for kind, trailing in (("weight", (hidden,)), ("bias", ())):
        if kind == "weight" or architecture.qkv_bias:
            sources = tuple(f"{attention}.{part}_proj.{kind}" for part in "qkv")
            qkv = FusedQKV(heads, groups, head_dim, trailing)
            yield Parameter(f"{to}.self_attention.linear_qkv.{kind}", sources, qkv)
    if architecture.qk_norm:
        for part in "qk":
            norm = Replicated((head_dim,))
            yield Parameter(f"{to}.self_attention.{part}_layernorm.weight", (f"{attention}.{part}_norm.weight",), norm)
    output = Split((hidden, heads * head_dim), dim=1)
    yield Parameter(f"{to}.self_attention.linear_proj.weight", (f"{attention}.o_proj.weight",), output)
    yield Parameter(f"{to}.pre_mlp_layernorm.weight", (f"{of}.post_attention_layernorm.weight",), Replicated((hidden,)))
    gate_up = (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight")
    yield Parameter(f"{to}.mlp.linear_fc1.weight", gate_up, Split((intermediate, hidden), count=2))
    down = Split((hidden, intermediate), dim=1)
    yield Parameter(f"{to}.mlp.linear_fc2.weight", (f"{mlp}.down_proj.weight",), down)
