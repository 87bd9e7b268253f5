"""Training states that resume exactly, also with a different number of ranks."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.errors import ModelError
from rl_contracts.models.atomic_directory import new_directory
from rl_engines_fsdp.checkpoint.shards import ShardReader, shards_of, write_shards
from rl_engines_fsdp.model.packed import PackedModel
from rl_engines_fsdp.optimizer import make_state

COUNTERS = ("version", "steps", "skipped")
"""Names of the counters: applied training batches, optimizer steps, and consecutive skipped steps."""
FIRST_RANDOM = "random.0.cpu"
"""Entry of the random state of rank 0, present in every state."""
SCALING = "adapter.scaling"
"""Entry of alpha / rank, present with adapters."""
NOTHING = "optimizer.nothing"
"""Entry that marks an empty optimizer state, as before the first step."""


def save_state(state: dict[str, Any], path: str, parallel: ParallelContext) -> None:
    """Write a state from `state_of` to a new directory (collective); every rank writes its shards."""
    with new_directory(path, parallel) as scratch:
        write_shards(shards_of(state, parallel), scratch, parallel.rank)


def load_state(
    model: PackedModel, optimizer: torch.optim.Optimizer | None, path: str, parallel: ParallelContext
) -> dict[str, int]:
    """Load a directory of `save_state`, written with any number of ranks, in place (collective).

    Returns:
        the counters by name.

    Raises:
        ModelError: the directory has no saved state, or the state of another model.
    """
    shards = ShardReader(Path(path))
    stored = shards.names
    if optimizer is not None and NOTHING in stored:
        optimizer.state.clear()
    elif optimizer is not None and not optimizer.state:
        make_state(optimizer)
    state = state_of(model, optimizer, dict.fromkeys(COUNTERS, 0), parallel)
    # random states depend on the number of ranks and the device type; older states have no scaling
    optional = ("random.", SCALING)
    state = {key: value for key, value in state.items() if key in stored or not key.startswith(optional)}
    scaling = float(state.get(SCALING, 0.0))
    state[FIRST_RANDOM] = torch.empty_like(torch.get_rng_state())
    saved_optimizer_entries = (key for key in stored if optimizer is not None and key.startswith("optimizer."))
    missing = sorted((state.keys() - stored) | (set(saved_optimizer_entries) - state.keys()))
    if missing:
        raise ModelError(
            f"{path}: the saved state does not match this model and optimizer: {len(missing)} entries differ, "
            f"including {missing[:3]}. Load a state that was saved with the same model and optimizer settings."
        )
    try:
        shards.fill(state)
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelError(f"{path}: cannot load the saved state into this model: {error}") from error
    if SCALING in state and scaling != float(state[SCALING]):
        raise ModelError(
            f"{path}: the saved adapters were trained with alpha / rank = {float(state[SCALING]):g}, but the settings "
            f"have {scaling:g}. Set lora.alpha to the saved value."
        )
    if optimizer is not None:
        _restore_numbers(model, optimizer, state)
    cpu, cuda = (state.get(f"random.{parallel.rank}.{kind}") for kind in ("cpu", "cuda"))
    if cpu is None:  # the saved run had fewer ranks: seed a new random stream
        digest = blake2b(state[FIRST_RANDOM].numpy().tobytes() + b"%d" % parallel.rank, digest_size=8)
        torch.manual_seed(int.from_bytes(digest.digest(), "little"))
    else:
        torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda, parallel.device)
    return {name: int(state[f"counter.{name}"]) for name in COUNTERS}


def state_of(
    model: PackedModel,
    optimizer: torch.optim.Optimizer | None,
    counters: dict[str, int],
    parallel: ParallelContext,
) -> dict[str, Any]:
    """Return weights, optimizer state, counters and this rank's random state as one flat mapping.

    The tensors are not copies, so that loading into them changes model and optimizer.
    """
    state: dict[str, Any] = {}
    for name, parameter in model.own_parameters():
        state[f"model.{name}"] = parameter.detach()
        optimizer_state = {} if optimizer is None else optimizer.state.get(parameter, {})
        state.update(
            {f"optimizer.{key}.{name}": torch.as_tensor(v) for key, v in optimizer_state.items() if v is not None}
        )
    if optimizer is not None and not any(key.startswith("optimizer.") for key in state):
        state[NOTHING] = torch.zeros(())
    for pair in model.adapters().values():
        state[SCALING] = torch.tensor(pair.scaling)
    state.update({f"counter.{name}": torch.tensor(value) for name, value in counters.items()})
    state[f"random.{parallel.rank}.cpu"] = torch.get_rng_state()
    if parallel.device.startswith("cuda"):
        state[f"random.{parallel.rank}.cuda"] = torch.cuda.get_rng_state(parallel.device)
    return state


def _restore_numbers(model: PackedModel, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Restore optimizer state that consists of plain numbers instead of tensors."""
    for name, parameter in model.own_parameters():
        optimizer_state = optimizer.state.get(parameter, {})
        for key, value in optimizer_state.items():
            if isinstance(value, (int, float)):
                optimizer_state[key] = type(value)(state[f"optimizer.{key}.{name}"].item())
