"""Adapters as directories of `peft`, which `PeftModel.from_pretrained(base, directory)` loads."""

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
"""Prefix that peft adds to the parameter names of a model."""


def trained_parameters(model: PackedModel) -> list[tuple[str, nn.Parameter]]:
    """Return adapters, and the scalar head trained with them, by their names in the files of peft."""
    return [
        (PREFIX + name.replace(f".{lora.ADAPTER}.", "."), parameter)
        for name, parameter in model.own_parameters()
        if parameter.requires_grad
    ]


def save_adapter(
    model: PackedModel, config: LoRAConfig, base: str, path: str, dtype: str, parallel: ParallelContext
) -> None:
    """Write adapters to a new directory (collective); rank 0 writes.

    Args:
        base: path of the base model.
        dtype: dtype of the saved matrices.
    """
    from safetensors.torch import save_file

    with new_directory(path, parallel) as scratch:
        gathered = ((name, whole(parameter.detach())) for name, parameter in trained_parameters(model))
        # all ranks gather; only rank 0 stores the result
        tensors = {
            name: value.to("cpu", getattr(torch, dtype)).contiguous() for name, value in gathered if parallel.is_main
        }
        if parallel.is_main:
            settings = lora.peft_config(config, base, model.head)
            settings.target_modules = {name.removeprefix("model.").removesuffix(".weight") for name in model.adapters()}
            settings.modules_to_save = None if model.head == "lm" else [lora.HEAD]
            settings.inference_mode = True
            settings.save_pretrained(scratch)
            save_file(tensors, scratch / WEIGHTS, metadata={"format": "pt"})


def load_adapter(
    model: PackedModel, config: LoRAConfig, path: str, device: torch.device, parallel: ParallelContext
) -> None:
    """Load a directory of `save_adapter` into a model, in place (collective); rank 0 reads.

    Raises:
        ModelError, EngineError: the directory has no adapter, or one of another shape; raised on every rank.
    """
    named = trained_parameters(model)
    with parallel.agree_on_errors(f"loading {path}"):
        weights = _read(Path(path), config, named) if parallel.is_main else None
    copy_tensors(named, weights, device, parallel)


def _read(directory: Path, config: LoRAConfig, named: list[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        settings: dict[str, Any] = json.loads((directory / CONFIG).read_text())
        tensors = load_file(directory / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"adapter {directory}: cannot read {CONFIG} or {WEIGHTS}: {error}") from error
    saved_settings = (settings.get("r"), settings.get("lora_alpha"))
    if saved_settings != (config.rank, config.alpha):
        raise ModelError(
            f"adapter {directory}: expected (rank, alpha) = {(config.rank, config.alpha)}, found {saved_settings}. "
            "Set lora.rank and lora.alpha to the values of the adapter."
        )
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    different = sorted({name for name, p in named if shapes.get(name) != tuple(p.shape)} | shapes.keys() - dict(named))
    if different:
        raise ModelError(
            f"adapter {directory}: {len(different)} matrices differ from the engine's; {different[0]!r} has "
            f"shape {shapes.get(different[0], 'none')} in the directory. Set lora.target_modules as in the adapter."
        )
    return tensors
