"""States from which training continues exactly, also with another number of ranks."""

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
"""Training batches applied, optimizer steps done, consecutive steps skipped."""
FIRST_RANDOM = "random.0.cpu"
"""Entry of rank 0's random state, which every state has."""
SCALING = "adapter.scaling"
"""Entry of a model with adapters: alpha / rank."""
NOTHING = "optimizer.nothing"
"""Entry of a state whose optimizer keeps nothing of its parameters, as before its first step."""


def save_state(state: dict[str, Any], path: str, parallel: ParallelContext) -> None:
    """Write what `state_of` found (collective); every rank writes its shards."""
    with new_directory(path, parallel) as scratch:
        write_shards(shards_of(state, parallel), scratch, parallel.rank)


def load_state(
    model: PackedModel, optimizer: torch.optim.Optimizer | None, path: str, parallel: ParallelContext
) -> dict[str, int]:
    """Read what `save_state` wrote, with any number of ranks, in place (collective).

    Returns:
        the counters.

    Raises:
        ModelError: the directory is no saved state, or not of this model.
    """
    shards = ShardReader(Path(path))
    stored = shards.names
    if optimizer is not None and NOTHING in stored:
        optimizer.state.clear()
    elif optimizer is not None and not optimizer.state:
        make_state(optimizer)
    state = state_of(model, optimizer, dict.fromkeys(COUNTERS, 0), parallel)
    # of another number of ranks, or another kind of device; the scaling was not always kept
    optional = ("random.", SCALING)
    state = {key: value for key, value in state.items() if key in stored or not key.startswith(optional)}
    scaling = float(state.get(SCALING, 0.0))
    state[FIRST_RANDOM] = torch.empty_like(torch.get_rng_state())
    others = (key for key in stored if optimizer is not None and key.startswith("optimizer."))
    missing = sorted((state.keys() - stored) | (set(others) - state.keys()))
    if missing:
        raise ModelError(
            f"{path}: expected the state of this model and optimizer, but {len(missing)} entries are missing there or "
            f"here, {missing[:3]} first. Was it saved by an engine with another model or optimizer, or without one?"
        )
    try:
        shards.fill(state)
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelError(f"{path}: the saved state cannot be loaded into this model: {error}") from error
    if SCALING in state and scaling != float(state[SCALING]):
        raise ModelError(
            f"{path}: expected adapters scaled by alpha / rank = {float(state[SCALING]):g}, as they were trained, "
            f"found {scaling:g}. Set lora.alpha back."
        )
    if optimizer is not None:
        _put_numbers(model, optimizer, state)
    cpu, cuda = (state.get(f"random.{parallel.rank}.{kind}") for kind in ("cpu", "cuda"))
    if cpu is None:  # the saved run had no such rank: a stream that nobody has drawn from
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
    """Weights, optimizer, counters and this rank's random state, as one flat mapping.

    Its tensors are the live ones, so that loading fills them.
    """
    state: dict[str, Any] = {}
    for name, parameter in model.own_parameters():
        state[f"model.{name}"] = parameter.detach()
        kept = {} if optimizer is None else optimizer.state.get(parameter, {})
        state.update({f"optimizer.{key}.{name}": torch.as_tensor(v) for key, v in kept.items() if v is not None})
    if optimizer is not None and not any(key.startswith("optimizer.") for key in state):
        state[NOTHING] = torch.zeros(())
    for pair in model.adapters().values():
        state[SCALING] = torch.tensor(pair.scaling)
    state.update({f"counter.{name}": torch.tensor(value) for name, value in counters.items()})
    state[f"random.{parallel.rank}.cpu"] = torch.get_rng_state()
    if parallel.device.startswith("cuda"):
        state[f"random.{parallel.rank}.cuda"] = torch.cuda.get_rng_state(parallel.device)
    return state


def _put_numbers(model: PackedModel, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Give an optimizer back what it keeps as plain numbers."""
    for name, parameter in model.own_parameters():
        kept = optimizer.state.get(parameter, {})
        for key, value in kept.items():
            if isinstance(value, (int, float)):
                kept[key] = type(value)(state[f"optimizer.{key}.{name}"].item())
