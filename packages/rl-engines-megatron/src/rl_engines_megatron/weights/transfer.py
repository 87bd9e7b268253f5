"""Loading and gathering of weights by their Hugging Face names, one parameter at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from rl_contracts.errors import ModelError
from rl_engines_megatron.model.checks import weight_files
from rl_engines_megatron.model.gpt import PackedGPT
from rl_engines_megatron.model.partition import Partition
from rl_engines_megatron.weights.conversion import check_names, check_sources, check_tied
from rl_engines_megatron.weights.naming import HEAD, SCORE, Parameter, model_sources, stage_parameters


class StoredWeights(Mapping[str, Tensor]):
    """Tensors of a Hugging Face directory, each read on access.

    Raises:
        ModelError: the directory has no usable weights (`weight_files`), or a file cannot be read.
    """

    def __init__(self, path: str) -> None:
        from safetensors import SafetensorError, safe_open

        self._files = dict[str, Any]()
        try:
            for file in weight_files(path):
                opened: Any = safe_open(str(file), framework="pt")
                self._files.update(dict.fromkeys(opened.keys(), opened))
        except (OSError, SafetensorError) as error:
            raise ModelError(f"model {path}: the weights cannot be loaded: {error}") from error

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


@torch.no_grad()
def load_weights(parts: Sequence[PackedGPT], source: Mapping[str, Tensor], new_head: bool) -> None:
    """Load this rank's parameters.

    Args:
        parts: model chunks of this rank.
        source: tensors by their Hugging Face names.
        new_head: whether a scalar head that is missing in the source starts at zero; otherwise it is an error.

    Raises:
        ModelError: a parameter is unknown, missing or misshaped, or tied embeddings differ.
    """
    partition = parts[0].partition
    check_source_names(source, partition, new_head)
    for part in parts:
        parameters = dict(part.named_parameters())
        for parameter in _local_parameters(part):
            if parameter.sources == (SCORE,) and SCORE not in source:
                parameters[parameter.name].zero_()
                continue
            tensors = [source[name] for name in parameter.sources]
            check_sources(parameter.sources, tensors, parameter.layout.shapes())
            if partition.head == "lm" and partition.architecture.tied:
                check_tied(parameter, tensors[0], source)
            group = _Shards.of(parameter)
            parameters[parameter.name].copy_(parameter.layout.shard(tensors, group.rank, group.size))


def check_source_names(source: Mapping[str, Tensor], partition: Partition, new_head: bool) -> None:
    """Check that a directory has exactly the parameters of a model, apart from an unused `lm_head`."""
    expected = model_sources(partition)
    optional = {HEAD} if partition.head != "lm" or partition.architecture.tied else set()
    if new_head and SCORE not in source:
        expected.discard(SCORE)
    check_names(set(source), expected, optional)


@dataclass(frozen=True, slots=True)
class _Shards:
    """Ranks over which a matrix is split."""

    group: dist.ProcessGroup
    rank: int
    size: int
    replica: int
    """Index of the copy of the matrix that these ranks together hold."""

    @classmethod
    def of(cls, parameter: Parameter) -> _Shards:
        """Return the ranks over which a parameter of this rank is split."""
        if parameter.is_expert:
            group = parallel_state.get_expert_tensor_parallel_group()
            return cls(group, group.rank(), group.size(), parallel_state.get_expert_data_parallel_rank())
        group = parallel_state.get_tensor_model_parallel_group()
        replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        return cls(group, group.rank(), group.size(), replica)


def own_parameters(parts: Sequence[PackedGPT]) -> Iterator[tuple[PackedGPT, Parameter]]:
    """Yield the parameters that this rank publishes.

    For each parameter this is rank 0 of its first replica. No rank publishes the copy of tied embeddings.
    """
    for part, parameter in _gathered_parameters(parts):
        if _Shards.of(parameter).rank == 0:
            yield part, parameter


def _gathered_parameters(parts: Sequence[PackedGPT]) -> Iterator[tuple[PackedGPT, Parameter]]:
    """Yield the parameters whose first replica has a shard on this rank."""
    for part in parts:
        for parameter in _local_parameters(part):
            copied = parameter.name == "output_layer.weight" and part.partition.architecture.tied
            if not copied and _Shards.of(parameter).replica == 0:
                yield part, parameter


def _local_parameters(part: PackedGPT) -> Iterator[Parameter]:
    return stage_parameters(part.partition, part.stage, parallel_state.get_expert_model_parallel_rank())


def full_parameters(parts: Sequence[PackedGPT], spread: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole weights of this rank's stages by their Hugging Face names.

    Only ranks of the first replica take part. Each weight is gathered on one of the ranks over which it is split; the
    other ranks only send their shards (collective over these ranks). Experts stay on their expert rank.

    Args:
        parts: model chunks of this rank.
        spread: whether each weight goes to the rank that has received least, to balance memory; otherwise all go to the
            first rank.
    """
    parameters = {part: dict(part.named_parameters()) for part in parts}
    received_by_kind: dict[bool, list[int]] = {}
    """Number of entries that each rank has received, for experts (True) and for other parameters (False)."""
    for part, parameter in _gathered_parameters(parts):
        ranks = _Shards.of(parameter)
        tensor = parameters[part][parameter.name].detach()
        received = received_by_kind.setdefault(parameter.is_expert, [0] * ranks.size)
        target = received.index(min(received)) if spread else 0
        received[target] += tensor.numel()
        shards = [tensor]
        if ranks.size > 1:
            shards = [torch.empty_like(tensor) for _ in range(ranks.size)] if ranks.rank == target else []
            dist.gather(tensor, shards or None, group=ranks.group, group_dst=target)
        if ranks.rank == target:
            yield from zip(parameter.sources, parameter.layout.unshard(shards), strict=True)
