"""Saving of a Hugging Face model directory, in which each rank writes its own files."""

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
from rl_contracts.models.config_files import MAX_FILE_BYTES, copy_tokenizer, pad_token_id
from rl_engines_megatron.model.checks import INDEX


def save_hugging_face(
    parameters: Iterator[tuple[str, Tensor]],
    config: Any,
    source: Path,
    meta: SaveLoadMeta,
    directory: Path,
    dtype: str,
    parallel: ParallelContext,
) -> None:
    """Write a directory that transformers can load (collective).

    Args:
        parameters: this rank's whole parameters, gathered lazily; memory holds the parameters of at most one file.
        config: config of the model.
        source: directory from which the model was loaded.
        meta: options of the save.
        directory: existing directory to write to.
        dtype: dtype of the saved weights.
        parallel: ranks of the run.
    """
    names = {}
    for file, tensors in _files(parameters, dtype, parallel.rank):
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
    parallel: ParallelContext,
) -> Snapshot:
    """Copy this rank's files of `save_hugging_face` to host memory (collective).

    Returns:
        A function that writes the files and returns their paths.
    """
    files = dict(_files(parameters, dtype, parallel.rank))
    index = _index({file: _sizes(tensors) for file, tensors in files.items()}, parallel)
    config = copy.deepcopy(config)

    def write() -> list[Path]:
        directory = Path(meta.path)
        directory.mkdir(parents=True, exist_ok=True)
        written = [_write(directory / file, tensors) for file, tensors in files.items()]
        return written + (_write_rest(index, config, source, meta, directory, dtype) if parallel.is_main else [])

    return write


def _files(parameters: Iterator[tuple[str, Tensor]], dtype: str, rank: int) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield file names with their parameters in host memory."""
    torch_dtype, tensors, size, count = getattr(torch, dtype), dict[str, Tensor](), 0, 0
    for name, tensor in parameters:
        num_bytes = tensor.numel() * torch_dtype.itemsize
        if tensors and size + num_bytes > MAX_FILE_BYTES:
            yield _file_name(rank, count), tensors
            tensors, size, count = {}, 0, count + 1
        tensors[name] = tensor.to("cpu", torch_dtype, copy=True).contiguous()
        size += num_bytes
    if tensors:
        yield _file_name(rank, count), tensors


def _file_name(rank: int, number: int) -> str:
    return f"model-{rank:05d}-{number:05d}.safetensors"


def _write(file: Path, tensors: dict[str, Tensor]) -> Path:
    from safetensors.torch import save_file

    save_file(tensors, file, {"format": "pt"})
    return file


def _sizes(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Return the size of each tensor in bytes."""
    return {name: tensor.nbytes for name, tensor in tensors.items()}


def _index(files: dict[str, dict[str, int]], parallel: ParallelContext) -> str:
    """Return the index file for the weight files of all ranks, as JSON (collective).

    Args:
        files: size in bytes by name, for each file of this rank.
        parallel: ranks of the run.
    """
    all_files: list[dict[str, dict[str, int]]] = parallel.gather_json(files)
    entries = [
        (name, file, size)
        for rank_files in all_files
        for file, sizes in rank_files.items()
        for name, size in sizes.items()
    ]
    total = {"total_size": sum(size for _, _, size in entries)}
    return json.dumps({"metadata": total, "weight_map": {name: file for name, file, _ in entries}}, indent=2)


def _write_rest(index: str, config: Any, source: Path, meta: SaveLoadMeta, directory: Path, dtype: str) -> list[Path]:
    """Write all files other than the weights; return their paths."""
    import transformers

    (directory / INDEX).write_text(index)
    config = copy.deepcopy(config)
    config.dtype = dtype
    # refers to code files of the model, which are not copied; transformers has its own implementation
    vars(config).pop("auto_map", None)
    generation = source / "generation_config.json"
    auto_class: Any = transformers.AutoModelForCausalLM
    pad_id = None
    if getattr(config, "num_labels", 0) == 1:
        auto_class = transformers.AutoModelForSequenceClassification
        config.pad_token_id = pad_id = pad_token_id(config, None, meta.tokenizer_path)
    config.architectures = [auto_class._model_mapping[type(config)].__name__]
    config.save_pretrained(directory)
    if generation.is_file():
        shutil.copy2(generation, directory)
    if meta.tokenizer_path is not None:
        copy_tokenizer(Path(meta.tokenizer_path), directory, pad_id)
    weight_files = {*json.loads(index)["weight_map"].values()}
    return sorted(file for file in directory.iterdir() if file.name not in weight_files)
