"""The packages of this workspace as their files describe them, and what a release asks of these files."""

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
"""Seconds that a command may take: the longest fetches gigabytes into an environment."""


class ReleaseError(Exception):
    """A package cannot be released as it is."""


class UnknownPackageError(ReleaseError):
    """No package has that name."""


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
        """What the commit of this version is tagged with."""
        return f"{self.name}-v{self.version}"

    @property
    def requirements(self) -> list[Requirement]:
        """Of the package and of all of its extras."""
        extras = self.project.get("optional-dependencies", {}).values()
        return [Requirement(line) for lines in (self.project["dependencies"], *extras) for line in lines]

    @property
    def changelog(self) -> Path:
        return self.folder / "CHANGELOG.md"

    def changes(self, heading: str) -> str | None:
        """What its changelog says under a heading; None without such a heading."""
        _, *sections = re.split(r"(?m)^## ", self.changelog.read_text())
        found = (section.partition("\n") for section in sections)
        return next((text.strip() for name, _, text in found if name.strip() == heading), None)


def packages(root: Path = ROOT) -> dict[str, Package]:
    """All packages by name."""
    found = [Package(folder) for folder in (*sorted((root / "packages").iterdir()), root / "apps")]
    return {package.name: package for package in found if (package.folder / "pyproject.toml").is_file()}


def package_named(name: str, root: Path = ROOT) -> Package:
    """The package of that name.

    Raises:
        UnknownPackageError: there is none.
    """
    known = packages(root)
    if name not in known:
        raise UnknownPackageError(f"expected a package of {', '.join(known)}, found {name}")
    return known[name]


def next_breaking(version: Version) -> Version:
    """The first version that may break what uses this one: the next minor one before 1.0, else the next major one."""
    return Version(f"0.{version.minor + 1}" if version.major == 0 else f"{version.major + 1}")


def compatible(version: Version) -> str:
    """The range of versions in which what uses this one goes on working: `>=0.2,<0.3`."""
    return f">={version.major}.{version.minor},<{next_breaking(version)}"


def range_fault(user: str, requirement: Requirement, version: Version) -> str | None:
    """What is wrong with how `user` asks for one of our packages, which has this version now."""
    asked = requirement.specifier
    if asked.contains(version) and not asked.contains(next_breaking(version)) and not asked.contains("0.0"):
        return None
    return f"{user}: expected {requirement.name}{compatible(version)}, found {requirement}"


def faults(package: Package, root: Path = ROOT) -> list[str]:
    """What must be put right in a package's files before it can be released, a sentence each."""
    known = packages(root)
    ours = [requirement for requirement in package.requirements if requirement.name in known]
    found = [range_fault(package.name, requirement, known[requirement.name].version) for requirement in ours]
    licence = package.folder / "LICENSE"
    if not licence.is_file() or licence.read_bytes() != (root / "LICENSE").read_bytes():
        found.append(f"{package.name}: expected a copy of LICENSE in {package.folder}, found none or another; copy it")
    return [fault for fault in found if fault]


def with_ours(names: Iterable[str], root: Path = ROOT) -> list[Package]:
    """These packages and all packages of ours that they use, extras included; in the order of the workspace."""
    known, left, found = packages(root), list(names), set()
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += [requirement.name for requirement in known[name].requirements if requirement.name in known]
    return [package for name, package in known.items() if name in found]


def run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Run a command to its end.

    Returns:
        what it wrote to standard output.

    Raises:
        ReleaseError: its exit code is not 0, with the end of what it said; or it takes longer than `DEADLINE`.
    """
    what = " ".join(map(str, command[:4]))
    try:
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        raise ReleaseError(f"{what} ...: expected an end within {DEADLINE:.0f} s (DEADLINE), found none") from None
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise ReleaseError(f"{what} ... ended with {done.returncode}\n{last}")
    return done.stdout


def ended(main: Callable[[], None]) -> int:
    """The exit code of a program of this folder: 0, 1 where a package cannot be released, 2 where none is so called."""
    try:
        main()
    except ReleaseError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, UnknownPackageError) else 1
    return 0
