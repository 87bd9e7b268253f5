"""Build environments with vLLM and SGLang, for tests and experiments on a machine without a GPU.

    python infra/servers/build.py [vllm] [sglang] [--cache DIRECTORY]

Builds the missing environments of the given servers, or of both. Standard output contains the path of each Python
interpreter, one per line, for `rollout.server.python=`.

Environments are in `~/.cache/rl/servers`, or in `$HF_HOME/rl/servers` if HF_HOME is set. The name of an environment is
the server and the hash of its table in `pins.toml`, so changed pins result in a new environment. An interrupted build
starts again from the beginning. A second build of the same server waits for the first.

Needs Python 3.11 with its standard library, pip's package index, and the Python of the pins, which uv installs if it is
missing. The torch of vLLM is on PyTorch's CPU index; set `PIP_EXTRA_INDEX_URL` to it.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

PINS = Path(__file__).with_name("pins.toml")
DONE = "built.json"
"""File with the pins and the installed packages; a build writes it last."""


class BuildError(Exception):
    """A build failed."""


class MissingError(BuildError):
    """The machine lacks a requirement of a build."""


@dataclass(frozen=True)
class Pins:
    """Contents of one environment; the comments in `pins.toml` explain the fields."""

    name: str
    python: str
    requirements: tuple[str, ...]
    removed: tuple[str, ...]
    imports: tuple[str, ...]
    gigabytes: float
    driver_stub: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Name of the environment: the server and a short hash of all fields."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return f"{self.name}-{digest[:12]}"


def read_pins(path: Path = PINS) -> dict[str, Pins]:
    """Return the tables of the file, by server."""
    tables = tomllib.loads(path.read_text())
    return {
        name: Pins(
            name, **{field: tuple(value) if isinstance(value, list) else value for field, value in table.items()}
        )
        for name, table in tables.items()
    }


def default_cache() -> Path:
    """Return `$HF_HOME/rl/servers`, or `~/.cache/rl/servers`: next to other caches of this project."""
    home = os.environ.get("HF_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "rl" / "servers"


def interpreter(pins: Pins, cache: Path, make: Callable[[Pins, Path, int], None] | None = None) -> Path:
    """Return the Python interpreter of an environment; build the environment first if it is missing.

    Args:
        pins: Contents of the environment.
        cache: Directory of all environments.
        make: Function that builds in a new directory while a lock is held; its last argument is the file descriptor
            of the lock. The default is `build`.

    Raises:
        MissingError: Python, the compiler or disk space is missing, or the cache is not writable.
        BuildError: A step failed.
    """
    directory = cache / pins.key
    python = directory / "bin" / "python"
    if (directory / DONE).is_file():
        return python
    with _lock(cache / f"{pins.name}.lock") as lock:
        if not (directory / DONE).is_file():
            shutil.rmtree(directory, ignore_errors=True)  # remains of an interrupted build
            (make or build)(pins, directory, lock)
            _print_outdated(cache, pins)
    return python


@contextmanager
def _lock(path: Path) -> Iterator[int]:
    """Lock a file and yield its descriptor; child processes that inherit the descriptor keep the lock."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise MissingError(
            f"cannot keep environments in {path.parent} ({error}); choose another directory with --cache"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"waiting for another build, which holds the lock {path}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def build(pins: Pins, directory: Path, lock: int) -> None:
    """Build the environment `directory` and write its file `DONE` last.

    Args:
        pins: Contents of the environment.
        directory: New directory.
        lock: File descriptor of a lock, which all child processes inherit. If one survives this build, the next build
            waits for it instead of sharing the directory with it.

    Raises:
        MissingError: Python, the compiler or disk space is missing.
        BuildError: A step failed; the message contains the end of its output.
    """
    base = find_python(pins.python)
    compiler = find_compiler() if pins.driver_stub else ""
    require_space(directory.parent, pins.gigabytes)
    steps = Steps(directory.with_suffix(".log"), lock)
    _say(f"building {pins.name} ({', '.join(pins.requirements)}) in {directory}; this takes minutes")
    python = str(directory / "bin" / "python")
    steps.run(base, "-m", "venv", str(directory))
    steps.run(python, "-m", "pip", "install", "--progress-bar", "off", *pins.requirements)
    if pins.removed:
        steps.run(python, "-m", "pip", "uninstall", "--yes", *pins.removed)
    if pins.driver_stub:
        stub_driver(steps, compiler, directory, pins.driver_stub)
    steps.run(python, "-c", "\n".join(f"import {module}" for module in pins.imports))
    installed = steps.run(python, "-m", "pip", "freeze").splitlines()
    unfinished = directory / f"{DONE}.unfinished"
    unfinished.write_text(json.dumps({"pins": asdict(pins), "installed": installed}, indent=1))
    unfinished.rename(directory / DONE)


class Steps:
    """Runs commands in sequence and writes their output to one log."""

    def __init__(self, log: Path, lock: int) -> None:
        self.log = log
        self.lock = lock
        self.environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        log.write_text("")

    def run(self, *command: str) -> str:
        """Run a command and return its output.

        Raises:
            BuildError: The exit code is not 0.
        """
        with self.log.open("a+") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            start = log.tell()
            code = subprocess.run(
                command, stdout=log, stderr=log, env=self.environment, check=False, pass_fds=(self.lock,)
            ).returncode
            log.seek(start)
            output = log.read()
        if code:
            last = "\n".join(output.splitlines()[-15:])
            raise BuildError(f"{' '.join(command[:4])} ... ended with {code}; the full output is in {self.log}\n{last}")
        return output


def find_python(version: str) -> str:
    """Return a Python interpreter of a version that can create environments: the first one on PATH, or one from uv.

    Raises:
        MissingError: The machine has no such interpreter, and uv cannot fetch one.
    """
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        candidate = shutil.which(f"python{version}", path=folder)
        if candidate and _makes_environments(candidate, version):
            return candidate
    if uv := shutil.which("uv"):
        subprocess.run([uv, "python", "install", "--no-bin", version], stdout=sys.stderr, check=False)
        find = [uv, "python", "find", "--managed-python", version]
        candidate = subprocess.run(find, capture_output=True, text=True, check=False).stdout.strip()
        if candidate and _makes_environments(candidate, version):
            return candidate
    raise MissingError(
        f"expected a Python {version} with venv and ensurepip, found none on PATH and "
        f"{'none that uv could fetch' if uv else 'no uv to fetch it'}; install python{version} and "
        f"python{version}-venv of your distribution, or uv (pip install uv)"
    )


def _makes_environments(python: str, version: str) -> bool:
    """Return whether an interpreter has this version, venv and ensurepip; a shim of a version manager may not start."""
    code = f"import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != {version!r})"
    return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0


def find_compiler() -> str:
    """Return the path of the C compiler: `$CC`, gcc or cc.

    Raises:
        MissingError: The machine has no C compiler.
    """
    for name in (os.environ.get("CC"), "gcc", "cc"):
        if name and (compiler := shutil.which(name)):
            return compiler
    raise MissingError("expected a C compiler, found none of $CC, gcc and cc on PATH; install gcc")


def require_space(directory: Path, gigabytes: float) -> None:
    """Check the free disk space of an existing directory.

    Raises:
        MissingError: The disk has less than `gigabytes` GB of free space.
    """
    free = shutil.disk_usage(directory).free / 1e9
    if free < gigabytes:
        raise MissingError(
            f"expected {gigabytes:g} GB of free space for {directory}, found {free:.1f}; choose another directory with "
            "--cache, or remove environments that you no longer need"
        )


def stub_driver(steps: Steps, compiler: str, directory: Path, functions: Sequence[str]) -> None:
    """Add a stub of the CUDA driver library to the environment, which its Python loads at startup.

    Libraries that are loaded later find the stub by its name. So the server and its child processes need no environment
    variable. If the machine has the real driver, Python loads that instead.
    """
    source, library = directory / "libcuda_stub.c", directory / "lib" / "libcuda.so.1"
    source.write_text("".join(f"int {name}(void) {{ return 100; /* no device */ }}\n" for name in functions))
    steps.run(compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source))
    code = (
        "import ctypes, sys\n"
        "def load():\n"
        "    try:\n"
        "        ctypes.CDLL('libcuda.so.1', ctypes.RTLD_GLOBAL)\n"
        "    except OSError:\n"
        "        ctypes.CDLL(sys.prefix + '/lib/libcuda.so.1', ctypes.RTLD_GLOBAL)\n"
        "load()\n"
    )
    [packages] = directory.glob("lib/python3*/site-packages")
    (packages / "rl_driver_stub.py").write_text(code)
    (packages / "rl_driver_stub.pth").write_text("import rl_driver_stub\n")


def _print_outdated(cache: Path, pins: Pins) -> None:
    """Print the environments with other pins, which another checkout may still use."""
    for other in sorted(cache.glob(f"{pins.name}-*/{DONE}")):
        if other.parent.name != pins.key:
            _say(f"{other.parent} has other pins; remove it if no other checkout uses it")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Build the environments and print their interpreters."""
    pins = read_pins()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="*", metavar="SERVER", help=f"{' or '.join(pins)} (default: all)")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="directory of the environments")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.servers if name not in pins]:
        parser.error(f"expected servers of {', '.join(pins)}, found {', '.join(unknown)}")
    try:
        interpreters = [interpreter(pins[name], arguments.cache.absolute()) for name in arguments.servers or pins]
    except BuildError as error:
        _say(f"{Path(__file__).name}: {error}")
        return 1
    print(*interpreters, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
