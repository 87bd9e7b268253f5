"""States from which training continues exactly: megatron-core's distributed checkpoints."""

from __future__ import annotations

import os
import queue
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.errors import ModelError

METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
"""Optimizer state is saved in the shapes of the parameters, so that another layout reads it."""
FILL = "_set_main_param_and_optimizer_states"
"""How the distributed optimizer fills what it keeps of a parameter."""


def copy_state(
    parts: list[Any], stepper: Any, counters: dict[str, int], path: str, parallel: ParallelContext
) -> Callable[[Path], list[Path]]:
    """Copy weights, optimizer state, counters and random states to memory, as the bytes of this rank's files
    (collective).

    Args:
        path: where they will be saved, for messages.

    Returns:
        a function that writes the files into a directory and returns their paths.

    Raises:
        EngineError: the shards do not make up whole tensors, or a rank cannot copy its own; on every rank.
    """
    held = dict[str, Any]()
    with _writing(stepper), ExitStack() as stack:
        with parallel.agree_on_errors(f"preparing a copy of the state for {path}"):
            scratch = stack.enter_context(TemporaryDirectory())
        with parallel.agree_on_errors(f"checking the state for {path}"):
            state = _state(parts, stepper, counters, loading=False)
            # checks the shards of all ranks, and raises on rank 0 alone
            dist_checkpointing.state_dict_utils.save_preprocess(state)
        request: Any = dist_checkpointing.save(
            state, scratch, validate_access_integrity=False, async_sharded_save=True, async_strategy="mcore"
        )
        with parallel.agree_on_errors(f"copying the state for {path}"):
            if request.async_fn is not None:
                rank, _, results = request.async_fn_args
                buckets = []
                for _, name, content in request.preload_fn():
                    held[name] = memory = open(os.memfd_create(name), "r+b")  # noqa: SIM115 - kept for the writer
                    buckets.append((f"/proc/self/fd/{memory.fileno()}", name, content))
                request.async_fn(rank, buckets, results)
                if isinstance(results.queue[0], Exception):
                    raise results.queue[0]
        for finish in request.finalize_fns:  # rank 0 writes the index of the files
            finish()
        for file in Path(scratch).iterdir():
            held[file.name] = BytesIO(file.read_bytes())

    def write(directory: Path) -> list[Path]:
        directory.mkdir(parents=True, exist_ok=True)
        for name, memory in held.items():
            memory.seek(0)
            with (directory / name).open("wb") as target, memory:
                shutil.copyfileobj(memory, target, 2**20)
        return [directory / name for name in held]

    return write


def load_state(parts: list[Any], stepper: Any, path: str, parallel: ParallelContext) -> dict[str, int]:
    """Read what the function of `copy_state` wrote, in place (collective).

    Returns:
        the counters.

    Raises:
        ModelError, EngineError: the directory is no such state, or not of this model.
    """
    with parallel.agree_on_errors(f"loading {path}"):
        if not dist_checkpointing.check_is_distributed_checkpoint(path):
            raise ModelError(
                f"{path}: expected a saved state of the megatron engine, found none. Give a directory that was saved "
                "with kind 'state', or load it with kind 'hf'."
            )
        with _resident(stepper):
            wanted = _state(parts, stepper, {}, loading=True)
            # no exchange: the other ranks would wait in it for a rank that cannot read its files
            state = dist_checkpointing.load(wanted, path, validate_access_integrity=False)
            for index, part in enumerate(parts):
                part.load_state_dict(state[f"model{index}"], strict=False)
            if stepper is not None:
                _load_optimizer(stepper.inner, state["optimizer"])
    torch.set_rng_state(state["random"])
    return dict(state["counters"])


@contextmanager
def _writing(stepper: Any) -> Iterator[None]:
    """megatron-core (0.19) starts a process for the names of what was written, for it might be another one that writes;
    here this one does."""
    one_process = patch.object(filesystem_async, "get_write_results_queue", queue.Queue)
    with _resident(stepper), one_process:
        yield


def _resident(stepper: Any) -> AbstractContextManager[None]:
    return nullcontext() if stepper is None else stepper.resident()  # type: ignore[no-any-return]


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
    metadata = dict(METADATA)  # megatron-core adds the process group of this layout
    state: dict[str, Any] = {f"model{i}": part.sharded_state_dict(metadata=metadata) for i, part in enumerate(parts)}
    if stepper is not None:
        model = state if len(parts) > 1 else state["model0"]
        state["optimizer"] = stepper.inner.sharded_state_dict(model, is_loading=loading, metadata=metadata)
    state["counters"], state["random"] = counters, torch.get_rng_state()
    return state
