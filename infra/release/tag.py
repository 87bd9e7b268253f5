"""Tag this commit as a release of one package.

    uv run python infra/release/tag.py PACKAGE

Makes the annotated tag `PACKAGE-vVERSION` with the changelog of that version as its message, and pushes nothing.
Refused are a tree with changes, a version that is tagged already, a changelog without it or with changes that it leaves
out, and files that contradict each other.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from workspace import ROOT, UNRELEASED, ReleaseError, ended, faults, package_named, run


def tag(name: str, root: Path = ROOT) -> str:
    """Tag the commit that is checked out.

    Returns:
        the tag.

    Raises:
        ReleaseError: something of the above; nothing was tagged.
    """
    package = package_named(name, root)
    if changed := run("git", "status", "--porcelain", cwd=root):
        raise ReleaseError(f"expected a tree without changes, found\n{changed.rstrip()}\ncommit or stash them")
    if run("git", "tag", "--list", package.tag, cwd=root):
        raise ReleaseError(f"{package.tag}: expected a version without a tag, found one; raise it with bump.py")
    changes, left_out = package.changes(str(package.version)), package.changes(UNRELEASED)
    if not changes:
        raise ReleaseError(f"{package.changelog}: expected changes under '## {package.version}', found none")
    if left_out:
        raise ReleaseError(
            f"{package.changelog}: expected nothing under '## {UNRELEASED}', found\n{left_out}\n"
            f"raise the version with bump.py"
        )
    if found := faults(package, root):
        raise ReleaseError("\n".join(found))
    message = f"{name} {package.version}\n\n{changes}"
    run("git", "tag", "--annotate", "--cleanup=whitespace", "--message", message, package.tag, cwd=root)
    return package.tag


def main(words: Sequence[str] | None = None) -> None:
    """Tag, and say what is left to do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package")
    made = tag(parser.parse_args(words).package)
    print(f"tagged; to publish the tag: git push origin {made}")


if __name__ == "__main__":
    sys.exit(ended(main))
