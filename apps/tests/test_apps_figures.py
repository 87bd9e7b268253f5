"""What figures mean: the command, and the page that is made of the same list."""

import re
from pathlib import Path

import pytest

from rl_apps.cli.main import main
from rl_contracts.runtime.metric_docs import MEANINGS, meaning
from rl_monitor.metrics_command import page, table

ROOT = Path(__file__).parents[2]


def test_page_of_figures_is_that_of_the_list():
    written = (ROOT / "docs" / "figures.md").read_text()
    assert written == page(), "out of date: uv run rl figures --markdown > docs/figures.md"


def test_figures_all_have_a_unit_and_a_meaning():
    assert all(said.unit and said.text and said.section for said in MEANINGS.values())


@pytest.mark.parametrize(
    ("figure", "unit"),
    [
        ("grad_norm", "-"),
        ("groups/failed/reward", "groups"),
        ("groups/failed", "groups"),
        ("staleness/fraction_2", "fraction of tokens"),
        ("critic/grad_norm", "as <name>"),
        ("eval/conversation/turns", "as <name>"),
    ],
)
def test_figure_is_found_by_its_name(figure, unit, capsys):
    assert main(["figures", figure]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.split()[0] == figure
    assert unit in first


@pytest.mark.parametrize("figure", ["brief/words", "eval/brief/words", "critic/nothing", "grad"])
def test_figure_of_somebody_else_has_no_meaning_here(figure):
    assert meaning(figure) is None


def test_figures_by_the_beginning_of_their_names_and_unknown_ones(capsys):
    assert {line.split()[0].partition("/")[0] for line in table("gap/").splitlines()} == {"gap"}
    assert main(["figures", "grad_nrom"]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert "Did you mean 'grad_norm'?" in sentence
    assert main(["figures", "rewrd"]) == 2
    assert "Did you mean 'reward'?" in capsys.readouterr().err


def test_figures_that_the_sources_name_are_in_the_list():
    """Names with a slash that our code writes down as a whole, in a call that records them."""
    recorded = re.compile(r"""(?:record|figures\.add|found\.add)\(\s*"([a-z_]+/[a-z_0-9/]+)\"""")
    files = [*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("apps/src/**/*.py")]
    named = {name for file in files for name in recorded.findall(file.read_text())}
    examples = {"answer/boxed", "clip/far", "reward/square"}  # of docstrings; and one that never leaves its record
    assert len(named) > 15
    assert [name for name in sorted(named - examples) if meaning(name) is None] == []
