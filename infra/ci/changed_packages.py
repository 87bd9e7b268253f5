"""Print the packages that a change can affect, as a JSON list for a job matrix.

    python3 infra/ci/changed_packages.py BASE

A change in a package's folder affects that package. A change in rl-contracts, in the lock file, or in the scripts and
workflows of CI affects all packages. If git does not know BASE, as on the first push of a branch, all packages are
printed. Needs git and the standard library only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOR_ALL = ("packages/rl-contracts/", "uv.lock", "pyproject.toml", "conftest.py", "infra/ci/", ".github/")
"""Path prefixes that affect every package."""


def affected(paths: Iterable[str], folders: dict[str, str]) -> list[str]:
    """Return the names of the packages that a change of these paths affects.

    Args:
        paths: Changed files, relative to the repository.
        folders: Folder of each package, by package name.
    """
    paths = list(paths)
    if any(path.startswith(FOR_ALL) for path in paths):
        return sorted(folders)
    return sorted(name for name, folder in folders.items() if any(path.startswith(f"{folder}/") for path in paths))


def main() -> None:
    """Print the list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="commit or branch to compare with")
    base = parser.parse_args().base
    folders = {path.name: f"packages/{path.name}" for path in ROOT.glob("packages/*") if path.is_dir()}
    folders["rl-apps"] = "apps"
    command = ["git", "diff", "--name-only", f"{base}...HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(json.dumps(sorted(folders) if done.returncode else affected(done.stdout.split("\n"), folders)))


if __name__ == "__main__":
    main()
