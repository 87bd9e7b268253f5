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

from rl_contracts.data import SaveLoadMeta
from rl_contracts.parallel import ParallelContext
from rl_contracts.training.hugging_face import copy_tokenizer, pad_token_id

INDEX = "model.safetensors.index.json"


def write_weights(
    parameters: Iterator[tuple[str, Tensor]],
    directory: Path,
    dtype: str,
    max_shard_gb: float,
    parallel: ParallelContext,
) -> None:
    """Write this rank's whole parameters into a directory that is there, and the index of all ranks' (collective)."""
    from safetensors.torch import save_file

    kind, limit = getattr(torch, dtype), max_shard_gb * 1e9
    written, held, size, total = dict[str, str](), dict[str, Tensor](), 0, 0

    def flush() -> None:
        file = f"model-{parallel.rank:05d}-{len(set(written.values())):05d}.safetensors"
        save_file(held, directory / file, {"format": "pt"})
        written.update(dict.fromkeys(held, file))
        held.clear()

    for name, tensor in parameters:
        bytes_of = tensor.numel() * kind.itemsize
        if held and size + bytes_of > limit:
            flush()
            size = 0
        held[name] = tensor.to("cpu", kind, copy=True).contiguous()
        size, total = size + bytes_of, total + bytes_of
    if held:
        flush()
    parts: list[Any] = parallel.gather_json([written, total])
    if parallel.is_main:
        index = {
            "metadata": {"total_size": sum(size for _, size in parts)},
            "weight_map": {name: file for names, _ in parts for name, file in names.items()},
        }
        (directory / INDEX).write_text(json.dumps(index, indent=2))


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
        parameters: this rank's whole parameters, gathered as they are asked for.
        config: of the model.
        source: the directory that it was loaded from.
        max_shard_gb: largest file, in 10^9 bytes.
    """
    write_weights(parameters, directory, dtype, max_shard_gb, parallel)
    if not parallel.is_main:
        return
    import transformers

    config = copy.deepcopy(config)
    config.dtype = dtype
    generation = source / "generation_config.json"
    kind: Any = transformers.AutoModelForCausalLM
    if getattr(config, "num_labels", 0) == 1:
        kind = transformers.AutoModelForSequenceClassification
        config.pad_token_id = pad_token_id(config, None, meta.tokenizer_path)
    config.architectures = [kind._model_mapping[type(config)].__name__]
    config.save_pretrained(directory)
    if generation.is_file():
        shutil.copy2(generation, directory)
    if meta.tokenizer_path is not None:
        copy_tokenizer(Path(meta.tokenizer_path), directory)
