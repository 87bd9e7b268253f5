"""Tag the current commit as a release of one package.

    uv run python infra/release/tag.py PACKAGE

Creates the annotated tag `PACKAGE-vVERSION` with the changelog of that version as its message, and pushes nothing.
Fails for uncommitted changes, a version that already has a tag, a changelog without this version or with unreleased
changes, and files that contradict each other.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from workspace import ROOT, UNRELEASED, ReleaseError, exit_code, find_problems, package_named, run


def tag(name: str, root: Path = ROOT) -> str:
    """Tag the current commit and return the tag.

    Raises:
        ReleaseError: a condition in the docstring of this module is not met. No tag was created.
    """
    package = package_named(name, root)
    if uncommitted := run("git", "status", "--porcelain", cwd=root):
        raise ReleaseError(f"the working tree has uncommitted changes; commit or stash them\n{uncommitted.rstrip()}")
    if run("git", "tag", "--list", package.tag, cwd=root):
        raise ReleaseError(f"the tag {package.tag} already exists; raise the version with bump.py")
    changes, unreleased = package.changes(str(package.version)), package.changes(UNRELEASED)
    if not changes:
        raise ReleaseError(f"{package.changelog}: no changes under '## {package.version}'; raise it with bump.py")
    if unreleased:
        raise ReleaseError(
            f"{package.changelog}: '## {UNRELEASED}' must be empty; raise the version with bump.py\n{unreleased}"
        )
    if problems := find_problems(package, root):
        raise ReleaseError("\n".join(problems))
    message = f"{name} {package.version}\n\n{changes}"
    run("git", "tag", "--annotate", "--cleanup=whitespace", "--message", message, package.tag, cwd=root)
    return package.tag


def main(arguments: Sequence[str] | None = None) -> None:
    """Tag, and print how to publish the tag."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package")
    name = tag(parser.parse_args(arguments).package)
    print(f"tagged; to publish the tag: git push origin {name}")


if __name__ == "__main__":
    sys.exit(exit_code(main))
