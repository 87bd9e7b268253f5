"""States from which training continues exactly, also with another number of ranks."""

from __future__ import annotations

import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from rl_contracts.errors import EngineError, ModelError
from rl_contracts.parallel import ParallelContext
from rl_engines_fsdp.checkpoint.new_directory import new_directory
from rl_engines_fsdp.model.packed import PackedModel
from rl_engines_fsdp.optimizer import make_state

# one process needs no process group, and torch need not tell us so, on whichever thread
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

COUNTERS = ("version", "steps", "skipped")
"""Training batches applied, optimizer steps done, consecutive steps skipped."""
FIRST_RANDOM = "random.0.cpu"
"""Entry of rank 0's random state, which every state has."""
NOTHING = "optimizer.nothing"
"""Entry of a state whose optimizer keeps nothing of its parameters, as before its first step."""


def save_state(state: dict[str, Any], path: str, parallel: ParallelContext) -> None:
    """Write what `state_of` found (collective); every rank writes its shards."""
    with new_directory(path, parallel) as scratch:
        save(state, checkpoint_id=scratch, process_group=parallel.host_group, no_dist=parallel.host_group is None)


def load_state(
    model: PackedModel, optimizer: torch.optim.Optimizer | None, path: str, parallel: ParallelContext
) -> dict[str, int]:
    """Read what `save_state` wrote, with any number of ranks, in place (collective).

    Returns:
        the counters.

    Raises:
        ModelError: the directory is no saved state, or not of this model.
    """
    directory = Path(path)
    if not (directory / ".metadata").is_file():
        found = sorted(entry.name for entry in directory.iterdir())[:6] if directory.is_dir() else "nothing"
        raise ModelError(
            f"{path}: expected a saved state (a directory with .metadata and *.distcp files), found {found}. "
            "Give a directory that was saved with kind 'state', or load it with kind 'hf'."
        )
    reader = FileSystemReader(directory)
    stored = reader.read_metadata().state_dict_metadata
    if optimizer is not None and NOTHING in stored:
        optimizer.state.clear()
    elif optimizer is not None and not optimizer.state:
        make_state(optimizer)
    state = state_of(model, optimizer, dict.fromkeys(COUNTERS, 0), parallel)
    # of another number of ranks, or another kind of device
    state = {key: value for key, value in state.items() if key in stored or not key.startswith("random.")}
    state[FIRST_RANDOM] = torch.empty_like(torch.get_rng_state())
    others = (key for key in stored if optimizer is not None and key.startswith("optimizer."))
    missing = sorted((state.keys() - stored.keys()) | (set(others) - state.keys()))
    if missing:
        raise ModelError(
            f"{path}: expected the state of this model and optimizer, but {len(missing)} entries are missing there or "
            f"here, {missing[:3]} first. Was it saved by an engine with another model or optimizer, or without one?"
        )
    try:
        load(state, storage_reader=reader, process_group=parallel.host_group, no_dist=parallel.host_group is None)
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelError(f"{path}: the saved state cannot be loaded into this model: {error}") from error
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
    state.update({f"counter.{name}": torch.tensor(value) for name, value in counters.items()})
    state[f"random.{parallel.rank}.cpu"] = torch.get_rng_state()
    if parallel.device.startswith("cuda"):
        state[f"random.{parallel.rank}.cuda"] = torch.cuda.get_rng_state(parallel.device)
    return state


class AsyncWriter:
    """Writes one state at a time from copies, in a thread, over a process group of its own.

    The directory appears when every rank has written its part, whether anybody waits or not.

    Args:
        parallel: the engine's ranks. Making a writer is collective.
    """

    def __init__(self, parallel: ParallelContext) -> None:
        self._group: Any = None
        if parallel.host_group is not None:
            self._group = dist.new_group(backend="gloo")
        self._parallel = replace(parallel, host_group=self._group, dp_host_group=self._group)
        self._thread = ThreadPoolExecutor(1, "state-writer")
        self._pending: Future[None] | None = None

    def begin(self, state: dict[str, Any], path: str) -> None:
        """Copy a state and return; what is written is what it holds now (collective). Waits for the one before.

        Raises:
            ModelError, EngineError: the directory cannot be made, or the state before could not be written.
        """
        self.wait()
        directory = ExitStack()  # which the thread leaves: the ranks agree there that all have written
        scratch = directory.enter_context(new_directory(path, self._parallel))
        written: Any = async_save(state, checkpoint_id=scratch, process_group=self._group, no_dist=self._group is None)
        self._pending = self._thread.submit(_finish, written, directory, path)

    def wait(self) -> None:
        """Return when the state that was begun lies complete.

        Raises:
            EngineError: it could not be written, on any rank.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait, and give the process group back."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            if self._group is not None:
                dist.destroy_process_group(self._group)
                self._group = None


def _finish(written: Future[Any], directory: ExitStack, path: str) -> None:
    try:
        with directory:
            written.result()
    except Exception as error:
        raise EngineError(f"{path}: the state could not be written: {error}") from error


def _put_numbers(model: PackedModel, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Give an optimizer back what it keeps as plain numbers."""
    for name, parameter in model.own_parameters():
        kept = optimizer.state.get(parameter, {})
        for key, value in kept.items():
            if isinstance(value, (int, float)):
                kept[key] = type(value)(state[f"optimizer.{key}.{name}"].item())
