"""Write directories in the background; each appears under its name only when it is complete.

Each training thread has one writer thread, which runs its jobs in order: once a directory is complete, all earlier jobs
are done. The writer thread takes part in no collective. Each rank leaves a marker file when its files are on disk.
Rank 0 renames the directory when all markers exist. The training threads exchange errors at their next collective.
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

WRITE_SECONDS = 240.0
"""Seconds that rank 0 waits for the files of other ranks, and half the time that training waits for a directory. A
longer wait for a disk that does not respond would idle the GPUs."""
MARKER_PREFIX = ".written-"
"""Prefix of the marker files by which ranks report completion. A writer that lists the directory may see the markers of
other ranks."""
POLL_SECONDS = 0.02
"""Seconds between two polls for the markers of other ranks."""
SYNC_SECONDS = 1.0
"""Seconds between status exchanges of waiting ranks, so that the timeout of the process group does not expire."""


class BackgroundDirectory:
    """Directory whose files each rank writes in the background. All ranks create it at the same time (collective).

    Args:
        path: final path. The directory appears here when it is complete, and replaces an existing one.
        parallel: the ranks.
        copy: called with the scratch directory, a sibling of `path`. Copies the state to write and returns the
            functions that write the copies (collective).
        manifest: further entries of the manifest; None: write no manifest.
        completed: called on rank 0, in the writer thread, when the directory is complete.

    Raises:
        EngineError: the directory could not be created or the state not be copied, on any rank.
    """

    def __init__(
        self,
        path: Path,
        parallel: ParallelContext,
        copy: Callable[[Path], Sequence[Snapshot]],
        manifest: dict[str, Any] | None = None,
        completed: Callable[[], None] = lambda: None,
    ) -> None:
        self.path, self._scratch = path, path.with_name(f".{path.name}.partial")
        self._parallel, self._manifest, self._completed = parallel, manifest, completed
        self.error, self._failure, self._start = "", "", time.monotonic()
        self.write_seconds = 0.0
        """Seconds from the copy to the rename, on rank 0."""
        with parallel.agree_on_errors(f"preparing {path}"):
            if parallel.is_main:
                shutil.rmtree(self._scratch, ignore_errors=True)
                self._scratch.mkdir(parents=True)
        try:
            with parallel.agree_on_errors(f"copying the content of {path}"):
                writers = copy(self._scratch)
        except Exception as error:
            shutil.rmtree(self._scratch, ignore_errors=True)
            raise EngineError(f"{path}: {type(error).__name__}: {error}") from error
        self._written, self._finished, self._abandoned = Event(), Event(), Event()
        write_in_background(lambda: self._write(writers))

    def status(self) -> list[Any]:
        """Return this rank's status: whether its files are written, whether its job has finished, and its error."""
        return [self._written.is_set(), self._finished.is_set(), self._failure]

    def merge(self, statuses: Sequence[list[Any]]) -> bool:
        """Merge the statuses of all ranks, and return whether the directory is complete or abandoned.

        `error` is then the reason why it was abandoned, or empty.
        """
        failures = [f"rank {rank}: {failure}" for rank, (_, _, failure) in enumerate(statuses) if failure]
        if failures and all(written for written, _, _ in statuses):
            self._abandoned.set()  # rank 0 stops waiting; no rank writes into the directory that it removes
        finished = all(written for written, _, _ in statuses) and bool(statuses[0][1])
        self.error = "; ".join(failures) if finished else ""
        return finished

    def wait(self) -> bool:
        """Wait until the directory is complete or abandoned (collective).

        Returns:
            False if the directory is neither complete nor abandoned after twice `WRITE_SECONDS`.
        """
        deadline = time.monotonic() + 2 * WRITE_SECONDS
        while True:
            remaining = deadline - time.monotonic()
            (self._finished if self._written.is_set() else self._written).wait(max(min(SYNC_SECONDS, remaining), 0))
            replies = self._parallel.gather_json([remaining <= 0, self.status()])
            if self.merge([status for _, status in replies]):
                return True
            if replies[0][0]:  # the clock of rank 0 decides
                return False

    def _write(self, writers: Sequence[Snapshot]) -> None:
        try:
            if not self._scratch.exists():  # this rank is late, and rank 0 has removed the directory
                raise EngineError("rank 0 abandoned the write.")
            files = [file for write in writers for file in write() if not file.name.startswith(MARKER_PREFIX)]
            fsync_all(files)
            check_lengths(files)
            entries = {str(file.relative_to(self._scratch)): _size_and_crc(file) for file in files}
            _write_json(self._marker(self._parallel.rank), entries)
        except Exception as error:  # noqa: BLE001 - `status` reports it to all ranks; their training threads decide
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
        self._finished.set()

    def _complete(self) -> None:
        """Merge the markers of all ranks into the manifest, and rename the directory (rank 0 only)."""
        deadline = time.monotonic() + WRITE_SECONDS
        markers = [self._marker(rank) for rank in range(self._parallel.world_size)]
        while missing := [marker.name for marker in markers if not marker.exists()]:
            if self._abandoned.wait(POLL_SECONDS):
                raise EngineError("the write was abandoned, because a rank failed to write its files.")
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{self.path}: other ranks did not write {missing} within {WRITE_SECONDS:g} s; check their disk, "
                    "or use a faster one."
                )
        files = {name: entry for marker in markers for name, entry in json.loads(marker.read_text()).items()}
        for marker in markers:
            marker.unlink()
        if self._manifest is not None:
            _write_json(self._scratch / MANIFEST, self._manifest | {"files": files})
        follow_umask(self._scratch)
        fsync_all([*(path for path in self._scratch.rglob("*") if path.is_dir()), self._scratch])
        remove(self.path)
        os.replace(self._scratch, self.path)
        fsync_all([self.path.parent, self.path.parent.parent])
        self.write_seconds = time.monotonic() - self._start
        self._completed()

    def _marker(self, rank: int) -> Path:
        return self._scratch / f"{MARKER_PREFIX}{rank}"


def write_in_background(job: Callable[[], None]) -> None:
    """Queue a job for the writer thread, after all earlier ones; an error that `job` raises is logged."""
    _jobs(get_ident()).put(job)


def wait_for_writes(seconds: float) -> None:
    """Wait until the writer thread has finished all queued jobs, for at most `seconds`."""
    done = Event()
    write_in_background(done.set)
    done.wait(seconds)


@cache
def _jobs(owner: int) -> SimpleQueue[Callable[[], None]]:
    """Return the job queue of a training thread, and start its writer thread at the first call."""
    jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def work() -> None:
        while True:
            try:
                jobs.get()()
            except Exception:  # later jobs still run
                log.exception("a background write or cleanup failed")

    Thread(target=work, name="writer", daemon=True).start()
    return jobs


def remove(directory: Path) -> None:
    """Remove a directory, so that it never exists in part under its name."""
    scratch = directory.with_name(f".{directory.name}.removed.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    with suppress(OSError):  # the complete directory then stays, which is harmless
        directory.rename(scratch)
    shutil.rmtree(scratch, ignore_errors=True)


def fsync_all(paths: Iterable[Path]) -> None:
    """Flush files and directory entries to disk, so that they survive a loss of power."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_lengths(files: Iterable[Path]) -> None:
    """Compare the sizes of safetensors files with their headers.

    On a network file system, a writer may not receive the error of a full disk.

    Raises:
        EngineError: a file is shorter or longer than its header says.
    """
    for file in files:
        if file.suffix != ".safetensors":
            continue
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        expected, size = 8 + length + max(ends, default=0), file.stat().st_size
        if size != expected:
            raise EngineError(f"{file}: expected {expected} bytes, found {size}")


def _write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    scratch = path.with_name(f"{path.name}.partial")
    scratch.write_text(json.dumps(value), encoding="utf-8")
    fsync_all([scratch])
    os.replace(scratch, path)
