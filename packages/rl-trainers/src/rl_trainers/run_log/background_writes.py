"""Directories that are written while training goes on, and appear whole or not at all.

Beside each training thread one thread writes, in the order in which things were handed to it: what is complete, so is
everything before it. It takes part in no collective. Each rank leaves a mark when its files are on the disk, and rank 0
renames when all marks are there; what went wrong on some rank the training threads tell each other when they meet.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread, get_ident
from typing import TYPE_CHECKING, Any

from rl_contracts.errors import EngineError
from rl_contracts.runtime.file_modes import follow_umask
from rl_contracts.runtime.logging import get_logger
from rl_contracts.runtime.run_files import MANIFEST, _size_and_crc

if TYPE_CHECKING:
    from rl_contracts.batch.parallel import ParallelContext
    from rl_contracts.engine import Snapshot

log = get_logger("trainers")

MARKER_PREFIX = ".written-"
"""First letters of the files by which ranks say that they are done. Who lists what it wrote may see another rank's."""
POLL_SECONDS = 0.02
"""Seconds between two looks for the marks of other ranks."""
SYNC_SECONDS = 1.0
"""Seconds between two times at which ranks that wait tell each other how far they are: a group of processes has a
timeout of its own."""


class BackgroundDirectory:
    """A directory of which each rank writes its files in the background. Made by all ranks at the same time
    (collective).

    Args:
        path: it appears here when it is whole. One that is there already is replaced.
        parallel: the ranks.
        copy: given the directory to write into, beside the final one: copies what is to be written, and says what
            writes the copies (collective).
        seconds: that the ranks may take, one after the other, until rank 0 gives it up.
        manifest: further entries of the manifest; None: there is none.
        completed: called on rank 0, in the background, when it is there.

    Raises:
        EngineError: it could not be made, or not be copied, on any rank.
    """

    def __init__(
        self,
        path: Path,
        parallel: ParallelContext,
        copy: Callable[[Path], Sequence[Snapshot]],
        seconds: float,
        manifest: dict[str, Any] | None = None,
        completed: Callable[[], None] = lambda: None,
    ) -> None:
        self.path, self._scratch = path, path.with_name(f".{path.name}.partial")
        self._parallel, self._seconds, self._manifest, self._completed = parallel, seconds, manifest, completed
        self.error, self._failure, self._began = "", "", time.monotonic()
        self.took = 0.0
        """Seconds from the copy to the rename, on rank 0."""
        with parallel.agree_on_errors(f"preparing {path}"):
            if parallel.is_main:
                shutil.rmtree(self._scratch, ignore_errors=True)
                self._scratch.mkdir(parents=True)
        try:
            with parallel.agree_on_errors(f"copying what goes into {path}"):
                writers = copy(self._scratch)
        except Exception as error:
            shutil.rmtree(self._scratch, ignore_errors=True)
            raise EngineError(f"{path}: {type(error).__name__}: {error}") from error
        self._written, self._over, self._abandoned = Event(), Event(), Event()
        write_in_background(lambda: self._write(writers))

    def status(self) -> list[Any]:
        """What the other ranks need to hear: whether this one has written its files, whether it is through, and what
        went wrong."""
        return [self._written.is_set(), self._over.is_set(), self._failure]

    def merge(self, statuses: Sequence[list[Any]]) -> bool:
        """Go by the `events` of all ranks: whether the directory is there or was given up, in which case `error` says
        why."""
        failures = [f"rank {rank}: {failure}" for rank, (_, _, failure) in enumerate(statuses) if failure]
        if failures and all(written for written, _, _ in statuses):
            self._abandoned.set()  # rank 0 waits for nobody any more, and nobody writes into what it removes
        over = all(written for written, _, _ in statuses) and bool(statuses[0][1])
        self.error = "; ".join(failures) if over else ""
        return over

    def wait(self) -> bool:
        """Wait until it is there, or was given up (collective); False if it is neither in twice the time that the ranks
        may take."""
        deadline = time.monotonic() + 2 * self._seconds
        while True:
            left = deadline - time.monotonic()
            (self._over if self._written.is_set() else self._written).wait(max(min(SYNC_SECONDS, left), 0))
            replies = self._parallel.gather_json([left <= 0, self.status()])
            if self.merge([status for _, status in replies]):
                return True
            if replies[0][0]:  # one clock counts
                return False

    def _write(self, writers: Sequence[Snapshot]) -> None:
        try:
            if not self._scratch.exists():  # this rank is late
                raise EngineError("given up")
            files = [file for write in writers for file in write() if not file.name.startswith(MARKER_PREFIX)]
            fsync_all(files)
            check_lengths(files)
            known = {str(file.relative_to(self._scratch)): _size_and_crc(file) for file in files}
            _write_json(self._mark(self._parallel.rank), known)
        except Exception as error:  # noqa: BLE001 - told by `events` to all ranks, whose training threads decide
            self._failure = f"{type(error).__name__}: {error}"
            if self._parallel.world_size == 1:
                self._abandoned.set()
        self._written.set()
        try:
            if self._parallel.is_main:
                self._complete()
        except Exception as error:  # noqa: BLE001 - as above
            self._failure = self._failure or f"{type(error).__name__}: {error}"
            shutil.rmtree(self._scratch, ignore_errors=True)
        self._over.set()

    def _complete(self) -> None:
        """Rank 0's: all ranks' marks become the manifest, and the directory gets its name."""
        deadline = time.monotonic() + self._seconds
        marks = [self._mark(rank) for rank in range(self._parallel.world_size)]
        while missing := [mark.name for mark in marks if not mark.exists()]:
            if self._abandoned.wait(POLL_SECONDS):
                raise EngineError("given up")
            if time.monotonic() > deadline:
                raise EngineError(f"{self.path}: {missing} of other ranks not there after {self._seconds:g} s.")
        files = {name: seen for mark in marks for name, seen in json.loads(mark.read_text()).items()}
        for mark in marks:
            mark.unlink()
        if self._manifest is not None:
            _write_json(self._scratch / MANIFEST, self._manifest | {"files": files})
        follow_umask(self._scratch)
        fsync_all([*(path for path in self._scratch.rglob("*") if path.is_dir()), self._scratch])
        remove(self.path)
        os.replace(self._scratch, self.path)
        fsync_all([self.path.parent, self.path.parent.parent])
        self.took = time.monotonic() - self._began
        self._completed()

    def _mark(self, rank: int) -> Path:
        return self._scratch / f"{MARKER_PREFIX}{rank}"


def write_in_background(job: Callable[[], None]) -> None:
    """Have the writer thread do something, after what it was given before; what `job` raises is logged."""
    _jobs(get_ident()).put(job)


def wait_for_writes(seconds: float) -> None:
    """Wait until the writer thread has done what it was given, or for so long."""
    done = Event()
    write_in_background(done.set)
    done.wait(seconds)


@cache
def _jobs(owner: int) -> SimpleQueue[Callable[[], None]]:
    """What the thread that writes for a training thread has to do."""
    jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def work() -> None:
        while True:
            try:
                jobs.get()()
            except Exception:  # what comes after it is written all the same
                log.exception("something that was to be done beside training failed")

    Thread(target=work, name="writer", daemon=True).start()
    return jobs


def remove(directory: Path) -> None:
    """Remove a directory, which is not there any more at any moment at which it is not whole."""
    scratch = directory.with_name(f".{directory.name}.removed.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    with suppress(OSError):  # it stays then, which harms nobody
        directory.rename(scratch)
    shutil.rmtree(scratch, ignore_errors=True)


def fsync_all(paths: Iterable[Path]) -> None:
    """Return when files, and the entries of directories, would outlive a loss of power."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_lengths(files: Iterable[Path]) -> None:
    """Compare safetensors files with what their headers say: over a network, a writer may not hear of a full disk.

    Raises:
        EngineError: one is shorter, or longer.
    """
    for file in files:
        if file.suffix != ".safetensors":
            continue
        with file.open("rb") as found:
            length = int.from_bytes(found.read(8), "little")
            header = json.loads(found.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        expected, size = 8 + length + max(ends, default=0), file.stat().st_size
        if size != expected:
            raise EngineError(f"{file}: expected {expected} bytes, found {size}")


def _write_json(path: Path, value: Any) -> None:
    """Write a file that is there whole or not at all."""
    scratch = path.with_name(f"{path.name}.partial")
    scratch.write_text(json.dumps(value), encoding="utf-8")
    fsync_all([scratch])
    os.replace(scratch, path)
