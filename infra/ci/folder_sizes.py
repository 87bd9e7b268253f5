"""Fail if a source folder has too many Python files.

    python infra/ci/folder_sizes.py

Counts the files of each folder under packages/*/src and apps/src, without `__init__.py`. Needs the standard library
only.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

LIMIT = 14
"""Maximum number of Python files in a folder."""


def main() -> int:
    """Print each folder above the limit; return 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2])
    root = parser.parse_args().root
    files = [path for pattern in ("packages/*/src/**/*.py", "apps/src/**/*.py") for path in root.glob(pattern)]
    sizes = Counter(path.parent.relative_to(root) for path in files if path.name != "__init__.py")
    crowded = {folder: size for folder, size in sorted(sizes.items()) if size > LIMIT}
    for folder, size in crowded.items():
        print(
            f"{folder}: {size} Python files, expected at most {LIMIT}; move related files to a subfolder",
            file=sys.stderr,
        )
    return 1 if crowded else 0


if __name__ == "__main__":
    sys.exit(main())
