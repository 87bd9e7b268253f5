"""Hugging Face weights to megatron-core's layout and back, rank by rank, in plain torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from torch import Tensor

from rl_contracts.errors import ConfigError, ModelError
from rl_engines_megatron.model.architecture import Architecture
from rl_engines_megatron.model.partition import Partition
from rl_engines_megatron.weights.layouts import Replicated, Shape, same_bits, shard_shape
from rl_engines_megatron.weights.naming import EMBEDDING, HEAD, Parameter, model_sources, stage_parameters

COMPUTED = "rotary_emb.inv_freq"
"""End of the names of buffers that older checkpoints store; transformers leaves them out too."""
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
    ep_rank: int = 0,
    ep_size: int = 1,
    etp_rank: int = 0,
    etp_size: int = 1,
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
        ep_rank: expert-parallel rank.
        ep_size: ranks over which the experts of a layer are spread.
        etp_rank: expert-tensor-parallel rank.
        etp_size: ranks over which each matrix of an expert is split.

    Returns:
        parameters by megatron-core's names, in the dtype they came in, contiguous, in memory of their own.

    Raises:
        ModelError: an unknown, missing or misshaped parameter, tied embeddings that differ, or an unsupported model.
        ConfigError: sizes that do not divide, or a rank that does not exist.
    """
    architecture = Architecture.from_hugging_face(hf_config)
    partition = Partition(architecture, tp_size, pp_size, vocab_multiple, ep_size=ep_size, etp_size=etp_size)
    partition.check_rank(tp_rank, pp_rank, ep_rank, etp_rank)
    tied = architecture.tied
    check_names(state.keys(), model_sources(partition), {HEAD} if tied else set())
    result: dict[str, Tensor] = {}
    for parameter in stage_parameters(partition, pp_rank, ep_rank):
        tensors = [state[source] for source in parameter.sources]
        check_sources(parameter.sources, tensors, parameter.layout.shapes())
        if tied:
            check_tied(parameter, tensors[0], state)
        rank, size = (etp_rank, etp_size) if parameter.of_expert else (tp_rank, tp_size)
        result[parameter.name] = parameter.layout.shard(tensors, rank, size)
    return result


def from_megatron(
    shards: Sequence[Mapping[str, Any]],
    hf_config: Any,
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    vocab_multiple: int = 1,
    ep_size: int = 1,
    etp_size: int = 1,
) -> dict[str, Tensor]:
    """The Hugging Face state dict, of the state dicts of all ranks of one replica.

    Args:
        shards: `GPTModel.state_dict()` of each rank; the tensor-parallel ranks of the first stage, then those of the
            second (rank = pp_rank * tp_size + tp_rank, megatron-core's own order; with experts there are
            `Partition.stage_size` in each stage, in the order said there). Entries that end in `_extra_state` are no
            weights and are left out.
        hf_config: the model's transformers config.
        tp_size: tensor-parallel ranks.
        pp_size: pipeline stages.
        vocab_multiple: as it was for `to_megatron`; the rows added to the vocabulary are dropped.
        ep_size: ranks over which the experts of a layer are spread.
        etp_size: ranks over which each matrix of an expert is split.

    Returns:
        parameters by Hugging Face names, without `lm_head.weight` where embeddings are tied, contiguous, in memory of
        their own.

    Raises:
        ModelError: an unknown, missing or misshaped parameter (with its rank), or copies of one parameter that
            differ between ranks.
        ConfigError: a wrong number of shards, or sizes that do not divide.
    """
    architecture = Architecture.from_hugging_face(hf_config)
    partition = Partition(architecture, tp_size, pp_size, vocab_multiple, ep_size=ep_size, etp_size=etp_size)
    size = partition.stage_size
    if len(shards) != size * pp_size:
        raise ConfigError(
            f"megatron: expected {size * pp_size} shards (a stage's {size} * pipeline {pp_size}), found {len(shards)}."
        )
    result: dict[str, Tensor] = {}
    for stage in range(pp_size):
        ranks = shards[stage * size : (stage + 1) * size]
        names = {parameter.name for parameter in stage_parameters(partition, stage)}  # the same of all expert ranks
        for rank, shard in enumerate(ranks):
            weights = {name for name in shard if not name.endswith("_extra_state")}
            check_names(weights, names, set(), _place(partition, rank, stage))
        for ep_rank in range(ep_size):
            for parameter in stage_parameters(partition, stage, ep_rank):
                if ep_rank and not parameter.of_expert:
                    continue
                tensors = _merge(partition, parameter, ranks, stage, ep_rank)
                for source, tensor in zip(parameter.sources, tensors, strict=True):
                    if source in result:
                        of_first = "embedding.word_embeddings.weight"
                        _check_equal(of_first, result[source], parameter.name, tensor, "embeddings are tied")
                    result[source] = tensor
    return result


def _merge(
    partition: Partition, parameter: Parameter, ranks: Sequence[Mapping[str, Any]], stage: int, ep_rank: int
) -> tuple[Tensor, ...]:
    """The Hugging Face tensors of one parameter, of a stage's ranks."""
    holders = partition.holders(ep_rank if parameter.of_expert else None)
    shards, shape = [], shard_shape(parameter.layout, len(holders))
    if isinstance(parameter.layout, Replicated):
        holders = [[rank for held in holders for rank in held]]
    held = sorted(rank for ranks in holders for rank in ranks)
    places = [f"{parameter.name}{_place(partition, rank, stage)}" for rank in range(len(ranks))]
    check_sources([places[r] for r in held], [ranks[r][parameter.name] for r in held], [shape] * len(held))
    for first, *others in holders:
        shards.append(ranks[first][parameter.name])
        for other in others:
            why = "these ranks hold the same of it"
            _check_equal(places[first], shards[-1], places[other], ranks[other][parameter.name], why)
    return parameter.layout.unshard(shards)


def _place(partition: Partition, rank: int, stage: int) -> str:
    kind = "tensor rank" if partition.stage_size == partition.tp_size else "rank"
    return f" ({kind} {rank}, pipeline stage {stage})"


def check_names(found: Set[str], expected: Set[str], optional: Set[str], where: str = "") -> None:
    unknown = {name for name in found - expected - optional if not name.endswith(COMPUTED)}
    for kind, odd in (("missing", expected - found), ("unknown", unknown)):
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


def check_tied(parameter: Parameter, tensor: Tensor, state: Mapping[str, Tensor]) -> None:
    """See that a head that is stored beside the embedding, where they are tied, is the same."""
    if parameter.sources == (EMBEDDING,) and HEAD in state:
        _check_equal(EMBEDDING, tensor, HEAD, state[HEAD], "the config ties them (tie_word_embeddings)")


def _check_equal(name: str, tensor: Tensor, other_name: str, other: Tensor, why: str) -> None:
    if not same_bits(tensor, other):
        raise ModelError(f"megatron: {other_name} differs from {name}, but {why}.")
