"""Build packages as they would be released, and use what was built.

    uv run python infra/release/check.py [PACKAGE ...] [--out DIR]

For each package, by default all of them: its files agree with each other; sdist and wheel are built, pass `twine check`
and hold what they must; the wheel is installed, with what the README's `uv pip install` line names, into an
environment of its own, in which the README's example runs. Then each project in `downstream/` that asks for one of
them is installed and run likewise. `UV_TORCH_BACKEND=cpu` keeps CUDA libraries out of these environments.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from packaging.requirements import Requirement
from readme import blocks, write_data, write_files
from workspace import ROOT, Package, ReleaseError, ended, faults, package_named, packages, range_fault, run, with_ours

DOWNSTREAM = Path(__file__).parent / "downstream"


def build(package: Package, out: Path) -> Path:
    """Build sdist and, from it, wheel.

    Returns:
        the wheel.

    Raises:
        ReleaseError: they cannot be built, twine has complaints, or a file is missing or one too many.
    """
    run("uv", "build", "--package", package.name, "--out-dir", out, cwd=ROOT)
    stem = f"{package.module}-{package.version}"
    sdist, wheel = out / f"{stem}.tar.gz", out / f"{stem}-py3-none-any.whl"
    run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
    with tarfile.open(sdist) as archive:
        sdist_names = archive.getnames()
    with zipfile.ZipFile(wheel) as archive:
        wheel_names = archive.namelist()
    if found := sdist_faults(package, sdist_names) + wheel_faults(package, wheel_names):
        raise ReleaseError("\n".join(found))
    return wheel


def sdist_faults(package: Package, names: Sequence[str]) -> list[str]:
    """What an sdist with these files lacks."""
    needed = ("LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", f"src/{package.module}/py.typed")
    lacking = [name for name in needed if f"{package.module}-{package.version}/{name}" not in names]
    strange = [name for name in names if name.startswith(f"{package.module}-{package.version}/tests/")]
    return [f"{package.name}: expected {name} in the sdist, found none" for name in lacking] + [
        f"{package.name}: expected no tests in the sdist, found {name}" for name in strange[:1]
    ]


def wheel_faults(package: Package, names: Sequence[str]) -> list[str]:
    """What a wheel with these files lacks, and what does not belong there."""
    about = f"{package.module}-{package.version}.dist-info"
    needed = (f"{package.module}/__init__.py", f"{package.module}/py.typed", f"{about}/licenses/LICENSE")
    lacking = [f"{package.name}: expected {name} in the wheel, found none" for name in needed if name not in names]
    strange = {name.split("/")[0] for name in names} - {package.module, about}
    return lacking + [f"{package.name}: expected its module alone in the wheel, found {name}" for name in strange]


class Environment:
    """An environment without packages; where one of ours is asked for, what was built is installed."""

    def __init__(self, directory: Path, wheels: dict[str, Path]) -> None:
        self.python = directory / "bin" / "python"
        self.built = directory / "built.txt"
        run("uv", "venv", "--no-config", "--python", sys.executable, directory)
        self.built.write_text("".join(f"{name} @ {wheel.as_uri()}\n" for name, wheel in wheels.items()))

    def install(self, *asked: str | Path) -> None:
        """Install what `uv pip install` is asked for."""
        install = ("uv", "pip", "install", "--no-config", "--python", self.python, "--constraints", self.built)
        run(*install, *asked)

    def run(self, program: Path) -> str:
        """Run a program, with the directory that it lies in as the current one."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        return run(self.python, program.name, cwd=program.parent, env=kept)


def asked_for(page: str, text: str) -> list[str]:
    """What a README's `uv pip install` line names, with `packages/NAME[EXTRA]` as `NAME[EXTRA]`.

    Args:
        page: what the README is called in an error.
        text: the commands of the README, a line each.

    Raises:
        ReleaseError: there is no such line.
    """
    line = re.search(r"(?m)^uv pip install (.*)$", text)
    if line is None:
        raise ReleaseError(f"{page}: expected how the package is installed, `$ uv pip install ...`, found no such line")
    words = [re.sub(r"^apps\b", "packages/rl-apps", word) for word in shlex.split(line[1])]
    return [word.removeprefix("packages/") for word in words]


def run_example(package: Package, wheels: dict[str, Path], scratch: Path) -> None:
    """Install a package as its README says, and run the README's Python blocks, in order, as one program.

    Raises:
        ReleaseError: the README does not say how to install it or has no example, or something failed.
    """
    page = (package.folder / "README.md").relative_to(ROOT).as_posix()
    found = blocks(page, ROOT)
    programs = [block.text for block in found if block.is_program]
    if not programs:
        raise ReleaseError(f"{page}: expected an example, found no Python block")
    environment = Environment(scratch / "environment", wheels)
    environment.install(*asked_for(page, "\n".join(command for block in found for command in block.commands())))
    example = scratch / "example"
    write_data(example / "path" / "to" / "gsm8k")
    write_files(found, example)
    (example / "main.py").write_text("\n\n".join(programs))
    environment.run(example / "main.py")


def uses(project: Path) -> Package:
    """The one package of ours that a project in `downstream/` asks for.

    Raises:
        ReleaseError: it asks for others too, or in a range that has not the present version.
    """
    (line,) = tomllib.loads((project / "pyproject.toml").read_text())["project"]["dependencies"]
    requirement = Requirement(line)
    package = package_named(requirement.name)
    if fault := range_fault(f"downstream/{project.name}", requirement, package.version):
        raise ReleaseError(fault)
    return package


def check(chosen: Sequence[Package], out: Path) -> None:
    """Everything, with a line for each thing that was done; the first that fails ends it.

    Args:
        chosen: packages to check. Those that they use are built too.
        out: directory for sdists and wheels.

    Raises:
        ReleaseError: what failed.
    """
    if found := [fault for package in chosen for fault in faults(package)]:
        raise ReleaseError("\n".join(found))
    wheels: dict[str, Path] = {}
    for package in with_ours(package.name for package in chosen):
        with said(f"{package.name} {package.version}: sdist and wheel"):
            wheels[package.name] = build(package, out)
    for package in chosen:
        with said(f"{package.name}: README in an environment of its own"), scratch_directory() as scratch:
            run_example(package, wheels, scratch)
    for project in sorted(DOWNSTREAM.iterdir()):
        if uses(project) in chosen:
            with said(f"downstream/{project.name}"), scratch_directory() as scratch:
                environment = Environment(scratch / "environment", wheels)
                environment.install("--requirements", project / "pyproject.toml")
                environment.run(project / "main.py")


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """A directory for the duration, away from the checkout, whose settings of uv must not count."""
    with tempfile.TemporaryDirectory(prefix="rl-release-") as directory:
        yield Path(directory)


@contextmanager
def said(what: str) -> Iterator[None]:
    """Print what is done, and how long it took."""
    print(what, end=" ", flush=True)
    begun = time.perf_counter()
    yield
    print(f"({time.perf_counter() - begun:.1f} s)", flush=True)


def main(words: Sequence[str] | None = None) -> None:
    """Check the packages that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", nargs="*", help="by default all")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="DIR", help="for what is built (dist/)")
    asked = parser.parse_args(words)
    chosen = [package_named(name) for name in asked.package] or list(packages().values())
    check(chosen, asked.out.absolute())


if __name__ == "__main__":
    sys.exit(ended(main))
