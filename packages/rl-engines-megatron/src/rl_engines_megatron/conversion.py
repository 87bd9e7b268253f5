"""Hugging Face weights to megatron-core's layout and back, rank by rank, in plain torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from torch import Tensor

from rl_contracts.errors import ConfigError, ModelError
from rl_engines_megatron.architecture import Architecture
from rl_engines_megatron.naming import EMBEDDING, HEAD, Parameter, stage_parameters
from rl_engines_megatron.partition import Partition
from rl_engines_megatron.sharding import Replicated, Shape, same_bits, shard_shape

SHOWN = 5
"""Names that an error lists at most."""


def to_megatron(
    state: Mapping[str, Tensor],
    hf_config: Any,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    pp_rank: int = 0,
    pp_size: int = 1,
    vocab_multiple: int = 1,
) -> dict[str, Tensor]:
    """The state dict of one rank's `GPTModel`, of the whole Hugging Face state dict.

    Args:
        state: every parameter of the model by its Hugging Face name. Names are checked over the whole model, tensors
            are read for this pipeline stage only, so that a lazy mapping over files reads no more than it must.
            `lm_head.weight` may be missing or present where embeddings are tied.
        hf_config: the model's transformers config.
        tp_rank: tensor-parallel rank.
        tp_size: tensor-parallel ranks.
        pp_rank: pipeline stage.
        pp_size: pipeline stages.
        vocab_multiple: as in `Partition`; the rows added to the vocabulary are zero.

    Returns:
        parameters by megatron-core's names, in the dtype they came in, contiguous, in memory of their own.

    Raises:
        ModelError: an unknown, missing or misshaped parameter, tied embeddings that differ, or an unsupported model.
        ConfigError: sizes that do not divide, or a rank that does not exist.
    """
    partition = Partition(Architecture.from_hugging_face(hf_config), tp_size, pp_size, vocab_multiple)
    partition.check_rank(tp_rank, pp_rank)
    stages = [list(stage_parameters(partition, stage)) for stage in range(pp_size)]
    expected = {source for stage in stages for parameter in stage for source in parameter.sources}
    tied = partition.architecture.tied
    check_names(state.keys(), expected, {HEAD} if tied else set())
    result: dict[str, Tensor] = {}
    for parameter in stages[pp_rank]:
        tensors = [state[source] for source in parameter.sources]
        check_sources(parameter.sources, tensors, parameter.layout.shapes())
        if tied and parameter.sources == (EMBEDDING,) and HEAD in state:
            _check_equal(EMBEDDING, tensors[0], HEAD, state[HEAD], "the config ties them (tie_word_embeddings)")
        result[parameter.name] = parameter.layout.shard(tensors, tp_rank, tp_size)
    return result


def from_megatron(
    shards: Sequence[Mapping[str, Any]],
    hf_config: Any,
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    vocab_multiple: int = 1,
) -> dict[str, Tensor]:
    """The Hugging Face state dict, of the state dicts of all ranks of one replica.

    Args:
        shards: `GPTModel.state_dict()` of each rank; the tensor-parallel ranks of the first stage, then those of the
            second (rank = pp_rank * tp_size + tp_rank, megatron-core's own order). Entries that end in
            `_extra_state` are no weights and are left out.
        hf_config: the model's transformers config.
        tp_size: tensor-parallel ranks.
        pp_size: pipeline stages.
        vocab_multiple: as it was for `to_megatron`; the rows added to the vocabulary are dropped.

    Returns:
        parameters by Hugging Face names, without `lm_head.weight` where embeddings are tied, contiguous, in memory of
        their own.

    Raises:
        ModelError: an unknown, missing or misshaped parameter (with its rank), or copies of one parameter that
            differ between ranks.
        ConfigError: a wrong number of shards, or sizes that do not divide.
    """
    partition = Partition(Architecture.from_hugging_face(hf_config), tp_size, pp_size, vocab_multiple)
    if len(shards) != tp_size * pp_size:
        raise ConfigError(
            f"megatron: expected {tp_size * pp_size} shards (tensor {tp_size} * pipeline {pp_size}), "
            f"found {len(shards)}."
        )
    result: dict[str, Tensor] = {}
    for stage in range(pp_size):
        ranks = shards[stage * tp_size : (stage + 1) * tp_size]
        parameters = list(stage_parameters(partition, stage))
        for tp_rank, shard in enumerate(ranks):
            weights = {name for name in shard if not name.endswith("_extra_state")}
            check_names(weights, {p.name for p in parameters}, set(), _place(tp_rank, stage))
        for parameter in parameters:
            tensors = _merge(parameter, ranks, stage)
            for source, tensor in zip(parameter.sources, tensors, strict=True):
                if source in result:
                    of_first = "embedding.word_embeddings.weight"
                    _check_equal(of_first, result[source], parameter.name, tensor, "embeddings are tied")
                result[source] = tensor
    return result


def _merge(parameter: Parameter, ranks: Sequence[Mapping[str, Any]], stage: int) -> tuple[Tensor, ...]:
    """The Hugging Face tensors of one parameter, of a stage's tensor-parallel ranks."""
    places = [f"{parameter.name}{_place(tp_rank, stage)}" for tp_rank in range(len(ranks))]
    tensors = [rank[parameter.name] for rank in ranks]
    check_sources(places, tensors, [shard_shape(parameter.layout, len(ranks))] * len(ranks))
    if isinstance(parameter.layout, Replicated):
        for place, tensor in zip(places[1:], tensors[1:], strict=True):
            _check_equal(places[0], tensors[0], place, tensor, "every tensor-parallel rank holds the same")
    return parameter.layout.unshard(tensors)


def _place(tp_rank: int, stage: int) -> str:
    return f" (tensor rank {tp_rank}, pipeline stage {stage})"


def check_names(found: Set[str], expected: Set[str], optional: Set[str], where: str = "") -> None:
    for kind, odd in (("missing", expected - found), ("unknown", found - expected - optional)):
        if odd:
            raise ModelError(
                f"megatron: {kind} parameters{where}: {', '.join(sorted(odd)[:SHOWN])} ({len(odd)} in all). "
                "Do config and weights belong together?"
            )


def check_sources(names: Sequence[str], tensors: Sequence[Any], shapes: Sequence[Shape]) -> None:
    """See that tensors that form one parameter have these shapes, and need not be cast on the way."""
    first = tensors[0]
    for name, tensor, shape in zip(names, tensors, shapes, strict=True):
        if not isinstance(tensor, Tensor):
            raise ModelError(f"megatron: {name}: expected a tensor, found {type(tensor).__name__}.")
        if tuple(tensor.shape) != shape:
            raise ModelError(f"megatron: {name}: expected shape {list(shape)}, found {list(tensor.shape)}.")
        if (tensor.dtype, tensor.device) != (first.dtype, first.device):
            raise ModelError(
                f"megatron: {name} is {tensor.dtype} on {tensor.device}, but {names[0]} is {first.dtype} on "
                f"{first.device}; they form one parameter, bring them to one dtype and device."
            )


def _check_equal(name: str, tensor: Tensor, other_name: str, other: Tensor, why: str) -> None:
    if not same_bits(tensor, other):
        raise ModelError(f"megatron: {other_name} differs from {name}, but {why}.")
