"""Whether a model can be trained in a layout, found out before anything starts. Does not import torch."""

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
"""What transformers reads a model's weights from: the files of the index, where there is one."""


def weight_files(path: str) -> list[Path]:
    """The files that hold the weights of a Hugging Face directory; what else lies there is not looked at.

    Raises:
        ModelError: there are none that transformers would read, or they are no safetensors.
    """
    directory = Path(path)
    try:
        if (directory / INDEX).is_file():
            named = json.loads((directory / INDEX).read_text())["weight_map"].values()
            return sorted({directory / name for name in named})
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"model {path}: {INDEX} cannot be read: {error!r}. Copy or download it again.") from error
    if not (directory / WEIGHTS).is_file():
        raise ModelError(
            f"model {path}: expected {INDEX} or {WEIGHTS}, found {', '.join(_stored(directory)) or 'no weights'}. Load "
            "it with transformers, and save it again with `save_pretrained`."
        )
    return [directory / WEIGHTS]


def _stored(directory: Path) -> list[str]:
    """The names of files of weights, of whatever kind."""
    return sorted(file.name for file in directory.glob("*") if file.suffix in (".safetensors", ".bin"))


def partition_from_settings(
    hf_config: Any, strategy: ParallelStrategy, interleaved: int, stage_layers: Sequence[int], head: str
) -> Partition:
    """How the model is cut, by the settings of these names.

    Raises:
        ModelError, ConfigError: see `Architecture.from_hugging_face` and `Partition`.
    """
    architecture = Architecture.from_hugging_face(hf_config)
    stages = strategy.pipeline * interleaved
    return partition_of(architecture, strategy, stages, head=head, stage_sizes=tuple(stage_layers))


def check_model(spec: FinetuneSpec, strategy: ParallelStrategy, interleaved: int, stage_layers: Sequence[int]) -> None:
    """Refuse a model of another family, one that cannot be cut so, and weights that cannot be read. What is not there
    yet passes.

    Raises:
        ConfigError: names the layout, the model and what does not fit.
    """
    if not (Path(spec.model_path) / "config.json").is_file():
        return
    from transformers import AutoConfig

    try:
        partition_from_settings(
            AutoConfig.from_pretrained(spec.model_path), strategy, interleaved, stage_layers, spec.head
        )
        if _stored(Path(spec.model_path)):
            weight_files(spec.model_path)
    except (ModelError, ConfigError, OSError, ValueError) as error:
        raise ConfigError(f"allocation megatron:{strategy} with model {spec.model_path}: {error}") from error
