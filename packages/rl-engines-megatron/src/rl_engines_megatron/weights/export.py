"""Saving a Hugging Face model directory, of which each pipeline stage writes its own files."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.data import SaveLoadMeta
from rl_contracts.engine import Snapshot
from rl_contracts.models.config_files import copy_tokenizer, pad_token_id
from rl_engines_megatron.model.checks import INDEX


def save_hugging_face(
    parameters: Iterator[tuple[str, Tensor]],
    config: Any,
    source: Path,
    meta: SaveLoadMeta,
    directory: Path,
    dtype: str,
    max_shard_gb: float,
    parallel: ParallelContext,
) -> None:
    """Write a directory that transformers loads (collective).

    Args:
        parameters: this rank's whole parameters, gathered as they are asked for; at most a file's are held at once.
        config: of the model.
        source: the directory that it was loaded from.
        directory: is there.
        max_shard_gb: largest file, in 10^9 bytes.
    """
    names = {}
    for file, tensors in _files(parameters, dtype, max_shard_gb, parallel.rank):
        _write(directory / file, tensors)
        names[file] = _sizes(tensors)
    index = _index(names, parallel)
    if parallel.is_main:
        _write_rest(index, config, source, meta, directory, dtype)


def copy_hugging_face(
    parameters: Iterator[tuple[str, Tensor]],
    config: Any,
    source: Path,
    meta: SaveLoadMeta,
    dtype: str,
    max_shard_gb: float,
    parallel: ParallelContext,
) -> Snapshot:
    """Copy this rank's share of what `save_hugging_face` writes to host memory (collective); what writes it."""
    held = dict(_files(parameters, dtype, max_shard_gb, parallel.rank))
    index = _index({file: _sizes(tensors) for file, tensors in held.items()}, parallel)
    config = copy.deepcopy(config)

    def write() -> list[Path]:
        directory = Path(meta.path)
        directory.mkdir(parents=True, exist_ok=True)
        written = [_write(directory / file, tensors) for file, tensors in held.items()]
        return written + (_write_rest(index, config, source, meta, directory, dtype) if parallel.is_main else [])

    return write


def _files(
    parameters: Iterator[tuple[str, Tensor]], dtype: str, max_shard_gb: float, rank: int
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Parameters in host memory, by the file that they go to."""
    kind, held, size, count = getattr(torch, dtype), dict[str, Tensor](), 0, 0
    for name, tensor in parameters:
        bytes_of = tensor.numel() * kind.itemsize
        if held and size + bytes_of > max_shard_gb * 1e9:
            yield _file_name(rank, count), held
            held, size, count = {}, 0, count + 1
        held[name] = tensor.to("cpu", kind, copy=True).contiguous()
        size += bytes_of
    if held:
        yield _file_name(rank, count), held


def _file_name(rank: int, number: int) -> str:
    return f"model-{rank:05d}-{number:05d}.safetensors"


def _write(file: Path, tensors: dict[str, Tensor]) -> Path:
    from safetensors.torch import save_file

    save_file(tensors, file, {"format": "pt"})
    return file


def _sizes(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Bytes of each."""
    return {name: tensor.nbytes for name, tensor in tensors.items()}


def _index(files: dict[str, dict[str, int]], parallel: ParallelContext) -> str:
    """What lies in which file, of all ranks (collective).

    Args:
        files: bytes by name, of each file of this rank.
    """
    parts: list[dict[str, dict[str, int]]] = parallel.gather_json(files)
    named = [(name, file, size) for part in parts for file, names in part.items() for name, size in names.items()]
    total = {"total_size": sum(size for _, _, size in named)}
    return json.dumps({"metadata": total, "weight_map": {name: file for name, file, _ in named}}, indent=2)


def _write_rest(index: str, config: Any, source: Path, meta: SaveLoadMeta, directory: Path, dtype: str) -> list[Path]:
    """Write what stands beside the weights; the files that these are."""
    import transformers

    (directory / INDEX).write_text(index)
    config = copy.deepcopy(config)
    config.dtype = dtype
    vars(config).pop(
        "auto_map", None
    )  # files of the model's own code, which transformers has and this directory has not
    generation = source / "generation_config.json"
    kind: Any = transformers.AutoModelForCausalLM
    pad_id = None
    if getattr(config, "num_labels", 0) == 1:
        kind = transformers.AutoModelForSequenceClassification
        config.pad_token_id = pad_id = pad_token_id(config, None, meta.tokenizer_path)
    config.architectures = [kind._model_mapping[type(config)].__name__]
    config.save_pretrained(directory)
    if generation.is_file():
        shutil.copy2(generation, directory)
    if meta.tokenizer_path is not None:
        copy_tokenizer(Path(meta.tokenizer_path), directory, pad_id)
    of_ranks = {*json.loads(index)["weight_map"].values()}
    return sorted(file for file in directory.iterdir() if file.name not in of_ranks)
