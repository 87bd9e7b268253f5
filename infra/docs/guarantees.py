"""Page docs/guarantees.md: the promises of the project, each with the test that proves it, from `guarantee` markers.

The test files are parsed, not imported. `reference.py` writes the page.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
AREAS = {
    "staleness": "Versions and staleness",
    "prompts": "Prompts and groups",
    "layout": "Independence of micro-batches and ranks",
    "weights": "Weight updates",
    "gap": "Log-prob gap",
    "failures": "Failures and recovery",
    "algorithms": "Algorithms and learning",
    "boundaries": "Security and packages",
}
"""Heading of each value of the argument `area` of a marker."""
TIERS = {"nightly": "nightly", "slow": "CI"}
"""Tier of a test with a mark, the latest tier first."""
TITLE = """# Guarantees

This page lists promises of the project, each with the test that proves it. The tier shows when the test runs: *quick*
with `uv run pytest`, *CI* for every commit, and *nightly* in the nightly run ([tests](contributing.md#tests)). A test
may have further cases in later tiers.

The first command runs one test, of any tier. The second runs all tests of this page, except those of the nightly tier:

```console
$ uv run pytest --nightly tests/end_to_end/test_losses_against_trl.py::test_loss_value_and_gradient_match_trl
$ uv run pytest --all -m guarantee
```"""


def guarantees_page(command: str) -> str:
    """Return docs/guarantees.md; `command` writes the page."""
    rows = sorted(row for folder in ("apps", "packages", "tests") for row in _rows(ROOT / folder))
    if unknown := {area for *_, area in rows} - set(AREAS):
        raise ValueError(f"guarantee markers have unknown areas {sorted(unknown)}; choose from {list(AREAS)}")
    parts = [TITLE, f"`{command}` writes this page from the `guarantee` markers of the tests."]
    for area, heading in AREAS.items():
        lines = [f"| {promise} | `{test}` | {tier} |" for test, promise, tier, its_area in rows if its_area == area]
        parts += [f"## {heading}", "\n".join(["| promise | test | tier |", "|---|---|---|", *lines])]
    return "\n\n".join(parts) + "\n"


def _rows(folder: Path) -> Iterator[tuple[str, str, str, str]]:
    """Yield test, promise, tier and area of each marker in the test files of a folder."""
    for path in folder.rglob("test_*.py"):
        if not (expected := path.read_text().count("@pytest.mark.guarantee(")):
            continue
        body = ast.parse(path.read_text()).body
        pytestmark = [
            node for node in body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node.targets[0])
        ]
        marks_of_file = {ast.unparse(part) for node in pytestmark for part in ast.walk(node.value)}
        for node in (node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            marks = marks_of_file | {ast.unparse(mark) for mark in node.decorator_list}
            tier = next((tier for mark, tier in TIERS.items() if f"pytest.mark.{mark}" in marks), "quick")
            for call in node.decorator_list:
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.guarantee":
                    promise, area = (ast.literal_eval(value) for value in (call.args[0], call.keywords[0].value))
                    yield f"{path.relative_to(ROOT).as_posix()}::{node.name}", promise, tier, area
                    expected -= 1
        if expected:
            raise ValueError(
                f"{path}: {expected} guarantee markers are not on functions of the module; move them there"
            )
