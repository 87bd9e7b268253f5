"""Save a Hugging Face model directory."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.data import SaveLoadMeta
from rl_contracts.engine import Snapshot
from rl_contracts.models.atomic_directory import new_directory
from rl_contracts.models.config_files import (
    MAX_FILE_BYTES,
    PROCESSOR_PATTERNS,
    copy_files,
    copy_tokenizer,
    pad_token_id,
    quiet_transformers,
)
from rl_contracts.runtime.logging import get_logger
from rl_engines_fsdp.model.loading import empty_model
from rl_engines_fsdp.model.packed import PackedModel
from rl_engines_fsdp.ranks.sharding import full_parameters

log = get_logger("engines.fsdp")


def save_hugging_face(model: PackedModel, meta: SaveLoadMeta, dtype: str, parallel: ParallelContext) -> None:
    """Write a directory that transformers can load, atomically (collective); see `copy_hugging_face`."""
    with new_directory(meta.path, parallel) as scratch:
        copy_hugging_face(model, replace(meta, path=str(scratch)), dtype, parallel)()


def copy_hugging_face(model: PackedModel, meta: SaveLoadMeta, dtype: str, parallel: ParallelContext) -> Snapshot:
    """Copy the model to rank 0's host memory and return a function that writes it to a directory (collective).

    Weights are in safetensors files of at most `MAX_FILE_BYTES` each, with an index if there are several.
    transformers loads a language model as `AutoModelForCausalLM`, a model with a scalar head as
    `AutoModelForSequenceClassification`, and a vision-language model as `AutoModelForImageTextToText`.
    """
    inner: Any = model.model
    torch_dtype = getattr(torch, dtype)
    # all ranks gather; only rank 0 stores the result
    tensors = {
        name: value.to("cpu", torch_dtype, copy=True) for name, value in full_parameters(model) if parallel.is_main
    }
    if not parallel.is_main:
        return list
    tensors |= {name: value.to("cpu", copy=True) for name, value in model.kept_buffers()}
    config = copy.deepcopy(inner.config)
    vars(config).pop("auto_map", None)  # refers to code files of the model, which this directory does not have
    pad_id = None
    if model.head != "lm":
        pad_id = pad_token_id(config, inner.generation_config, meta.tokenizer_path)
        config.get_text_config().pad_token_id = pad_id
    # model on the meta device, whose `save_pretrained` writes the tensors. Create it here, not in `write`: transformers
    # changes torch's default dtype while it creates a model, and `write` may run during training
    shell: Any = empty_model(config, model.head).to(torch_dtype)
    shell._weight_conversions = getattr(inner, "_weight_conversions", None)  # tensor names as in the source directory

    def write() -> list[Path]:
        directory = Path(meta.path)
        directory.mkdir(parents=True, exist_ok=True)
        with quiet_transformers():
            shell.save_pretrained(directory, state_dict=tensors, max_shard_size=MAX_FILE_BYTES)
        if inner.generation_config is not None:
            # unchanged: `save_pretrained` would reject settings of some published models
            inner.generation_config.to_json_file(directory / "generation_config.json")
        if model.vision is not None:  # the directory of the tokenizer may have no processor
            copy_files(Path(model.vision.directory), directory, PROCESSOR_PATTERNS)
        if meta.tokenizer_path is not None:
            copy_tokenizer(Path(meta.tokenizer_path), directory, pad_id)
        return [file for file in directory.rglob("*") if file.is_file()]

    return write
