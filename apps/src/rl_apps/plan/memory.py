"""What a model's parts take of the memory of a trainer's rank and of a server, by its configuration alone."""

from __future__ import annotations

from dataclasses import replace

from rl_apps.preflight.checks import SERVED_BYTES
from rl_apps.run.app import Run
from rl_apps.settings.config import GRPOConfig
from rl_apps.settings.model import MADE, make_model
from rl_contracts.errors import ModelError
from rl_contracts.models.sizes import ModelSizes, sizes_of


def read_sizes(run: Run[GRPOConfig], form: str, lessons: str) -> ModelSizes:
    """Sizes of a run's model: only its `config.json` is read, and nothing is loaded.

    Raises:
        ModelError: neither a directory nor the hub's cache has it, or this transformers does not know it.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = run.config
    if config.model.path in MADE:
        made = make_model(config.model, config.data, config.seed, form, lessons, warm_up=False, say=lambda _: None)
        config.model.directories[config.model.path] = str(made)
    path = config.model.directory()
    try:
        found = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(found)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"model.path={path}: expected a directory, of which only config.json is read here, or the id of a model "
            f"of the hub. Found: {str(error).splitlines()[0]}"
        ) from error
    return sizes_of(model, found)


def trainer_memory(run: Run[GRPOConfig], sizes: ModelSizes, micro_batches: int, replicas: int) -> dict[str, float]:
    """Bytes of one rank of the trainer, by part, with so many replicas; empty where its engine does not say. A
    reference has parameters alone."""
    config, strategy = run.config, replace(run.layout.actor.strategy, data=replicas)
    parts = config.actor.engine.memory(strategy, config.finetune_spec(), sizes, micro_batches)
    if parts and config.algorithm.needs_reference:
        parts["reference"] = parts["parameters"]
    return parts


def served_bytes(run: Run[GRPOConfig]) -> int:
    """Bytes of a parameter as it is served."""
    return SERVED_BYTES.get(getattr(run.config.rollout.server, "dtype", ""), 2)


def server_memory(run: Run[GRPOConfig], sizes: ModelSizes, device: float) -> dict[str, float]:
    """Bytes of each device of a server, by part.

    Args:
        device: memory of one.
    """
    assert run.layout.rollout is not None
    weights = served_bytes(run) * sizes.parameters / run.layout.rollout.strategy.model_size
    return {"weights": weights, "keys and values": run.config.rollout.server.cache_bytes(device, weights)}
