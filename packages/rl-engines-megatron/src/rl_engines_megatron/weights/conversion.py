"""Conversion of Hugging Face weights to megatron-core's layout and back, rank by rank, in plain torch."""

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
"""Suffix of buffers that older checkpoints store; transformers ignores them too."""
SHOWN = 5
"""Maximum number of names in an error message."""


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
    """Return the state dict of one rank's `GPTModel` from the whole Hugging Face state dict.

    Args:
        state: all parameters of the model by their Hugging Face names. Names are checked for the whole model. Tensors
            are read only for this pipeline stage, so a lazy mapping over files reads nothing else. With tied
            embeddings, `lm_head.weight` is optional.
        hf_config: the model's transformers config.
        tp_rank: tensor-parallel rank.
        tp_size: number of tensor-parallel ranks.
        pp_rank: pipeline stage.
        pp_size: number of pipeline stages.
        vocab_multiple: as in `Partition`; the padding rows of the vocabulary are zero.
        ep_rank: expert-parallel rank.
        ep_size: number of ranks over which the experts of a layer are distributed.
        etp_rank: expert-tensor-parallel rank.
        etp_size: number of ranks over which each expert matrix is split.

    Returns:
        Parameters by megatron-core's names: unchanged dtype, contiguous, no memory shared with the input.

    Raises:
        ModelError: an unknown, missing or misshaped parameter, tied embeddings that differ, or an unsupported model.
        ConfigError: a number of ranks that the model cannot be split over, or a rank that does not exist.
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
        rank, size = (etp_rank, etp_size) if parameter.is_expert else (tp_rank, tp_size)
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
    """Return the Hugging Face state dict from the state dicts of all ranks of one replica.

    Args:
        shards: `GPTModel.state_dict()` of each rank, in megatron-core's order: rank = pp_rank * tp_size + tp_rank. With
            experts each stage has `Partition.stage_size` ranks, in the order documented there. Entries that end in
            `_extra_state` are not weights and are ignored.
        hf_config: the model's transformers config.
        tp_size: number of tensor-parallel ranks.
        pp_size: number of pipeline stages.
        vocab_multiple: the value passed to `to_megatron`; the padding rows of the vocabulary are dropped.
        ep_size: number of ranks over which the experts of a layer are distributed.
        etp_size: number of ranks over which each expert matrix is split.

    Returns:
        Parameters by Hugging Face names, contiguous, no memory shared with the input. With tied embeddings,
            `lm_head.weight` is omitted.

    Raises:
        ModelError: an unknown, missing or misshaped parameter (with its rank), or copies of one parameter that differ
            between ranks.
        ConfigError: a wrong number of shards, or a number of ranks that the model cannot be split over.
    """
    architecture = Architecture.from_hugging_face(hf_config)
    partition = Partition(architecture, tp_size, pp_size, vocab_multiple, ep_size=ep_size, etp_size=etp_size)
    size = partition.stage_size
    if len(shards) != size * pp_size:
        raise ConfigError(
            f"megatron: expected {size * pp_size} shards ({size} ranks per stage * {pp_size} stages), "
            f"found {len(shards)}."
        )
    result: dict[str, Tensor] = {}
    for stage in range(pp_size):
        ranks = shards[stage * size : (stage + 1) * size]
        names = {parameter.name for parameter in stage_parameters(partition, stage)}  # the same for all expert ranks
        for rank, shard in enumerate(ranks):
            weights = {name for name in shard if not name.endswith("_extra_state")}
            check_names(weights, names, set(), _location(partition, rank, stage))
        for ep_rank in range(ep_size):
            for parameter in stage_parameters(partition, stage, ep_rank):
                if ep_rank and not parameter.is_expert:
                    continue
                tensors = _merge(partition, parameter, ranks, stage, ep_rank)
                for source, tensor in zip(parameter.sources, tensors, strict=True):
                    if source in result:
                        first_name = "embedding.word_embeddings.weight"
                        _check_equal(first_name, result[source], parameter.name, tensor, "embeddings are tied")
                    result[source] = tensor
    return result


def _merge(
    partition: Partition, parameter: Parameter, ranks: Sequence[Mapping[str, Any]], stage: int, ep_rank: int
) -> tuple[Tensor, ...]:
    """Return the Hugging Face tensors of one parameter from the state dicts of a stage's ranks."""
    holders = partition.holders(ep_rank if parameter.is_expert else None)
    shards, shape = [], shard_shape(parameter.layout, len(holders))
    if isinstance(parameter.layout, Replicated):
        holders = [[rank for shard_ranks in holders for rank in shard_ranks]]
    holding = sorted(rank for shard_ranks in holders for rank in shard_ranks)
    labels = [f"{parameter.name}{_location(partition, rank, stage)}" for rank in range(len(ranks))]
    check_sources([labels[r] for r in holding], [ranks[r][parameter.name] for r in holding], [shape] * len(holding))
    for first, *copies in holders:
        shards.append(ranks[first][parameter.name])
        for copy in copies:
            why = "these ranks must hold the same values"
            _check_equal(labels[first], shards[-1], labels[copy], ranks[copy][parameter.name], why)
    return parameter.layout.unshard(shards)


def _location(partition: Partition, rank: int, stage: int) -> str:
    kind = "tensor rank" if partition.stage_size == partition.tp_size else "rank"
    return f" ({kind} {rank}, pipeline stage {stage})"


def check_names(present: Set[str], expected: Set[str], optional: Set[str], where: str = "") -> None:
    """Raise a `ModelError` for missing and unknown parameter names.

    Args:
        present: names of the weights.
        expected: names that must exist.
        optional: further names that may exist.
        where: location of the weights, for the message.
    """
    unknown = {name for name in present - expected - optional if not name.endswith(COMPUTED)}
    for kind, names in (("missing", expected - present), ("unknown", unknown)):
        if names:
            raise ModelError(
                f"megatron: {kind} parameters{where}: {', '.join(sorted(names)[:SHOWN])} ({len(names)} in total). "
                "Check that config and weights belong to the same model."
            )


def check_sources(names: Sequence[str], tensors: Sequence[Any], shapes: Sequence[Shape]) -> None:
    """Check that the tensors of one parameter have the expected shapes, one dtype and one device."""
    first = tensors[0]
    for name, tensor, shape in zip(names, tensors, shapes, strict=True):
        if not isinstance(tensor, Tensor):
            raise ModelError(f"megatron: {name}: expected a tensor, found {type(tensor).__name__}.")
        if tuple(tensor.shape) != shape:
            raise ModelError(f"megatron: {name}: expected shape {list(shape)}, found {list(tensor.shape)}.")
        if (tensor.dtype, tensor.device) != (first.dtype, first.device):
            raise ModelError(
                f"megatron: {name} is {tensor.dtype} on {tensor.device}, but {names[0]} is {first.dtype} on "
                f"{first.device}; they form one parameter, so convert them to the same dtype and device."
            )


def check_tied(parameter: Parameter, tensor: Tensor, state: Mapping[str, Tensor]) -> None:
    """Check that a stored `lm_head.weight` equals the embedding that it is tied to."""
    if parameter.sources == (EMBEDDING,) and HEAD in state:
        _check_equal(EMBEDDING, tensor, HEAD, state[HEAD], "the config ties them (tie_word_embeddings=true)")


def _check_equal(name: str, tensor: Tensor, other_name: str, other: Tensor, why: str) -> None:
    if not same_bits(tensor, other):
        raise ModelError(f"megatron: {other_name} differs from {name}, but {why}.")
