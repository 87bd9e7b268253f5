"""Estimate the memory of a trainer rank and of a server from the configuration of the model alone."""

from __future__ import annotations

from dataclasses import replace

from rl_apps.preflight.checks import SERVED_BYTES
from rl_apps.run.app import Run
from rl_apps.settings.config import GRPOConfig
from rl_apps.settings.model import MADE, make_model
from rl_contracts.errors import ModelError
from rl_contracts.models.sizes import ModelSizes, sizes_of


def read_sizes(run: Run[GRPOConfig], form: str, lessons: str) -> ModelSizes:
    """Return the sizes of the model of a run. This reads only `config.json` and loads no weights.

    Raises:
        ModelError: the model is neither a directory nor in the hub or its cache, or transformers does not support it.
    """
    import torch
    from transformers import AutoConfig

    from rl_contracts.images.features import auto_class

    config = run.config
    if config.model.path in MADE:
        directory = make_model(config.model, config.data, config.seed, form, lessons, warm_up=False, say=lambda _: None)
        config.model.directories[config.model.path] = str(directory)
    path = config.model.directory()
    try:
        model_config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model = auto_class(model_config).from_config(model_config)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"model.path={path}: expected a directory with a config.json file, or the hub id of a model; found: "
            f"{str(error).splitlines()[0]}"
        ) from error
    return sizes_of(model, model_config)


def trainer_memory(run: Run[GRPOConfig], sizes: ModelSizes, micro_batches: int, replicas: int) -> dict[str, float]:
    """Return the bytes of one trainer rank by component, or an empty dict if the train engine gives no estimate.

    The reference model, if any, adds its parameters only.

    Args:
        run: the run.
        sizes: sizes of the model.
        micro_batches: number of micro-batches per update.
        replicas: number of data-parallel replicas of the trainer.
    """
    config, strategy = run.config, replace(run.layout.actor.strategy, data=replicas)
    memory = config.actor.engine.memory(strategy, config.finetune_spec(), sizes, micro_batches)
    if memory and config.algorithm.needs_reference:
        memory["reference"] = memory["parameters"]
    return memory


def served_bytes(run: Run[GRPOConfig]) -> int:
    """Return the bytes per parameter on the server."""
    return SERVED_BYTES.get(getattr(run.config.rollout.server, "dtype", ""), 2)


def server_memory(run: Run[GRPOConfig], sizes: ModelSizes, device: float) -> dict[str, float]:
    """Return the bytes of one device of a server by component.

    Args:
        run: the run.
        sizes: sizes of the model.
        device: memory of the device in bytes.
    """
    assert run.layout.rollout is not None
    weights = served_bytes(run) * sizes.parameters / run.layout.rollout.strategy.model_size
    return {"weights": weights, "keys and values": run.config.rollout.server.cache_bytes(device, weights)}
