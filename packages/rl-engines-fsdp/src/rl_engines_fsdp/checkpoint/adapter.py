"""Adapters as directories of `peft`: `PeftModel.from_pretrained(base, directory)` loads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.errors import ModelError
from rl_contracts.models.atomic_directory import new_directory
from rl_engines_fsdp.config import LoRAConfig
from rl_engines_fsdp.model import lora
from rl_engines_fsdp.model.packed import PackedModel
from rl_engines_fsdp.ranks.sharding import copy_tensors, whole

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What peft puts before a model's own names."""


def trained_parameters(model: PackedModel) -> list[tuple[str, nn.Parameter]]:
    """Adapters, and a scalar head that is trained with them, by their names in peft's files."""
    return [
        (PREFIX + name.replace(f".{lora.ADAPTER}.", "."), parameter)
        for name, parameter in model.own_parameters()
        if parameter.requires_grad
    ]


def save_adapter(
    model: PackedModel, config: LoRAConfig, base: str, path: str, dtype: str, parallel: ParallelContext
) -> None:
    """Write a new directory (collective); rank 0 writes.

    Args:
        base: the model that the adapter adapts, as it was loaded.
        dtype: in which the matrices are saved.
    """
    from safetensors.torch import save_file

    with new_directory(path, parallel) as scratch:
        gathered = ((name, whole(parameter.detach())) for name, parameter in trained_parameters(model))
        # all ranks gather, and rank 0 keeps
        found = {name: v.to("cpu", getattr(torch, dtype)).contiguous() for name, v in gathered if parallel.is_main}
        if parallel.is_main:
            settings = lora.peft_config(config, base, model.head)
            settings.target_modules = {name.removeprefix("model.").removesuffix(".weight") for name in model.adapters()}
            settings.modules_to_save = None if model.head == "lm" else [lora.HEAD]
            settings.inference_mode = True
            settings.save_pretrained(scratch)
            save_file(found, scratch / WEIGHTS, metadata={"format": "pt"})


def load_adapter(
    model: PackedModel, config: LoRAConfig, path: str, device: torch.device, parallel: ParallelContext
) -> None:
    """Read what `save_adapter` wrote, in place (collective); rank 0 reads.

    Raises:
        ModelError, EngineError: the directory is no adapter, or not one of this shape; on every rank.
    """
    named = trained_parameters(model)
    with parallel.agree_on_errors(f"loading {path}"):
        given = _read(Path(path), config, named) if parallel.is_main else None
    copy_tensors(named, given, device, parallel)


def _read(directory: Path, config: LoRAConfig, named: list[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        settings: dict[str, Any] = json.loads((directory / CONFIG).read_text())
        found = load_file(directory / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"adapter {directory}: expected {CONFIG} and {WEIGHTS}: {error}") from error
    theirs = (settings.get("r"), settings.get("lora_alpha"))
    if theirs != (config.rank, config.alpha):
        raise ModelError(
            f"adapter {directory}: expected rank and alpha {(config.rank, config.alpha)}, found {theirs}. "
            "Set lora.rank and lora.alpha to those of the adapter."
        )
    shapes = {name: tuple(value.shape) for name, value in found.items()}
    different = sorted({name for name, p in named if shapes.get(name) != tuple(p.shape)} | shapes.keys() - dict(named))
    if different:
        raise ModelError(
            f"adapter {directory}: {len(different)} matrices differ from the engine's, {different[0]!r} first, of "
            f"shape {shapes.get(different[0], 'none')} there. Was it trained with other lora.target_modules?"
        )
    return found
