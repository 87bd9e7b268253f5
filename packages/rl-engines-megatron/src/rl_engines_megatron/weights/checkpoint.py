"""Saved training states, as megatron-core's distributed checkpoints."""

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
"""Metadata of saved states. Optimizer state is saved in the shapes of the parameters, so that other layouts can load
it."""
FILL = "_set_main_param_and_optimizer_states"
"""Name of the distributed optimizer's method that loads the state of a parameter."""


def copy_state(
    parts: list[Any], stepper: Any, counters: dict[str, int], path: str, parallel: ParallelContext
) -> Callable[[Path], list[Path]]:
    """Copy the training state of this rank to memory, as the bytes of its files (collective).

    The state consists of weights, optimizer state, counters and random states.

    Args:
        parts: model chunks of this rank.
        stepper: the optimizer, or None.
        counters: counters of the engine.
        path: directory in which the state will be saved, for messages.
        parallel: ranks of the run.

    Returns:
        A function that writes the files into a directory and returns their paths.

    Raises:
        EngineError: on every rank, if the shards do not form whole tensors or a rank cannot copy its shards.
    """
    files = dict[str, Any]()
    with _without_writer_process(stepper), ExitStack() as stack:
        with parallel.agree_on_errors(f"preparing a copy of the state for {path}"):
            scratch = stack.enter_context(TemporaryDirectory())
        with parallel.agree_on_errors(f"checking the state for {path}"):
            state = _state(parts, stepper, counters, loading=False)
            # checks the shards of all ranks, but raises only on rank 0
            dist_checkpointing.state_dict_utils.save_preprocess(state)
        request: Any = dist_checkpointing.save(
            state, scratch, validate_access_integrity=False, async_sharded_save=True, async_strategy="mcore"
        )
        with parallel.agree_on_errors(f"copying the state for {path}"):
            if request.async_fn is not None:
                rank, _, results = request.async_fn_args
                buckets = []
                for _, name, content in request.preload_fn():
                    files[name] = memory = open(os.memfd_create(name), "r+b")  # noqa: SIM115 - closed by `write`
                    buckets.append((f"/proc/self/fd/{memory.fileno()}", name, content))
                request.async_fn(rank, buckets, results)
                if isinstance(results.queue[0], Exception):
                    raise results.queue[0]
        for finish in request.finalize_fns:  # rank 0 writes the index of the files
            finish()
        for file in Path(scratch).iterdir():
            files[file.name] = BytesIO(file.read_bytes())

    def write(directory: Path) -> list[Path]:
        directory.mkdir(parents=True, exist_ok=True)
        for name, memory in files.items():
            memory.seek(0)
            with (directory / name).open("wb") as target, memory:
                shutil.copyfileobj(memory, target, 2**20)
        return [directory / name for name in files]

    return write


def load_state(parts: list[Any], stepper: Any, path: str, parallel: ParallelContext) -> dict[str, int]:
    """Load a state that `copy_state` saved, in place (collective).

    Returns:
        The counters.

    Raises:
        ModelError, EngineError: the directory has no state of this engine, or the state of another model.
    """
    with parallel.agree_on_errors(f"loading {path}"):
        if not dist_checkpointing.check_is_distributed_checkpoint(path):
            raise ModelError(
                f"{path}: expected a saved state of the megatron engine, found none. Use a directory that was saved "
                "with kind 'state', or load it with kind 'hf'."
            )
        with _resident(stepper):
            state_to_load = _state(parts, stepper, {}, loading=True)
            # no check over all ranks: the other ranks would wait in it for a rank that cannot read its files
            state = dist_checkpointing.load(state_to_load, path, validate_access_integrity=False)
            for index, part in enumerate(parts):
                part.load_state_dict(state[f"model{index}"], strict=False)
            if stepper is not None:
                _load_optimizer(stepper.inner, state["optimizer"])
    torch.set_rng_state(state["random"])
    return dict(state["counters"])


@contextmanager
def _without_writer_process(stepper: Any) -> Iterator[None]:
    """Prevent megatron-core from starting a process while it writes, and move the moments to the device.

    megatron-core (0.19) starts a process to exchange the names of written files, in case another process writes them.
    Here this process writes.
    """
    one_process = patch.object(filesystem_async, "get_write_results_queue", queue.Queue)
    with _resident(stepper), one_process:
        yield


def _resident(stepper: Any) -> AbstractContextManager[None]:
    return nullcontext() if stepper is None else stepper.resident()  # type: ignore[no-any-return]


def _load_optimizer(optimizer: Any, state: Any) -> None:
    """Load optimizer state, working around two faults of megatron-core (0.19) with torch's AdamW.

    Its distributed optimizer expects a `step` next to the moments, although it does not save one there. It also makes
    all parameters share one `step` tensor, which each parameter would then increment.
    """
    inner_optimizers = optimizer.chained_optimizers
    with ExitStack() as stack:
        for inner in inner_optimizers:
            load = getattr(inner, FILL, None)
            if load is not None:
                without_step = partial(_load_without_step, load)
                stack.enter_context(patch.object(inner, FILL, without_step))
        optimizer.load_state_dict(state)
    for values in (values for inner in inner_optimizers for values in inner.optimizer.state.values()):
        if isinstance(values.get("step"), torch.Tensor):
            values["step"] = values["step"].clone()


def _load_without_step(load: Any, parameter: torch.Tensor, tensors: dict[str, Any]) -> None:
    load(parameter, {"step": None} | tensors)


def _state(parts: list[Any], stepper: Any, counters: dict[str, int], loading: bool) -> dict[str, Any]:
    metadata = dict(METADATA)  # megatron-core adds the process group of this layout
    state: dict[str, Any] = {f"model{i}": part.sharded_state_dict(metadata=metadata) for i, part in enumerate(parts)}
    if stepper is not None:
        model = state if len(parts) > 1 else state["model0"]
        state["optimizer"] = stepper.inner.sharded_state_dict(model, is_loading=loading, metadata=metadata)
    state["counters"], state["random"] = counters, torch.get_rng_state()
    return state
