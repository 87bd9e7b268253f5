"""docs/failures.md names an existing test for each failure."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = 18
"""Kinds of failures in the table."""


def _tests(path):
    """Return the names of all functions and methods of a file."""
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_failure_in_the_table_names_existing_tests():
    text = (ROOT / "docs" / "failures.md").read_text()
    _, _, section = text.partition("## Which test shows it")
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| ")][1:]
    assert len(lines) == ROWS
    for line in lines:
        named = re.findall(r"`([\w/.-]+\.py)::(\w+)`", line)
        assert named, line
        assert [name for path, name in named if name not in _tests(path)] == [], line
