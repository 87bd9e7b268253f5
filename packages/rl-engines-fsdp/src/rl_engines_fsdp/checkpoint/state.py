"""States from which training continues exactly, also with another number of ranks."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from rl_contracts.errors import EngineError, ModelError
from rl_contracts.parallel import ParallelContext
from rl_engines_fsdp.checkpoint.new_directory import NewDirectory
from rl_engines_fsdp.model.packed import PackedModel

COUNTERS = ("version", "steps", "skipped")
"""Training batches applied, optimizer steps done, consecutive steps skipped."""
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps of each parameter."""


def save_state(state: dict[str, Any], path: str, parallel: ParallelContext) -> None:
    """Write what `state_of` found (collective); every rank writes its shards."""
    target = NewDirectory(path, parallel)
    target.prepare()
    error: Exception | None = None
    try:
        with _alone_without_warning():
            save(
                state,
                checkpoint_id=target.scratch,
                process_group=parallel.host_group,
                no_dist=parallel.host_group is None,
            )
    except (OSError, RuntimeError, ValueError) as failure:
        error = failure
    target.commit(error)


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
    state = state_of(model, optimizer, dict.fromkeys(COUNTERS, 0), parallel)
    random = [key for key in state if key.startswith("random.")]
    for key in random:
        if key not in stored:  # another number of ranks, or another kind of device: this rank keeps its own
            del state[key]
    missing = sorted(set(state) - set(stored))
    if missing:
        raise ModelError(
            f"{path}: expected the state of this model and optimizer, but {len(missing)} entries are missing, "
            f"{missing[:3]} first. Was it saved by an engine with another model, or without an optimizer?"
        )
    try:
        with _alone_without_warning():
            load(
                state,
                storage_reader=reader,
                process_group=parallel.host_group,
                no_dist=parallel.host_group is None,
            )
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelError(f"{path}: the saved state cannot be loaded into this model: {error}") from error
    _restore_random(state, parallel)
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
        if optimizer is not None and parameter.requires_grad:
            moments = _moments(optimizer, parameter)
            state.update({f"optimizer.{moment}.{name}": moments[moment] for moment in MOMENTS})
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
        else:  # one process needs no process group, and torch, in its thread, need not tell us so
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        self._parallel = replace(parallel, host_group=self._group, dp_host_group=self._group)
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._path = ""

    def begin(self, state: dict[str, Any], path: str) -> None:
        """Copy a state and return; what is written is what it holds now (collective). Waits for the one before.

        Raises:
            ModelError, EngineError: the directory cannot be made, or the state before could not be written.
        """
        self.wait()
        target = NewDirectory(path, self._parallel)
        target.prepare()
        written: Any = async_save(
            state, checkpoint_id=target.scratch, process_group=self._group, no_dist=self._group is None
        )
        self._path = path
        self._thread = threading.Thread(target=self._finish, args=(written, target), name="state-writer")
        self._thread.start()

    def _finish(self, written: Future[Any], target: NewDirectory) -> None:
        error: Exception | None = None
        try:
            written.result()
        except Exception as failure:  # noqa: BLE001 - handed to every rank by commit, and to wait
            error = failure
        try:
            target.commit(error)
        except Exception as failure:  # noqa: BLE001 - raised by wait
            self._error = failure

    @property
    def busy(self) -> bool:
        """Whether a state is being written."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Return when the state that was begun lies complete.

        Raises:
            EngineError: it could not be written, on any rank.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise EngineError(f"{self._path}: the state could not be written: {error}") from error

    def close(self) -> None:
        """Wait, and give the process group back."""
        try:
            self.wait()
        finally:
            if self._group is not None:
                dist.destroy_process_group(self._group)
                self._group = None


def _moments(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> dict[str, Tensor]:
    moments: dict[str, Tensor] = optimizer.state[parameter]
    if not moments:  # before the first step
        moments["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        moments["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
        moments["exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)
    return moments


@contextmanager
def _alone_without_warning() -> Iterator[None]:
    """One process needs no process group, and torch need not tell us so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _restore_random(state: dict[str, Any], parallel: ParallelContext) -> None:
    cpu, cuda = (state.get(f"random.{parallel.rank}.{kind}") for kind in ("cpu", "cuda"))
    if cpu is not None:
        torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda, parallel.device)
