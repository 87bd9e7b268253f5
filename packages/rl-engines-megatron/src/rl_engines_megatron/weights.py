"""Weights in and out: of and to the names of Hugging Face, one parameter at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from rl_contracts.errors import ModelError
from rl_engines_megatron.conversion import check_names, check_sources
from rl_engines_megatron.model import PackedGPT
from rl_engines_megatron.naming import HEAD, SCORE, Parameter, stage_parameters
from rl_engines_megatron.partition import Partition


class StoredWeights(Mapping[str, Tensor]):
    """The tensors of a Hugging Face directory, each read when it is asked for.

    Raises:
        ModelError: the directory has no safetensors files, or one cannot be read.
    """

    def __init__(self, path: str) -> None:
        from safetensors import SafetensorError, safe_open

        self._path, self._files = path, dict[str, Any]()
        files = sorted(Path(path).glob("*.safetensors"))
        if not files:
            raise ModelError(f"model {path}: expected safetensors files, found none.")
        try:
            for file in files:
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
        ModelError: a parameter is unknown, missing or of another shape.
    """
    partition = parts[0].partition
    check_source_names(source, partition, new_head)
    rank = parallel_state.get_tensor_model_parallel_rank()
    for part in parts:
        held = dict(part.named_parameters())
        for parameter in stage_parameters(partition, part.stage):
            if parameter.sources == (SCORE,) and SCORE not in source:
                held[parameter.name].zero_()
                continue
            tensors = [source[name] for name in parameter.sources]
            check_sources(parameter.sources, tensors, parameter.layout.shapes())
            held[parameter.name].copy_(parameter.layout.shard(tensors, rank, partition.tp_size))


def check_source_names(source: Mapping[str, Tensor], partition: Partition, new_head: bool) -> None:
    """See that a directory holds the parameters of a model, and no others but a head that is not wanted."""
    stages = (stage_parameters(partition, stage) for stage in range(partition.pp_size))
    expected = {name for stage in stages for parameter in stage for name in parameter.sources}
    optional = {HEAD} if partition.head != "lm" or partition.architecture.tied else set()
    if new_head and SCORE not in source:
        expected.discard(SCORE)
    check_names(set(source), expected, optional)


def own_parameters(parts: Sequence[PackedGPT]) -> Iterator[tuple[PackedGPT, Parameter]]:
    """The parameters that this rank's stages bring to the whole model: all but copies of tied embeddings."""
    for part in parts:
        for parameter in stage_parameters(part.partition, part.stage):
            copied = parameter.name == "output_layer.weight" and part.partition.architecture.tied
            if not copied:
                yield part, parameter


def full_parameters(parts: Sequence[PackedGPT]) -> Iterator[tuple[str, Tensor]]:
    """The weights of this rank's stages, whole, by their Hugging Face names, on tensor rank 0 of the first replica;
    the others only take part in gathering them (collective over tensor ranks)."""
    if not _first_replica():
        return
    group, ranks = parallel_state.get_tensor_model_parallel_group(), parts[0].partition.tp_size
    for part, parameter in own_parameters(parts):
        tensor = dict(part.named_parameters())[parameter.name].detach()
        shards = [tensor]
        if ranks > 1:
            shards = [torch.empty_like(tensor) for _ in range(ranks)] if speaks() else []
            dist.gather(tensor, shards or None, group=group, group_dst=0)
        if speaks():
            yield from zip(parameter.sources, parameter.layout.unshard(shards), strict=True)


def speaks() -> bool:
    """Whether this rank yields the parameters of its stages."""
    return _first_replica() and parallel_state.get_tensor_model_parallel_rank() == 0


def _first_replica() -> bool:
    return parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
