"""Run untrusted Python code in a process that can only compute.

The code has no network and cannot start processes. It can read only the libraries of the interpreter, and write only in
a temporary directory. CPU time, wall time, memory, files and output are limited. The kernel enforces this with
Landlock, seccomp and resource limits, for root too. If the kernel lacks one of them, `Sandbox` raises an error.

There are two gaps. For any path, `stat`, `access`, `readlink` and `getxattr` reveal its existence, size, owner, times,
extended attributes and link target. Only memory limits the number of threads: 512 MiB hold about 32,000 threads with
small stacks.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from rl_contracts.config import require
from rl_contracts.errors import ConfigError, LaunchError
from rl_contracts.sandbox import confine

_POLL_SECONDS = 0.05
_TIMED_OUT = "it did not end within"
_SYSTEM_PATHS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache", "/dev/urandom")


@dataclass(frozen=True)
class SandboxLimits:
    """Resource limits of one sandbox run. Sizes are in bytes."""

    seconds: float = 10.0
    """Wall time in seconds after which the program is killed."""
    cpu_seconds: int = 10
    """CPU time in seconds, summed over all threads."""
    memory: int = 512 << 20
    """Address space, including about 20 MB for the interpreter."""
    file: int = 16 << 20
    """Size of each file, and of stdout and stderr each."""
    files: int = 64 << 20
    """Total size of all files, including deleted files that are still in use. Each file name counts 4 KiB.

    The limit is exact if the user may create namespaces: the files are then in a tmpfs of this size. Otherwise, as in
    most containers, the sandbox polls every 50 ms. A program can then exceed the limit by the bytes it writes between
    two polls (about 100 MiB measured).
    """
    output: int = 1 << 16
    """Bytes kept of each output stream: the beginning of stdout and the end of stderr."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            require(value > 0, f"sandbox.{name}", "more than 0", value)


@dataclass(frozen=True)
class SandboxRun:
    """Outcome of one sandbox run."""

    output: str
    """Text that the program wrote to stdout."""
    errors: str
    """Text that the program wrote to stderr, including the traceback of an uncaught exception."""
    code: int
    """Exit code: 0 on success, or the negated number of the signal that killed the process."""
    stopped: str = ""
    """Description of the limit that ended the run; empty if no limit did."""
    timed_out: bool = False
    """True if a limit on wall time or CPU time ended the run."""


class Sandbox:
    """Runner of untrusted code, with a new process for each run. It is safe to use from several threads.

    Args:
        limits: limits of each run.
        packages: directories from which code may import, in addition to the standard library. The code can read all of
            their files.

    Raises:
        ConfigError: this kernel cannot confine a process, or the limits are too small to run an empty program.
    """

    def __init__(self, limits: SandboxLimits | None = None, packages: Sequence[str | Path] = ()) -> None:
        self.limits = limits or SandboxLimits()
        if missing := confine.missing_kernel_features():
            raise ConfigError(
                f"the sandbox cannot confine code here: expected {' and '.join(missing)}. Use a kernel or container "
                "runtime with these features, or tools and rewards that run no code."
            )
        stdlib = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), f"{sys.base_prefix}/lib"}
        self._packages = [str(Path(path).resolve()) for path in packages]
        self._readable = sorted({*stdlib, *_SYSTEM_PATHS, *self._packages})
        try:
            trial = self.run("")
        except LaunchError as error:
            raise ConfigError(str(error)) from error
        if trial.code != 0:
            reason = trial.stopped or f"it ended with exit code {trial.code}"
            raise ConfigError(
                f"the sandbox failed to run an empty program: {reason}; stderr ends with {trial.errors[-200:]!r}. "
                "Raise the SandboxLimits."
            )

    def run(self, code: str, stdin: str = "", seconds: float = math.inf) -> SandboxRun:
        """Run a program and wait until it ends, for at most `limits.seconds`.

        Args:
            code: Python source, run as `__main__`.
            stdin: text for its standard input.
            seconds: wall time limit of this run, if less than `limits.seconds`.

        Raises:
            LaunchError: the process could not be started or confined. The code did not run.
        """
        with (
            tempfile.TemporaryDirectory(prefix="sandbox-") as directory,
            tempfile.TemporaryFile() as stdin_file,
            tempfile.TemporaryFile() as stdout_file,
            tempfile.TemporaryFile() as stderr_file,
        ):
            Path(directory, "program.py").write_bytes(code.encode(errors="replace"))
            stdin_file.write(stdin.encode(errors="replace"))
            stdin_file.seek(0)
            status_read, status_write = os.pipe()
            try:
                process = self._start(directory, status_write, (stdin_file, stdout_file, stderr_file))
            except OSError as error:
                os.close(status_read)
                raise LaunchError(f"the sandbox could not start its process: {error}") from error
            finally:
                os.close(status_write)
            try:
                stopped = self._watch(process, Path(directory), min(seconds, self.limits.seconds))
                timed_out = stopped.startswith(_TIMED_OUT)
                is_confined = os.read(status_read, 1) == b"1"
            finally:
                process.kill()
                process.wait()
                os.close(status_read)
            stderr = _tail(stderr_file, self.limits.output)
            if not is_confined and not stopped:
                raise LaunchError(f"the sandbox could not confine its process and did not run the code: {stderr}")
            if process.returncode == -signal.SIGXCPU and not stopped:
                stopped, timed_out = f"it used more than {self.limits.cpu_seconds} s of CPU time", True
            return SandboxRun(_head(stdout_file, self.limits.output), stderr, process.returncode, stopped, timed_out)

    def _start(
        self, directory: str, status_fd: int, streams: tuple[BinaryIO, BinaryIO, BinaryIO]
    ) -> subprocess.Popen[bytes]:
        settings = asdict(self.limits) | {"readable": self._readable, "packages": self._packages}
        settings |= {"status_fd": status_fd, "owner": os.getpid()}
        thread_limits = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        return subprocess.Popen(
            [sys.executable, "-ISu", "-X", "utf8", confine.__file__, json.dumps(settings)],
            cwd=directory,
            # without the owner's variables, which may hold secrets
            env=thread_limits | {"HOME": directory, "TMPDIR": directory},
            pass_fds=(status_fd,),
            stdin=streams[0],
            stdout=streams[1],
            stderr=streams[2],
            start_new_session=True,
        )

    def _watch(self, process: subprocess.Popen[bytes], directory: Path, seconds: float) -> str:
        """Wait until the process ends or exceeds a limit; return the description of that limit, or an empty string."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                process.wait(max(0.0, min(_POLL_SECONDS, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                if time.monotonic() >= deadline:
                    return f"{_TIMED_OUT} {seconds:g} s"
                if _file_bytes(directory, process.pid, self.limits) > self.limits.files:
                    return f"its files exceeded {self.limits.files:,} bytes"
                if _is_zombie(process.pid):  # the main thread exited; the kill by the caller ends the other threads
                    return ""
            else:
                return ""


def _file_bytes(directory: Path, pid: int, limits: SandboxLimits) -> int:
    """Return the total bytes of the files in a flat directory and of the files that the process has open or mapped.

    Each file name and open file counts `ENTRY_BYTES` more. A deleted file that is mapped but not open counts as
    `limits.file`, because its size cannot be read.
    """
    sizes, total = {}, 0
    with contextlib.suppress(FileNotFoundError, PermissionError):  # the process has ended
        for path in (str(directory), f"/proc/{pid}/fd"):
            for entry in islice(os.scandir(path), limits.files // confine.ENTRY_BYTES + 1):
                total += confine.ENTRY_BYTES
                with contextlib.suppress(FileNotFoundError):
                    stat = os.stat(entry.path)
                    sizes[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
        lines = Path(f"/proc/{pid}/maps").read_bytes().splitlines()
        name = os.fsencode(directory.name)
        mapped = {int(line.split()[4]) for line in lines if name in line and line.endswith(b"(deleted)")}
        total += limits.file * len(mapped - {inode for _, inode in sizes})
    return total + sum(sizes.values())


def _is_zombie(pid: int) -> bool:
    """Return whether the main thread of a process has ended. The process must not have been reaped yet."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"


def _head(file: BinaryIO, limit: int) -> str:
    file.seek(0)
    text = file.read(limit).decode(errors="replace")
    remaining = os.fstat(file.fileno()).st_size - limit
    return text if remaining <= 0 else f"{text}\n[{remaining:,} more bytes]"


def _tail(file: BinaryIO, limit: int) -> str:
    skipped = os.fstat(file.fileno()).st_size - limit
    file.seek(max(0, skipped))
    text = file.read(limit).decode(errors="replace")
    return text if skipped <= 0 else f"[{skipped:,} earlier bytes]\n{text}"
