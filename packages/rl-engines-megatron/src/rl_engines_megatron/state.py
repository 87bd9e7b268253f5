"""States from which training continues exactly: megatron-core's distributed checkpoints."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import dist_checkpointing

from rl_contracts.errors import ModelError
from rl_contracts.parallel import ParallelContext

METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
"""Optimizer state is saved in the shapes of the parameters, so that another layout reads it."""
FILL = "_set_main_param_and_optimizer_states"
"""How the distributed optimizer fills what it keeps of a parameter."""


def save_state(parts: list[Any], stepper: Any, counters: dict[str, int], directory: Path) -> None:
    """Write weights, optimizer state, counters and random states into a directory that is there (collective)."""
    dist_checkpointing.save(_state(parts, stepper, counters, loading=False), str(directory))


def load_state(parts: list[Any], stepper: Any, path: str, parallel: ParallelContext) -> dict[str, int]:
    """Read what `save_state` wrote, in place (collective).

    Returns:
        the counters.

    Raises:
        ModelError, EngineError: the directory is no such state, or not of this model.
    """
    with parallel.agreeing(f"loading {path}"):
        if not dist_checkpointing.check_is_distributed_checkpoint(path):
            raise ModelError(
                f"{path}: expected a saved state of the megatron engine, found none. Give a directory that was saved "
                "with kind 'state', or load it with kind 'hf'."
            )
        state = dist_checkpointing.load(_state(parts, stepper, {}, loading=True), path)
        for index, part in enumerate(parts):
            part.load_state_dict(state[f"model{index}"], strict=False)
        if stepper is not None:
            _load_optimizer(stepper.inner, state["optimizer"])
    torch.set_rng_state(state["random"])
    return dict(state["counters"])


def _load_optimizer(optimizer: Any, state: Any) -> None:
    """With torch's AdamW, megatron-core's distributed optimizer (0.19) looks for a `step` beside the moments that it
    does not save there, and lets all parameters share one, which each would then count up."""
    inner = optimizer.chained_optimizers
    with ExitStack() as stack:
        for one in inner:
            fill = getattr(one, FILL, None)
            if fill is not None:
                without = partial(_fill_without_step, fill)
                stack.enter_context(patch.object(one, FILL, without))
        optimizer.load_state_dict(state)
    for kept in (kept for one in inner for kept in one.optimizer.state.values()):
        if isinstance(kept.get("step"), torch.Tensor):
            kept["step"] = kept["step"].clone()


def _fill_without_step(fill: Any, parameter: torch.Tensor, tensors: dict[str, Any]) -> None:
    fill(parameter, {"step": None} | tensors)


def _state(parts: list[Any], stepper: Any, counters: dict[str, int], loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {f"model{i}": part.sharded_state_dict(metadata=METADATA) for i, part in enumerate(parts)}
    if stepper is not None:
        model = state if len(parts) > 1 else state["model0"]
        state["optimizer"] = stepper.inner.sharded_state_dict(model, is_loading=loading, metadata=METADATA)
    state["counters"], state["random"] = counters, torch.get_rng_state()
    return state
