"""Saving a Hugging Face model directory."""

from __future__ import annotations

import copy
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_contracts.data import SaveLoadMeta
from rl_contracts.errors import ModelError
from rl_contracts.parallel import ParallelContext
from rl_engines_fsdp.causal_lm import PackedCausalLM
from rl_engines_fsdp.loading import empty_model, quiet
from rl_engines_fsdp.new_directory import NewDirectory
from rl_engines_fsdp.sharding import full_parameters

TOKENIZER_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
)


@dataclass(frozen=True, slots=True)
class Description:
    """What a model directory says of its model besides the weights."""

    config: Any
    """transformers' model configuration."""
    generation: Any
    """transformers' generation configuration, or None."""


def save_hugging_face(
    model: PackedCausalLM,
    described: Description,
    meta: SaveLoadMeta,
    dtype: str,
    parallel: ParallelContext,
) -> None:
    """Write a directory that `AutoModelForCausalLM.from_pretrained` loads (collective); rank 0 writes."""
    target = NewDirectory(meta.path, parallel)
    target.prepare()
    whole: dict[str, Tensor] = {}
    for name, value in full_parameters(model):
        if parallel.is_main:
            whole[name] = value.to("cpu", getattr(torch, dtype))
    error: Exception | None = None
    if parallel.is_main:
        try:
            _write_model(described, whole, target.scratch, dtype)
            if meta.tokenizer_path is not None:
                _copy_tokenizer(Path(meta.tokenizer_path), target.scratch)
        except (OSError, RuntimeError, ValueError, ModelError) as failure:
            error = failure
    target.commit(error)


def _write_model(described: Description, whole: dict[str, Tensor], path: Path, dtype: str) -> None:
    shell: Any = empty_model(copy.deepcopy(described.config)).to(getattr(torch, dtype))
    with quiet():
        shell.save_pretrained(path, state_dict=whole)
    if described.generation is not None:
        # as it was: `save_pretrained` would refuse settings that some published models have
        described.generation.to_json_file(path / "generation_config.json")


def _copy_tokenizer(source: Path, target: Path) -> None:
    if not source.is_dir():
        raise ModelError(f"tokenizer {source}: expected a directory with tokenizer files, found none.")
    for pattern in TOKENIZER_PATTERNS:
        for entry in source.glob(pattern):
            if entry.is_file():
                shutil.copy2(entry, target / entry.name)
            else:
                shutil.copytree(entry, target / entry.name, dirs_exist_ok=True)
