"""Fail if docstrings, messages, pages or names of tests break the section "Language" of AGENTS.md.

    python infra/ci/lint_language.py

Checks in all tracked files: words of BANNED anywhere, docstrings whose first word is in OPENINGS, names of tests
over 70 characters, messages (errors, warnings, log lines, help) over 40 words, and Markdown table cells over 25 words.
Needs the standard library only.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

BANNED = (
    "told, anew, go on, goes on, going on, went on, whoever, somebody, anybody, nobody, everybody, mend, mends, "
    "mended, one's own, by itself, an only, what there is, became of, came of, says nothing, so many more, "
    "the night of, is no less, under way, of ours"
)
"""Vague, figurative or outdated words. A sentence should use a literal term or a name instead."""
OPENINGS = ("What", "Of", "That", "Those", "Whoever")
"""First words of sentences that continue the name above them instead of standing alone."""
TEST_NAME, MESSAGE_WORDS, CELL_WORDS = 70, 40, 25
TEXTS = (".py", ".md", ".toml", ".yaml", ".yml", ".sh", ".html", ".js", ".css")
EXEMPT = ("infra/ci/lint_language.py", "CHANGELOG.md")
LOGGED = {"debug", "info", "warning", "error", "exception", "critical", "log", "warn"}
# with a straight or a curly apostrophe
_BANNED = re.compile(
    r"\b(?:" + "|".join(map(re.escape, BANNED.split(", "))).replace("'", "['\u2019]") + r")\b", re.IGNORECASE
)
_OPENING = re.compile(rf"(?:{'|'.join(OPENINGS)})\b")


def main() -> int:
    """Print each finding; return 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2])
    root = parser.parse_args().root
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True)
    names = [name for name in listed.stdout.split("\0") if name.endswith(TEXTS) and not name.endswith(EXEMPT)]
    findings = [
        f"{name}:{line}: {problem}"
        for name in names
        if (root / name).is_file()
        for line, problem in sorted(check(name, (root / name).read_text()))
    ]
    for finding in findings:
        print(finding, file=sys.stderr)
    return 1 if findings else 0


def check(name: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the problem of each broken rule in a file called `name`."""
    for number, line in enumerate(text.splitlines(), 1):
        for match in _BANNED.finditer(line):
            yield number, f"banned word {match.group()!r}"
        if name.endswith(".md") and line.startswith("|"):
            for cell in line.strip().strip("|").split("|"):
                if (words := len(cell.split())) > CELL_WORDS:
                    yield number, f"table cell of {words} words, expected at most {CELL_WORDS}"
    if name.endswith(".py"):
        nodes = list(ast.walk(ast.parse(text)))
        yield from _docstrings(nodes)
        yield from _messages(nodes)
        yield from _test_names(nodes)


def _docstrings(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield docstrings that cannot stand alone: of modules, classes, functions, attributes and constants."""
    for node in nodes:
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text = statement.value.value
                if isinstance(text, str) and (match := _OPENING.match(text.lstrip())):
                    yield statement.lineno, f"docstring begins with {match.group()!r}"


def _messages(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield texts of raised errors, log calls and `help=` that are too long. A placeholder counts as one word."""
    for node in nodes:
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            texts = node.exc.args
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOGGED:
            texts = node.args[:1]
        elif isinstance(node, ast.keyword) and node.arg in ("help", "remedy"):
            texts = [node.value]
        else:
            continue
        for text in texts:
            if (words := len(_text(text).split())) > MESSAGE_WORDS:
                yield text.lineno, f"message of {words} words, expected at most {MESSAGE_WORDS}; move the rest to docs"


def _text(node: ast.expr) -> str:
    """Return the text of a string or an f-string with `X` for each placeholder, or nothing for other expressions."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value) if isinstance(value, ast.Constant) else "X" for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return ""


def _test_names(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield functions and methods `test_...` with a name that is too long."""
    for node in nodes:
        name = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else ""
        if name.startswith("test_") and len(name) > TEST_NAME:
            yield node.lineno, f"{name}: {len(name)} characters, expected at most {TEST_NAME}"


if __name__ == "__main__":
    sys.exit(main())
