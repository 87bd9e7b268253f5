"""`rl metrics`: the documentation of metrics, as a command and as a page."""

import re
from pathlib import Path

import pytest

from rl_apps.cli.main import main
from rl_contracts.runtime.metric_docs import MEANINGS, meaning
from rl_monitor.metrics_command import page, table

ROOT = Path(__file__).parents[2]


def test_metrics_page_on_disk_is_up_to_date():
    page_on_disk = (ROOT / "docs" / "metrics.md").read_text()
    assert page_on_disk == page(), "out of date: uv run rl metrics --markdown > docs/metrics.md"


def test_metrics_all_have_unit_and_meaning():
    assert all(entry.unit and entry.text and entry.section for entry in MEANINGS.values())


@pytest.mark.parametrize(
    ("metric", "unit"),
    [
        ("grad_norm", "-"),
        ("groups/failed/reward", "groups"),
        ("critic/grad_norm", "as <name>"),
        ("eval/conversation/turns", "as <name>"),
    ],
)
def test_metrics_command_finds_metric_by_name(metric, unit, capsys):
    assert main(["metrics", metric]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.split()[0] == metric
    assert unit in first


@pytest.mark.parametrize("metric", ["eval/brief/words", "grad"])
def test_meaning_of_undocumented_metric_is_none(metric):
    assert meaning(metric) is None


def test_metrics_command_lists_prefix_and_suggests_names(capsys):
    assert {line.split()[0].partition("/")[0] for line in table("gap/").splitlines()} == {"gap"}
    assert main(["metrics", "grad_nrom"]) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert "Did you mean 'grad_norm'?" in message
    assert main(["metrics", "rewrd"]) == 2
    assert "Did you mean 'reward'?" in capsys.readouterr().err


def test_metrics_recorded_in_source_code_are_documented():
    """Cover all calls that record metrics and get the name as a string literal with a slash."""
    pattern = re.compile(r"""(?:record|metrics\.add)\(\s*"([a-z_]+/[a-z_0-9/]+)\"""")
    files = [*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("apps/src/**/*.py")]
    recorded_names = {name for file in files for name in pattern.findall(file.read_text())}
    # two names in docstrings, and a name that the run log removes before it writes the record
    examples = {"answer/boxed", "clip/far", "reward/square"}
    assert len(recorded_names) > 15
    assert [name for name in sorted(recorded_names - examples) if meaning(name) is None] == []
