"""Build packages as for a release, then install and use them.

    uv run python infra/release/check.py [PACKAGE ...] [--out DIR]

For each package, by default all of them, the script

- checks that its files agree and that its metadata is complete;
- builds sdist and wheel, runs `twine check` and pyroma, and checks which files they contain;
- installs the wheel into a separate environment with the first `uv pip install` line of the README, and runs the
  README's example there.

Then it installs and runs each project in `downstream/` that requires one of the packages. `UV_TORCH_BACKEND=cpu` keeps
CUDA libraries out of these environments.
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

from metadata import metadata_problems
from packaging.requirements import Requirement
from readme import blocks, write_data, write_files
from workspace import (
    ROOT,
    Package,
    ReleaseError,
    exit_code,
    find_problems,
    package_named,
    packages,
    range_problem,
    run,
    with_dependencies,
)

DOWNSTREAM = Path(__file__).parent / "downstream"
PYROMA = "pyroma==5.0.1"
MIN_RATING = 9
"""Lowest rating of pyroma, of 10."""


def build(package: Package, out: Path) -> Path:
    """Build the sdist and, from it, the wheel. Return the wheel.

    Raises:
        ReleaseError: a build fails, twine or pyroma reports a problem, or a file is missing or unexpected.
    """
    run("uv", "build", "--package", package.name, "--out-dir", out, cwd=ROOT)
    stem = f"{package.module}-{package.version}"
    sdist, wheel = out / f"{stem}.tar.gz", out / f"{stem}-py3-none-any.whl"
    run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
    run("uv", "tool", "run", "--no-config", "--from", PYROMA, "pyroma", "--min", str(MIN_RATING), sdist)
    with tarfile.open(sdist) as archive:
        sdist_names = archive.getnames()
    with zipfile.ZipFile(wheel) as archive:
        wheel_names = archive.namelist()
    if problems := sdist_problems(package, sdist_names) + wheel_problems(package, wheel_names):
        raise ReleaseError("\n".join(problems))
    return wheel


def sdist_problems(package: Package, names: Sequence[str]) -> list[str]:
    """Return the files that an sdist with these names lacks, and the first test in it."""
    top = f"{package.module}-{package.version}"
    required = ("LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", f"src/{package.module}/py.typed")
    tests = [name for name in names if name.startswith(f"{top}/tests/")]
    return [f"{package.name}: the sdist lacks {name}" for name in required if f"{top}/{name}" not in names] + [
        f"{package.name}: the sdist must not contain tests, found {name}" for name in tests[:1]
    ]


def wheel_problems(package: Package, names: Sequence[str]) -> list[str]:
    """Return the files that a wheel with these names lacks, and its top-level folders that do not belong there."""
    info = f"{package.module}-{package.version}.dist-info"
    required = (f"{package.module}/__init__.py", f"{package.module}/py.typed", f"{info}/licenses/LICENSE")
    unexpected = {name.split("/")[0] for name in names} - {package.module, info}
    return [f"{package.name}: the wheel lacks {name}" for name in required if name not in names] + [
        f"{package.name}: the wheel must contain only {package.module}, found {name}" for name in sorted(unexpected)
    ]


class Environment:
    """A new virtual environment, in which workspace packages are installed from the built wheels."""

    def __init__(self, directory: Path, wheels: dict[str, Path]) -> None:
        self.python = directory / "bin" / "python"
        self.constraints = directory / "built.txt"
        run("uv", "venv", "--no-config", "--python", sys.executable, directory)
        self.constraints.write_text("".join(f"{name} @ {wheel.as_uri()}\n" for name, wheel in wheels.items()))

    def install(self, *arguments: str | Path) -> None:
        """Run `uv pip install` with these arguments."""
        install = ("uv", "pip", "install", "--no-config", "--python", self.python, "--constraints", self.constraints)
        run(*install, *arguments)

    def run(self, program: Path) -> str:
        """Run a program in its own directory and return its standard output."""
        variables = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
        }
        return run(self.python, program.name, cwd=program.parent, env=variables)


def install_arguments(page: str, commands: str) -> list[str]:
    """Return the arguments of the first `uv pip install` command of a README.

    Args:
        page: path of the README, for the error.
        commands: the commands of the README, one per line.

    Raises:
        ReleaseError: the README has no such command.
    """
    match = re.search(r"(?m)^uv pip install (.*)$", commands)
    if match is None:
        raise ReleaseError(f"{page}: no line `$ uv pip install ...`; add how to install the package")
    return shlex.split(match[1])


def run_example(package: Package, wheels: dict[str, Path], scratch: Path) -> None:
    """Install a package as its README says, and run the README's Python blocks as one program.

    Raises:
        ReleaseError: the README lacks an install command or an example, or a command fails.
    """
    page = (package.folder / "README.md").relative_to(ROOT).as_posix()
    page_blocks = blocks(page, ROOT)
    programs = [block.text for block in page_blocks if block.is_program]
    if not programs:
        raise ReleaseError(f"{page}: no Python block; add an example")
    environment = Environment(scratch / "environment", wheels)
    commands = [command for block in page_blocks for command in block.commands()]
    environment.install(*install_arguments(page, "\n".join(commands)))
    example = scratch / "example"
    write_data(example / "path" / "to" / "gsm8k")
    write_files(page_blocks, example)
    (example / "main.py").write_text("\n\n".join(programs))
    environment.run(example / "main.py")


def required_package(project: Path) -> Package:
    """Return the only package that a project in `downstream/` requires.

    Raises:
        ReleaseError: the required range does not contain the current version.
    """
    (line,) = tomllib.loads((project / "pyproject.toml").read_text())["project"]["dependencies"]
    requirement = Requirement(line)
    package = package_named(requirement.name)
    if problem := range_problem(f"downstream/{project.name}", requirement, package.version):
        raise ReleaseError(problem)
    return package


def check(selected: Sequence[Package], out: Path) -> None:
    """Run all checks and print a line for each. Stop at the first failure.

    Args:
        selected: packages to check. The workspace packages that they require are built too.
        out: directory for sdists and wheels.

    Raises:
        ReleaseError: a check failed.
    """
    problems = [problem for package in selected for problem in find_problems(package) + metadata_problems(package)]
    if problems:
        raise ReleaseError("\n".join(problems))
    wheels: dict[str, Path] = {}
    for package in with_dependencies(package.name for package in selected):
        with timed(f"{package.name} {package.version}: sdist and wheel"):
            wheels[package.name] = build(package, out)
    for package in selected:
        with timed(f"{package.name}: README example in a separate environment"), scratch_directory() as scratch:
            run_example(package, wheels, scratch)
    for project in sorted(DOWNSTREAM.iterdir()):
        if required_package(project) in selected:
            with timed(f"downstream/{project.name}"), scratch_directory() as scratch:
                environment = Environment(scratch / "environment", wheels)
                environment.install("--requirements", project / "pyproject.toml")
                environment.run(project / "main.py")


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """Yield a temporary directory outside the checkout, where uv does not find the workspace."""
    with tempfile.TemporaryDirectory(prefix="rl-release-") as directory:
        yield Path(directory)


@contextmanager
def timed(title: str) -> Iterator[None]:
    """Print a title, and after the block its duration."""
    print(title, end=" ", flush=True)
    start = time.perf_counter()
    yield
    print(f"({time.perf_counter() - start:.1f} s)", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Check the given packages, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", nargs="*", help="packages to check (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="DIR", help="directory of builds (dist/)")
    options = parser.parse_args(arguments)
    selected = [package_named(name) for name in options.package] or list(packages().values())
    check(selected, options.out.absolute())


if __name__ == "__main__":
    sys.exit(exit_code(main))
