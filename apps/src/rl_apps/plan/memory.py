"""Estimate the memory of a trainer rank and of a server from the configuration of the model alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rl_apps.preflight.checks import LARGEST_SHARE, SERVED_BYTES
from rl_apps.run.app import Run
from rl_apps.settings.config import GRPOConfig
from rl_apps.settings.model import MADE, make_model
from rl_contracts.errors import ModelError
from rl_contracts.models.sizes import ModelSizes, sizes_of

GIB = 2**30
TRAINER_RANK, SERVER_DEVICE = "trainer rank", "server device"
USABLE = 0.95
"""Fraction of a device for the counted uses; the rest is for CUDA contexts, NCCL buffers and fragmentation."""
LASTING = ("parameters", "optimizer", "reference", "critic")
"""Parts of a trainer rank that stay on the device between two training steps."""


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of one device: the uses that are counted, and the bytes that are available."""

    owner: str
    """Use of the device, for example `trainer rank`."""
    parts: dict[str, float]
    """Bytes by component; empty if the engine gives no estimate."""
    available: float
    """Bytes of the device, or the part that a server may use; 0 if unknown."""

    @property
    def total(self) -> float:
        """Sum of all parts in bytes."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether all parts fit, as far as is known."""
        return not self.available or self.total <= self.available

    def __str__(self) -> str:
        return f"a {self.owner} needs {self.total / GIB:.1f} of {self.available / GIB:.1f} GiB"


def read_sizes(run: Run[GRPOConfig], form: str, lessons: str) -> ModelSizes:
    """Return the sizes of the model of a run. This reads only `config.json`, enters its directory in
    `model.directories`, and loads no weights.

    Raises:
        ModelError: the model is neither a directory nor in the hub or its cache, or transformers does not support it.
    """
    import torch
    from transformers import AutoConfig
    from transformers.utils import cached_file

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
        config.model.directories[config.model.path] = str(Path(str(cached_file(path, "config.json"))).parent)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"model.path={path}: expected a directory with a config.json file, or the hub id of a model; found: "
            f"{str(error).splitlines()[0]}"
        ) from error
    return sizes_of(model, model_config)


def trainer_memory(run: Run[GRPOConfig], sizes: ModelSizes, micro_batches: int, device: float) -> DeviceMemory:
    """Return the memory of one trainer rank.

    The reference policy, if any, adds its parameters only, and the critic its parameters and optimizer state.

    Args:
        run: the run.
        sizes: sizes of the model.
        micro_batches: number of micro-batches per update.
        device: memory of the device in bytes; 0 if unknown.
    """
    config = run.config
    parts = config.actor.engine.memory(run.layout.actor.strategy, config.finetune_spec(), sizes, micro_batches)
    if parts and config.algorithm.needs_reference:
        parts["reference"] = parts.get("parameters", 0.0)
    if parts and config.algorithm.needs_critic:
        parts["critic"] = parts.get("parameters", 0.0) + parts.get("optimizer", 0.0)
    return DeviceMemory(TRAINER_RANK, parts, USABLE * device)


def served_bytes(run: Run[GRPOConfig]) -> int:
    """Return the bytes per parameter on the server."""
    return SERVED_BYTES.get(getattr(run.config.rollout.server, "dtype", ""), 2)


def server_weights(run: Run[GRPOConfig], sizes: ModelSizes) -> float:
    """Return the bytes of the weights on one device of a server."""
    assert run.layout.rollout is not None
    return served_bytes(run) * sizes.parameters / run.layout.rollout.strategy.model_size


def server_memory(run: Run[GRPOConfig], sizes: ModelSizes, completion: float, device: float) -> DeviceMemory:
    """Return the memory of one device of a server.

    Args:
        run: the run.
        sizes: sizes of the model.
        completion: bytes of the KV cache of one completion on this device, for which there must be room.
        device: memory of the device in bytes.
    """
    weights = server_weights(run, sizes)
    cache = run.config.rollout.server.cache_bytes(device, weights)
    parts = {"weights": weights, "keys and values": max(cache, completion)}
    return DeviceMemory(SERVER_DEVICE, parts, min(device, weights + cache))


def shared_memory(
    run: Run[GRPOConfig], sizes: ModelSizes, trainer: DeviceMemory, server: DeviceMemory, device: float
) -> list[DeviceMemory]:
    """Return the memory of a device that a trainer rank and a server use in turn, in training and in generation.

    The servers sleep in training. In generation the trainer keeps its parameters and its optimizer state. A run rejects
    servers that take more than `LARGEST_SHARE` of the device.
    """
    sleeping = run.config.rollout.server.sleeping_bytes(device, server_weights(run, sizes))
    lasting = sum(trainer.parts.get(part, 0.0) for part in LASTING)
    in_turn = {
        "shared device in training": {"trainer": trainer.total, "sleeping server": sleeping},
        "shared device in generation": {"trainer": lasting, "server": server.total},
    }
    memory = [DeviceMemory(owner, parts, USABLE * device) for owner, parts in in_turn.items()]
    if hasattr(run.config.rollout.server, "memory_share"):
        memory.append(DeviceMemory("server on a shared device", server.parts, LARGEST_SHARE * device))
    return memory
