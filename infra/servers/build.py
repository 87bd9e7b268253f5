"""Build environments with the real inference servers, which tests and trials start on a machine without a GPU.

    python infra/servers/build.py [vllm] [sglang] [--cache DIRECTORY]

Builds what is missing of the servers named, or of both, and prints the path of each one's Python interpreter, a line
each and nothing else, on standard output; a path is what `rollout.server.python=` takes. Environments are kept in
`~/.cache/rl/servers` (`$HF_HOME/rl/servers` where that is set), named after the server and the hash of its table in
`pins.toml`, so that other pins make another one. An environment counts as built when its last file is there: one whose
build was interrupted is made anew. Two builds at once wait for each other. Needs the standard library of Python 3.11,
the Python that the pins ask for or uv, which fetches it, and pip's package index; vLLM's build of torch is published on
PyTorch's own CPU index, which pip is told of as usual (`PIP_EXTRA_INDEX_URL`).
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
"""The last file of a build: its pins, and all that was installed."""


class BuildError(Exception):
    """An environment could not be built."""


class MissingError(BuildError):
    """This machine lacks what a build needs."""


@dataclass(frozen=True)
class Pins:
    """What one environment is made from; the comments in `pins.toml` say what the fields mean."""

    name: str
    python: str
    requirements: tuple[str, ...]
    removed: tuple[str, ...]
    imports: tuple[str, ...]
    gigabytes: float
    driver_stub: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Name and a short hash of everything else."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return f"{self.name}-{digest[:12]}"


def read_pins(path: Path = PINS) -> dict[str, Pins]:
    """The tables of the file, by server."""
    tables = tomllib.loads(path.read_text())
    return {
        name: Pins(
            name, **{field: tuple(value) if isinstance(value, list) else value for field, value in table.items()}
        )
        for name, table in tables.items()
    }


def default_cache() -> Path:
    """Beside what else the project keeps: `$HF_HOME/rl/servers`, or `~/.cache/rl/servers`."""
    home = os.environ.get("HF_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "rl" / "servers"


def interpreter(pins: Pins, cache: Path, make: Callable[[Pins, Path, int], None] | None = None) -> Path:
    """The Python of an environment, which is built first if need be.

    Args:
        pins: what it is made from.
        cache: directory of all environments.
        make: builds into a directory that does not exist yet, while the lock's descriptor is held; by default `build`.

    Raises:
        MissingError: no such Python, no compiler, no space, or the cache cannot be written.
        BuildError: a step failed.
    """
    directory = cache / pins.key
    python = directory / "bin" / "python"
    if (directory / DONE).is_file():
        return python
    with _lock(cache / f"{pins.name}.lock") as lock:
        if not (directory / DONE).is_file():
            shutil.rmtree(directory, ignore_errors=True)  # of a build that was interrupted
            (make or build)(pins, directory, lock)
            _say_what_is_left(cache, pins)
    return python


@contextmanager
def _lock(path: Path) -> Iterator[int]:
    """Hold the file's lock; what inherits the descriptor holds it too."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise MissingError(
            f"expected a directory to keep environments in, found {path.parent} ({error}); name another with --cache"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"waiting for another build, which holds {path}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def build(pins: Pins, directory: Path, lock: int) -> None:
    """Make the environment `directory`; its file `DONE` comes last.

    Args:
        pins: what it is made from.
        directory: to make.
        lock: descriptor of a lock, handed to every process that is started: one that outlives this build still keeps
            the next one from the directory that it writes to.

    Raises:
        MissingError: no such Python, no compiler or no space.
        BuildError: a step failed; with the end of what it said.
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
    """Runs commands one after the other, with what they say in one log."""

    def __init__(self, log: Path, lock: int) -> None:
        self.log = log
        self.lock = lock
        self.environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        log.write_text("")

    def run(self, *command: str) -> str:
        """Run it to its end.

        Returns:
            what it said.

        Raises:
            BuildError: its exit code is not 0.
        """
        with self.log.open("a+") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            start = log.tell()
            code = subprocess.run(
                command, stdout=log, stderr=log, env=self.environment, check=False, pass_fds=(self.lock,)
            ).returncode
            log.seek(start)
            said = log.read()
        if code:
            last = "\n".join(said.splitlines()[-15:])
            raise BuildError(f"{' '.join(command[:4])} ... ended with {code}; all of it is in {self.log}\n{last}")
        return said


def find_python(version: str) -> str:
    """The first `pythonVERSION` on PATH that starts, is that version and can make environments. Where there is none,
    the one that uv keeps, or fetches.

    Raises:
        MissingError: there is none.
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
        f"expected a Python {version} with venv and ensurepip, found no python{version} on PATH that has them, and "
        f"{'none that uv could fetch' if uv else 'no uv to fetch it'}; install it from your distribution "
        f"(python{version} and python{version}-venv), or install uv (pip install uv)"
    )


def _makes_environments(python: str, version: str) -> bool:
    """Whether it is there; a version manager's stand-in is there also where it cannot start the version."""
    wanted = f"import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != {version!r})"
    return subprocess.run([python, "-c", wanted], capture_output=True, check=False).returncode == 0


def find_compiler() -> str:
    """The C compiler: `$CC`, gcc or cc.

    Raises:
        MissingError: there is none.
    """
    for name in (os.environ.get("CC"), "gcc", "cc"):
        if name and (found := shutil.which(name)):
            return found
    raise MissingError("expected a C compiler, found neither $CC nor gcc nor cc on PATH; install gcc")


def require_space(directory: Path, gigabytes: float) -> None:
    """See that the disk of an existing directory has room.

    Raises:
        MissingError: it has not.
    """
    free = shutil.disk_usage(directory).free / 1e9
    if free < gigabytes:
        raise MissingError(
            f"expected {gigabytes:g} GB of free space for {directory}, found {free:.1f}; name another with --cache, or "
            "remove the environments in it that you no longer need"
        )


def stub_driver(steps: Steps, compiler: str, directory: Path, functions: Sequence[str]) -> None:
    """Put a stand-in for the CUDA driver's library into the environment, and load it when its Python starts.

    A library that is loaded already satisfies every later one that wants it by that name, so that no variable has to
    be set for the server or for the processes that it starts. The real driver, where there is one, goes first.
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


def _say_what_is_left(cache: Path, pins: Pins) -> None:
    """Name the environments of other pins; another checkout may still use them."""
    for other in sorted(cache.glob(f"{pins.name}-*/{DONE}")):
        if other.parent.name != pins.key:
            _say(f"{other.parent} is of other pins; remove it when nobody uses it")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Build, and print the interpreters."""
    pins = read_pins()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="*", metavar="SERVER", help=f"of {', '.join(pins)}; by default all")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="where environments are kept")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.servers if name not in pins]:
        parser.error(f"expected servers of {', '.join(pins)}, found {', '.join(unknown)}")
    try:
        found = [interpreter(pins[name], arguments.cache.absolute()) for name in arguments.servers or pins]
    except BuildError as error:
        _say(f"{Path(__file__).name}: {error}")
        return 1
    print(*found, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
