"""The packages of the workspace, as their files describe them, and the commands that the release scripts run."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
UNRELEASED = "Unreleased"
DEADLINE = 1200.0
"""Seconds that a command may take. The longest one downloads gigabytes."""


class ReleaseError(Exception):
    """A package cannot be released in its current state."""


class UnknownPackageError(ReleaseError):
    """The workspace has no package of the requested name."""


@dataclass(frozen=True)
class Package:
    """A package of the workspace, read from its folder."""

    folder: Path

    @cached_property
    def project(self) -> dict[str, Any]:
        """The table `project` of its pyproject.toml."""
        return tomllib.loads((self.folder / "pyproject.toml").read_text())["project"]

    @property
    def name(self) -> str:
        return self.project["name"]

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")

    @property
    def version(self) -> Version:
        return Version(self.project["version"])

    @property
    def tag(self) -> str:
        """Git tag of this version."""
        return f"{self.name}-v{self.version}"

    @property
    def requirements(self) -> list[Requirement]:
        """Dependencies of the package and of all its extras."""
        extras = self.project.get("optional-dependencies", {}).values()
        return [Requirement(line) for lines in (self.project["dependencies"], *extras) for line in lines]

    @property
    def changelog(self) -> Path:
        return self.folder / "CHANGELOG.md"

    def changes(self, heading: str) -> str | None:
        """Return the text below a heading of the changelog, or None without this heading."""
        _, *sections = re.split(r"(?m)^## ", self.changelog.read_text())
        parts = (section.partition("\n") for section in sections)
        return next((text.strip() for name, _, text in parts if name.strip() == heading), None)


def packages(root: Path = ROOT) -> dict[str, Package]:
    """Return all packages by name."""
    candidates = [Package(folder) for folder in (*sorted((root / "packages").iterdir()), root / "apps")]
    return {package.name: package for package in candidates if (package.folder / "pyproject.toml").is_file()}


def package_named(name: str, root: Path = ROOT) -> Package:
    """Return the package of that name.

    Raises:
        UnknownPackageError: the workspace has no package of that name.
    """
    by_name = packages(root)
    if name not in by_name:
        raise UnknownPackageError(f"unknown package {name}; expected one of {', '.join(by_name)}")
    return by_name[name]


def next_breaking(version: Version) -> Version:
    """Return the next version that may break users: the next minor version before 1.0, else the next major version."""
    return Version(f"0.{version.minor + 1}" if version.major == 0 else f"{version.major + 1}")


def compatible_range(version: Version) -> str:
    """Return the range of versions that do not break users of this version, such as `>=0.2,<0.3`."""
    return f">={version.major}.{version.minor},<{next_breaking(version)}"


def range_problem(user: str, requirement: Requirement, version: Version) -> str | None:
    """Return the problem with the range in which `user` requires a package of the workspace, or None.

    Args:
        user: name of the package or project that has the requirement.
        requirement: its requirement.
        version: current version of the required package.
    """
    versions = requirement.specifier
    if versions.contains(version) and not versions.contains(next_breaking(version)) and not versions.contains("0.0"):
        return None
    return f"{user}: expected {requirement.name}{compatible_range(version)}, found {requirement}"


def find_problems(package: Package, root: Path = ROOT) -> list[str]:
    """Return the contradictions between the files of a package and the workspace, one sentence each."""
    by_name = packages(root)
    internal = [requirement for requirement in package.requirements if requirement.name in by_name]
    problems = [range_problem(package.name, requirement, by_name[requirement.name].version) for requirement in internal]
    license_file = package.folder / "LICENSE"
    if not license_file.is_file() or license_file.read_bytes() != (root / "LICENSE").read_bytes():
        problems.append(f"{package.name}: {license_file} must be a copy of the LICENSE of the repository; copy it")
    return [problem for problem in problems if problem]


def with_dependencies(names: Iterable[str], root: Path = ROOT) -> list[Package]:
    """Return these packages and the workspace packages that they require, also in extras, in workspace order."""
    by_name, remaining, selected = packages(root), list(names), set()
    while remaining:
        name = remaining.pop()
        if name not in selected:
            selected.add(name)
            requirements = by_name[name].requirements
            remaining += [requirement.name for requirement in requirements if requirement.name in by_name]
    return [package for name, package in by_name.items() if name in selected]


def run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Run a command and return its standard output.

    Raises:
        ReleaseError: it takes longer than `DEADLINE`, or its exit code is not 0 (with the last 20 lines of output).
    """
    title = " ".join(map(str, command[:4]))
    try:
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        raise ReleaseError(f"{title} ... did not end within {DEADLINE:.0f} s (DEADLINE in workspace.py)") from None
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise ReleaseError(f"{title} ... failed with exit code {done.returncode}\n{last}")
    return done.stdout


def exit_code(main: Callable[[], None]) -> int:
    """Run a script of this folder. Return 0, or 2 for an unknown package, or 1 for another `ReleaseError`."""
    try:
        main()
    except ReleaseError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, UnknownPackageError) else 1
    return 0
