"""The size of packages and apps in statements, and whether the whole stays under its ceiling.

    python infra/ci/count_statements.py

Counts syntax-tree statements, so that neither gluing lines together nor documentation changes the figure. Docstrings,
`testing` and `conformance` are not counted. Raise the ceiling when something new is worth its size, in a commit that
says so; lower it when something went. Needs the standard library only.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from pathlib import Path

CEILING = 30_094
"""Statements of all packages and apps together, at most."""
NOT_COUNTED = ("testing", "testing.py", "conformance")


def statements(source: str) -> int:
    """Statements of a file's text, those inside others counted too, docstrings not."""
    return sum(isinstance(node, ast.stmt) and not _is_docstring(node) for node in ast.walk(ast.parse(source)))


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def count(root: Path) -> tuple[Counter[str], Counter[str]]:
    """Statements and files of each package under the repository's root."""
    sizes: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for folder in [*sorted(root.glob("packages/*/src")), root / "apps" / "src"]:
        package = folder.parent.name
        for path in folder.rglob("*.py"):
            if not any(part in NOT_COUNTED for part in path.relative_to(folder).parts):
                sizes[package] += statements(path.read_text())
                files[package] += 1
    return sizes, files


def main() -> int:
    """Print the table; 1 if the total is above its ceiling."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2])
    parser.add_argument("--ceiling", type=int, default=CEILING)
    arguments = parser.parse_args()
    sizes, files = count(arguments.root)
    print(f"{'package':<22}{'files':>6}{'statements':>12}")
    for package, size in sorted(sizes.items()):
        print(f"{package:<22}{files[package]:>6}{size:>12}")
    print(f"{'total':<22}{files.total():>6}{sizes.total():>12}   (at most {arguments.ceiling})")
    if sizes.total() > arguments.ceiling:
        surplus = sizes.total() - arguments.ceiling
        print(f"{surplus} statements too many: simplify, or raise CEILING in {__file__} and say why", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
