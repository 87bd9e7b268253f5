"""Weights in and out: of and to the names of Hugging Face, one parameter at a time."""

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
    """The tensors of a Hugging Face directory, each read when it is asked for.

    Raises:
        ModelError: the directory has no such weights (`weight_files`), or a file cannot be read.
    """

    def __init__(self, path: str) -> None:
        from safetensors import SafetensorError, safe_open

        self._files = dict[str, Any]()
        try:
            for file in weight_files(path):
                opened: Any = safe_open(str(file), framework="pt")
                self._files.update(dict.fromkeys(opened.keys(), opened))
        except (OSError, SafetensorError) as error:
            raise ModelError(f"model {path}: its weights cannot be loaded: {error}") from error

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


@torch.no_grad()
def load_weights(parts: Sequence[PackedGPT], source: Mapping[str, Tensor], new_head: bool) -> None:
    """Fill this rank's parameters.

    Args:
        new_head: whether a scalar head that the source, a language model, does not have starts at zero; else it is
            refused.

    Raises:
        ModelError: a parameter is unknown, missing or of another shape, or tied embeddings differ.
    """
    partition = parts[0].partition
    check_source_names(source, partition, new_head)
    for part in parts:
        held = dict(part.named_parameters())
        for parameter in _local_parameters(part):
            if parameter.sources == (SCORE,) and SCORE not in source:
                held[parameter.name].zero_()
                continue
            tensors = [source[name] for name in parameter.sources]
            check_sources(parameter.sources, tensors, parameter.layout.shapes())
            if partition.head == "lm" and partition.architecture.tied:
                check_tied(parameter, tensors[0], source)
            group = _Shards.of(parameter)
            held[parameter.name].copy_(parameter.layout.shard(tensors, group.rank, group.size))


def check_source_names(source: Mapping[str, Tensor], partition: Partition, new_head: bool) -> None:
    """See that a directory holds the parameters of a model, and no others but a head that is not wanted."""
    expected = model_sources(partition)
    optional = {HEAD} if partition.head != "lm" or partition.architecture.tied else set()
    if new_head and SCORE not in source:
        expected.discard(SCORE)
    check_names(set(source), expected, optional)


@dataclass(frozen=True, slots=True)
class _Shards:
    """The ranks over which a matrix is split."""

    group: dist.ProcessGroup
    rank: int
    size: int
    replica: int
    """Which of the copies of the matrix these ranks hold together."""

    @classmethod
    def of(cls, parameter: Parameter) -> _Shards:
        """Those of a parameter of this rank."""
        if parameter.of_expert:
            group = parallel_state.get_expert_tensor_parallel_group()
            return cls(group, group.rank(), group.size(), parallel_state.get_expert_data_parallel_rank())
        group = parallel_state.get_tensor_model_parallel_group()
        replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        return cls(group, group.rank(), group.size(), replica)


def own_parameters(parts: Sequence[PackedGPT]) -> Iterator[tuple[PackedGPT, Parameter]]:
    """The parameters that this rank yields, first of the ranks that hold a copy: all of its stages, but copies of tied
    embeddings."""
    for part, parameter in _gathered_parameters(parts):
        if _Shards.of(parameter).rank == 0:
            yield part, parameter


def _gathered_parameters(parts: Sequence[PackedGPT]) -> Iterator[tuple[PackedGPT, Parameter]]:
    """Those of whose first copy this rank has a part."""
    for part in parts:
        for parameter in _local_parameters(part):
            copied = parameter.name == "output_layer.weight" and part.partition.architecture.tied
            if not copied and _Shards.of(parameter).replica == 0:
                yield part, parameter


def _local_parameters(part: PackedGPT) -> Iterator[Parameter]:
    return stage_parameters(part.partition, part.stage, parallel_state.get_expert_model_parallel_rank())


def full_parameters(parts: Sequence[PackedGPT], spread: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The weights of this rank's stages, whole, by their Hugging Face names, in the first replica, on one of the ranks
    over which each is split; the others only take part in gathering it (collective over these ranks).

    An expert is yielded where it lies: it never comes to other expert ranks.

    Args:
        spread: whether each goes to the rank that has got least so far, so that who keeps them holds a share; else all
            go to the first rank.
    """
    held = {part: dict(part.named_parameters()) for part in parts}
    gathered: dict[bool, list[int]] = {}
    """Entries that each rank has got, of experts and of the rest."""
    for part, parameter in _gathered_parameters(parts):
        shards_of = _Shards.of(parameter)
        tensor = held[part][parameter.name].detach()
        so_far = gathered.setdefault(parameter.of_expert, [0] * shards_of.size)
        to = so_far.index(min(so_far)) if spread else 0
        so_far[to] += tensor.numel()
        shards = [tensor]
        if shards_of.size > 1:
            shards = [torch.empty_like(tensor) for _ in range(shards_of.size)] if shards_of.rank == to else []
            dist.gather(tensor, shards or None, group=shards_of.group, group_dst=to)
        if shards_of.rank == to:
            yield from zip(parameter.sources, parameter.layout.unshard(shards), strict=True)
