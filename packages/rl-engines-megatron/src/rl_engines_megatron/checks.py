"""Whether a model can be trained in a layout, found out before anything starts. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.data import FinetuneSpec
from rl_contracts.errors import ConfigError, ModelError
from rl_engines_megatron.architecture import Architecture
from rl_engines_megatron.partition import Partition, partition_of


def cut(
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
    """Refuse a model of another family, and one that cannot be cut so. What is not there yet passes.

    Raises:
        ConfigError: names the layout, the model and what does not fit.
    """
    if not (Path(spec.model_path) / "config.json").is_file():
        return
    from transformers import AutoConfig

    try:
        cut(AutoConfig.from_pretrained(spec.model_path), strategy, interleaved, stage_layers, spec.head)
    except (ModelError, ConfigError, OSError, ValueError) as error:
        raise ConfigError(f"allocation megatron:{strategy} with model {spec.model_path}: {error}") from error
