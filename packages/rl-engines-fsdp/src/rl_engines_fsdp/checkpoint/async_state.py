"""States that are written while training goes on."""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save

from rl_contracts.errors import EngineError
from rl_contracts.parallel import ParallelContext
from rl_engines_fsdp.checkpoint.new_directory import NewDirectory


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
