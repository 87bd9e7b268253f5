"""Checks that a model can be trained in a layout, before any process starts. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.data import FinetuneSpec
from rl_contracts.errors import ConfigError, ModelError
from rl_engines_megatron.model.architecture import Architecture
from rl_engines_megatron.model.partition import Partition, partition_of

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
"""Files from which transformers reads weights: the files that the index lists, or a single file without an index."""


def weight_files(path: str) -> list[Path]:
    """Return the weight files of a Hugging Face directory; other files are ignored.

    Raises:
        ModelError: the directory has no weights that transformers would load, or the index cannot be read.
    """
    directory = Path(path)
    try:
        if (directory / INDEX).is_file():
            file_names = json.loads((directory / INDEX).read_text())["weight_map"].values()
            return sorted({directory / name for name in file_names})
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"model {path}: {INDEX} cannot be read: {error!r}. Copy or download it again.") from error
    if not (directory / WEIGHTS).is_file():
        raise ModelError(
            f"model {path}: expected {INDEX} or {WEIGHTS}, "
            f"found {', '.join(_stored_weight_names(directory)) or 'no weights'}. Load the model with transformers, "
            "and save it with `save_pretrained`."
        )
    return [directory / WEIGHTS]


def _stored_weight_names(directory: Path) -> list[str]:
    """Return the names of weight files of any format."""
    return sorted(file.name for file in directory.glob("*") if file.suffix in (".safetensors", ".bin"))


def partition_from_settings(
    hf_config: Any, strategy: ParallelStrategy, interleaved: int, stage_layers: Sequence[int], head: str
) -> Partition:
    """Return the partition of a model for a layout and the settings `interleaved` and `stage_layers`.

    Raises:
        ModelError, ConfigError: see `Architecture.from_hugging_face` and `Partition`.
    """
    architecture = Architecture.from_hugging_face(hf_config)
    stages = strategy.pipeline * interleaved
    return partition_of(architecture, strategy, stages, head=head, stage_sizes=tuple(stage_layers))


def check_model(spec: FinetuneSpec, strategy: ParallelStrategy, interleaved: int, stage_layers: Sequence[int]) -> None:
    """Reject a model of an unsupported family, a model that does not fit the layout, and unreadable weights.

    Files that do not exist yet are not checked.

    Raises:
        ConfigError: the message names the layout, the model and the conflict.
    """
    if not (Path(spec.model_path) / "config.json").is_file():
        return
    from transformers import AutoConfig

    try:
        partition_from_settings(
            AutoConfig.from_pretrained(spec.model_path), strategy, interleaved, stage_layers, spec.head
        )
        if _stored_weight_names(Path(spec.model_path)):
            weight_files(spec.model_path)
    except (ModelError, ConfigError, OSError, ValueError) as error:
        raise ConfigError(f"allocation megatron:{strategy} with model {spec.model_path}: {error}") from error
