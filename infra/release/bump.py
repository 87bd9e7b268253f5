"""Raise the version of one package in all files that contain it.

    uv run python infra/release/bump.py PACKAGE (major | minor | patch)

Changes the version in pyproject.toml, the heading of the unreleased changes, and uv.lock. If the range for users
changes, it also changes the range in other packages and in the projects in `downstream/`, and adds a line to the
changelogs of these packages. Commits nothing.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from workspace import (
    ROOT,
    UNRELEASED,
    Package,
    ReleaseError,
    compatible_range,
    exit_code,
    package_named,
    packages,
    run,
)

COMPONENTS = ("major", "minor", "patch")


def bump(name: str, component: str, root: Path = ROOT) -> list[str]:
    """Raise the version, but do not update uv.lock.

    Returns:
        the packages whose requirement changed. They have an unreleased change now.

    Raises:
        ReleaseError: the package has no unreleased changes.
    """
    package = package_named(name, root)
    if not package.changes(UNRELEASED):
        raise ReleaseError(f"{package.changelog}: no changes under '## {UNRELEASED}'; nothing to release")
    version = run("uv", "version", "--package", name, "--bump", component, "--frozen", "--short", cwd=root).strip()
    _edit(package.changelog, rf"(?m)^## {UNRELEASED}$", f"## {UNRELEASED}\n\n## {version}")
    package = Package(package.folder)
    for project in (root / "infra" / "release" / "downstream").glob("*/pyproject.toml"):
        _update_requirement(package, project)
    users = [user for user in packages(root).values() if _update_requirement(package, user.folder / "pyproject.toml")]
    for user in users:
        _add_change(user, f"- Needs `{name}` {package.version.major}.{package.version.minor}.")
    return [user.name for user in users]


def _add_change(package: Package, line: str) -> None:
    """Add a line to the group `### Changed` of the unreleased changes."""
    before, *sections = re.split(r"(?m)^(?=## )", package.changelog.read_text())
    unreleased = sections.pop(0) if sections and sections[0].startswith(f"## {UNRELEASED}\n") else f"## {UNRELEASED}\n"
    unreleased = unreleased.rstrip() + "\n\n"
    if "\n### Changed\n" in unreleased:
        unreleased = unreleased.replace("\n### Changed\n\n", f"\n### Changed\n\n{line}\n", 1)
    elif "\n### Fixed\n" in unreleased:
        unreleased = unreleased.replace("\n### Fixed\n", f"\n### Changed\n\n{line}\n\n### Fixed\n", 1)
    else:
        unreleased += f"### Changed\n\n{line}\n\n"
    package.changelog.write_text(before + unreleased + "".join(sections))


def _update_requirement(package: Package, project: Path) -> bool:
    """Set the range in which a pyproject.toml requires the package. Return whether the file changed."""
    requirement = rf'(?<="{package.name})(\[[\w,]+\])?[<>=\d.,]+(?=")'
    return _edit(project, requirement, rf"\g<1>{compatible_range(package.version)}", count=0)


def _edit(path: Path, pattern: str, replacement: str, count: int = 1) -> bool:
    before = path.read_text()
    after = re.sub(pattern, replacement, before, count=count)
    path.write_text(after)
    return after != before


def main(arguments: Sequence[str] | None = None) -> None:
    """Raise the version, update uv.lock, and print the next steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package")
    parser.add_argument("component", choices=COMPONENTS)
    options = parser.parse_args(arguments)
    users = bump(options.package, options.component)
    run("uv", "lock", cwd=ROOT)
    package = package_named(options.package)
    print(f"{package.name} is now {package.version}; commit this, then run infra/release/tag.py {package.name}")
    if users:
        print(f"these packages require the new range and need a release too: {', '.join(users)}")


if __name__ == "__main__":
    sys.exit(exit_code(main))
