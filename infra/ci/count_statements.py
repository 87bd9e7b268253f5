"""Print the number of statements and files of each package, as a table.

    python infra/ci/count_statements.py

Counts the statements of the syntax tree, so layout and comments do not change the number. Docstrings and the folders
`testing` and `conformance` do not count. Needs the standard library only.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from pathlib import Path

NOT_COUNTED = ("testing", "testing.py", "conformance")


def statements(source: str) -> int:
    """Return the number of statements in source code, including nested statements, without docstrings."""
    return sum(isinstance(node, ast.stmt) and not _is_docstring(node) for node in ast.walk(ast.parse(source)))


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def count(root: Path) -> tuple[Counter[str], Counter[str]]:
    """Return the statements and the files of each package under the root of the repository."""
    sizes: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for folder in [*sorted(root.glob("packages/*/src")), root / "apps" / "src"]:
        package = folder.parent.name
        for path in folder.rglob("*.py"):
            if not any(part in NOT_COUNTED for part in path.relative_to(folder).parts):
                sizes[package] += statements(path.read_text())
                files[package] += 1
    return sizes, files


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2])
    arguments = parser.parse_args()
    sizes, files = count(arguments.root)
    print(f"{'package':<22}{'files':>6}{'statements':>12}")
    for package, size in sorted(sizes.items()):
        print(f"{package:<22}{files[package]:>6}{size:>12}")
    print(f"{'total':<22}{files.total():>6}{sizes.total():>12}")


if __name__ == "__main__":
    main()
