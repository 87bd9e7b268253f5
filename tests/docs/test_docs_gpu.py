"""docs/howto/gpu.md lists exactly the tests with the mark `gpu` or `multi_gpu`."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("tests", "packages/*/tests", "apps/tests")


def _marked():
    """Yield `path::test` for each test or test class that has a mark on some or all of its cases."""
    for folder in FOLDERS:
        for path in ROOT.glob(f"{folder}/**/test_*.py"):
            text = path.read_text()
            for mark in re.finditer(r"pytest\.mark\.(?:multi_)?gpu\b", text):
                test = re.search(r"(?:def|class) ([tT]est_?\w+)", text[mark.end() :])
                if test is not None:
                    yield f"{path.relative_to(ROOT)}::{test[1]}"


def test_page_names_every_test_that_needs_a_gpu():
    page = (ROOT / "docs" / "howto" / "gpu.md").read_text()

    assert set(re.findall(r"`([\w./-]+\.py::[tT]est_?\w+)`", page)) == set(_marked())
