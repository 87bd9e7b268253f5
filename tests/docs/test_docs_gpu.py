"""The page about what needs a GPU names every test with that mark, and no other."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("tests", "packages/*/tests", "apps/tests")


def _marked():
    """`path::test` of every test, or class of tests, with the mark, also where only some of its cases have it."""
    for folder in FOLDERS:
        for path in ROOT.glob(f"{folder}/**/test_*.py"):
            text = path.read_text()
            for place in re.finditer(r"pytest\.mark\.gpu\b", text):
                test = re.search(r"(?:def|class) ([tT]est_?\w+)", text[place.end() :])
                if test is not None:
                    yield f"{path.relative_to(ROOT)}::{test[1]}"


def test_page_names_every_test_that_needs_a_gpu():
    page = (ROOT / "docs" / "howto" / "gpu.md").read_text()

    assert set(re.findall(r"`([\w./-]+\.py::[tT]est_?\w+)`", page)) == set(_marked())
