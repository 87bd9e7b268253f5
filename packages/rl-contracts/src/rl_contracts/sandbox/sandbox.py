"""Untrusted Python code, in a process that can only compute.

It has no network, starts no processes, reads no files but the interpreter's libraries, and writes files in a directory
of its own that is gone afterwards. Processor and wall time, memory, files and output are bounded. The kernel enforces
that, by Landlock, seccomp and limits of resources, for root as well. Where it cannot, there is no sandbox.

Two things are not guarded. `stat`, `access`, `readlink` and `getxattr` reveal whether any path exists, its size, owner,
times and extended attributes, and where a link points. Memory is the only bound on threads: 512 MiB hold some 32,000
with small stacks.
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
_LATE = "it did not end within"
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache", "/dev/urandom")


@dataclass(frozen=True)
class SandboxLimits:
    """What code may use; sizes in bytes."""

    seconds: float = 10.0
    """Until it is ended, whatever it does."""
    cpu_seconds: int = 10
    """Of the processor, all its threads together."""
    memory: int = 512 << 20
    """Address space, the interpreter's included (about 20 MB)."""
    file: int = 16 << 20
    """Of each file, and of stdout and stderr each."""
    files: int = 64 << 20
    """Of all its files together, deleted ones that it still uses included. Each name of a file takes 4 KiB.

    Exact where the user may create namespaces: the files are then in a file system of this size, in memory. Elsewhere,
    as in most containers, the sandbox polls every 50 ms. A program then exceeds the limit by what it writes between two
    polls (about 100 MiB measured).
    """
    output: int = 1 << 16
    """Of stdout and of stderr that are kept: the beginning of the one, the end of the other."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            require(value > 0, f"sandbox.{name}", "more than 0", value)


@dataclass(frozen=True)
class SandboxRun:
    """How code ended."""

    output: str
    """What it wrote to stdout."""
    errors: str
    """What it wrote to stderr; the trace of what it raised."""
    code: int
    """0: it came to its end. Below 0: the signal that ended it."""
    stopped: str = ""
    """Which limit ended it; empty where it ended by itself."""
    timed_out: bool = False
    """Whether that limit was one of wall or processor time."""


class Sandbox:
    """Runs code, each time in a new process; from as many threads as wanted.

    Args:
        limits: for each run.
        packages: directories from which code may import, beside the standard library; it can read all in them.

    Raises:
        ConfigError: this kernel cannot confine a process; says what was looked for.
    """

    def __init__(self, limits: SandboxLimits | None = None, packages: Sequence[str | Path] = ()) -> None:
        self.limits = limits or SandboxLimits()
        if lacking := confine.missing_kernel_features():
            raise ConfigError(
                f"the sandbox cannot confine code here, and runs none: expected {' and '.join(lacking)}. Take a "
                "kernel, or a container runtime, that has them, or tools and rewards that run no code."
            )
        stdlib = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), f"{sys.base_prefix}/lib"}
        self._packages = [str(Path(path).resolve()) for path in packages]
        self._readable = sorted({*stdlib, *_SYSTEM, *self._packages})
        try:
            tried = self.run("")
        except LaunchError as error:
            raise ConfigError(str(error)) from error
        if tried.code != 0:
            raise ConfigError(f"the sandbox ran an empty program, which ended with {tried}. Raise its limits.")

    def run(self, code: str, stdin: str = "", seconds: float = math.inf) -> SandboxRun:
        """Run a program, and wait for its end: `limits.seconds` at most.

        Args:
            code: Python; its `__main__`.
            stdin: what it reads there.
            seconds: wall time of this run, if less than `limits.seconds`.

        Raises:
            LaunchError: its process could not be started or confined; nothing of the code was run.
        """
        with (
            tempfile.TemporaryDirectory(prefix="sandbox-") as directory,
            tempfile.TemporaryFile() as given,
            tempfile.TemporaryFile() as output,
            tempfile.TemporaryFile() as errors,
        ):
            Path(directory, "program.py").write_bytes(code.encode(errors="replace"))
            given.write(stdin.encode(errors="replace"))
            given.seek(0)
            status_read, status_write = os.pipe()
            try:
                process = self._start(directory, status_write, (given, output, errors))
            except OSError as error:
                os.close(status_read)
                raise LaunchError(f"the sandbox could not start its process: {error}") from error
            finally:
                os.close(status_write)
            try:
                stopped = self._watch(process, Path(directory), min(seconds, self.limits.seconds))
                timed_out = stopped.startswith(_LATE)
                confined = os.read(status_read, 1) == b"1"
            finally:
                process.kill()
                process.wait()
                os.close(status_read)
            shown = _tail_of(errors, self.limits.output)
            if not confined and not stopped:
                raise LaunchError(f"the sandbox could not confine its process, and ran nothing in it: {shown}")
            if process.returncode == -signal.SIGXCPU and not stopped:
                stopped, timed_out = f"it used more than {self.limits.cpu_seconds} s of the processor", True
            return SandboxRun(_head_of(output, self.limits.output), shown, process.returncode, stopped, timed_out)

    def _start(
        self, directory: str, status_fd: int, streams: tuple[BinaryIO, BinaryIO, BinaryIO]
    ) -> subprocess.Popen[bytes]:
        settings = asdict(self.limits) | {"readable": self._readable, "packages": self._packages}
        settings |= {"told": status_fd, "owner": os.getpid()}
        one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        return subprocess.Popen(
            [sys.executable, "-ISu", "-X", "utf8", confine.__file__, json.dumps(settings)],
            cwd=directory,
            env=one | {"HOME": directory, "TMPDIR": directory},  # nothing of ours: keys are in the environment
            pass_fds=(status_fd,),
            stdin=streams[0],
            stdout=streams[1],
            stderr=streams[2],
            start_new_session=True,
        )

    def _watch(self, process: subprocess.Popen[bytes], directory: Path, seconds: float) -> str:
        """Wait for its end; which limit it passed."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                process.wait(max(0.0, min(_POLL_SECONDS, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                if time.monotonic() >= deadline:
                    return f"{_LATE} {seconds:g} s"
                if _size(directory, process.pid, self.limits) > self.limits.files:
                    return f"its files had more than {self.limits.files:,} bytes"
                if _is_zombie(process.pid):  # its main thread ended; the other threads end with it
                    return ""
            else:
                return ""


def _size(directory: Path, pid: int, limits: SandboxLimits) -> int:
    """Bytes of the files in a directory without directories below it, and of those that its process has open or mapped.

    Each name and open file takes `ENTRY_BYTES` more. A deleted file that is mapped and not open counts as
    `limits.file`, since its size cannot be read.
    """
    sizes, total = {}, 0
    with contextlib.suppress(FileNotFoundError, PermissionError):  # it has ended
        for place in (str(directory), f"/proc/{pid}/fd"):
            for entry in islice(os.scandir(place), limits.files // confine.ENTRY_BYTES + 1):
                total += confine.ENTRY_BYTES
                with contextlib.suppress(FileNotFoundError):
                    stat = os.stat(entry.path)
                    sizes[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
        lines = Path(f"/proc/{pid}/maps").read_bytes().splitlines()
        mark = os.fsencode(directory.name)
        mapped = {int(line.split()[4]) for line in lines if mark in line and line.endswith(b"(deleted)")}
        total += limits.file * len(mapped - {inode for _, inode in sizes})
    return total + sum(sizes.values())


def _is_zombie(pid: int) -> bool:
    """Whether the main thread of a process that was not waited for has ended."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"


def _head_of(file: BinaryIO, most: int) -> str:
    file.seek(0)
    text = file.read(most).decode(errors="replace")
    left = os.fstat(file.fileno()).st_size - most
    return text if left <= 0 else f"{text}\n[{left:,} bytes more]"


def _tail_of(file: BinaryIO, most: int) -> str:
    left = os.fstat(file.fileno()).st_size - most
    file.seek(max(0, left))
    text = file.read(most).decode(errors="replace")
    return text if left <= 0 else f"[{left:,} bytes before]\n{text}"
