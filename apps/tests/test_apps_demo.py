"""`rl demo`: each injected fault is detected, and an undetected fault is reported."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rl_apps.cli import main
from rl_apps.cli.demo import DEMOS, demo

IN_CI = "broken-sync"

pytestmark = pytest.mark.timeout(900)


def test_demo_lists_names_and_rejects_unknown_name(capsys):
    assert main.main(["demo"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(DEMOS)
    assert main.main(["demo", "nothing-like-it"]) == 2
    assert "broken-sync" in capsys.readouterr().err


@pytest.mark.nightly
def test_demo_fault_is_detected_and_reported(capsys):
    assert demo(IN_CI) == 0
    output = capsys.readouterr().out
    assert ">>> now the server acknowledges new weights" in output
    assert "The fault was detected" in output
    assert "weights not received" in output


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in DEMOS if name != IN_CI])
def test_demo_every_fault_is_detected(name):
    assert demo(name) == 0


@pytest.mark.nightly
def test_demo_undetected_fault_is_reported(monkeypatch, capsys):
    monkeypatch.setitem(DEMOS, IN_CI, replace(DEMOS[IN_CI], fault=""))
    assert demo(IN_CI) == 1
    assert "NOT detected" in capsys.readouterr().out
