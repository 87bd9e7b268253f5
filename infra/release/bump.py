"""Raise the version of one package, in everything that names it.

    uv run python infra/release/bump.py PACKAGE (major | minor | patch)

That is its pyproject.toml, the heading of its unreleased changes, the range in which other packages
and the projects in `downstream/` ask for it, with a line in the changelog of each package whose range changed, and
uv.lock. Commits nothing.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from workspace import ROOT, UNRELEASED, Package, ReleaseError, compatible, ended, package_named, packages, run

PARTS = ("major", "minor", "patch")


def bump(name: str, part: str, root: Path = ROOT) -> list[str]:
    """Raise the version; uv.lock is left as it is.

    Returns:
        the packages that ask for another range now, and so have an unreleased change.

    Raises:
        ReleaseError: the package has no unreleased changes.
    """
    package = package_named(name, root)
    if not package.changes(UNRELEASED):
        raise ReleaseError(f"{package.changelog}: expected changes under '## {UNRELEASED}', found none to release")
    version = run("uv", "version", "--package", name, "--bump", part, "--frozen", "--short", cwd=root).strip()
    _edit(package.changelog, rf"(?m)^## {UNRELEASED}$", f"## {UNRELEASED}\n\n## {version}")
    package = Package(package.folder)
    for project in (root / "infra" / "release" / "downstream").glob("*/pyproject.toml"):
        _ask_for(package, project)
    users = [user for user in packages(root).values() if _ask_for(package, user.folder / "pyproject.toml")]
    for user in users:
        _add_change(user, f"- Needs `{name}` {package.version.major}.{package.version.minor}.")
    return [user.name for user in users]


def _add_change(package: Package, change: str) -> None:
    """Put a line on top of a package's unreleased changes."""
    if package.changes(UNRELEASED):
        _edit(package.changelog, rf"(?m)^## {UNRELEASED}\n+", rf"\g<0>{change}\n")
    else:
        _edit(package.changelog, rf"(?m)^## {UNRELEASED}\n+", "")
        _edit(package.changelog, r"(?m)^## ", rf"## {UNRELEASED}\n\n{change}\n\n\g<0>")


def _ask_for(package: Package, project: Path) -> bool:
    """Let a project ask for the version that the package has now; whether that changed anything."""
    asked = rf'(?<="{package.name})(\[[\w,]+\])?[<>=\d.,]+(?=")'
    return _edit(project, asked, rf"\g<1>{compatible(package.version)}", count=0)


def _edit(path: Path, pattern: str, replacement: str, count: int = 1) -> bool:
    before = path.read_text()
    after = re.sub(pattern, replacement, before, count=count)
    path.write_text(after)
    return after != before


def main(words: Sequence[str] | None = None) -> None:
    """Raise the version, lock, and say what is left to do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package")
    parser.add_argument("part", choices=PARTS)
    asked = parser.parse_args(words)
    users = bump(asked.package, asked.part)
    run("uv", "lock", cwd=ROOT)
    package = package_named(asked.package)
    print(f"{package.name} is {package.version}: commit this, then infra/release/tag.py {package.name}")
    if users:
        print(f"these ask for it in another range and want a release too: {', '.join(users)}")


if __name__ == "__main__":
    sys.exit(ended(main))
