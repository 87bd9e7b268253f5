"""`rl demo`: what is broken on purpose is seen by its guard, and a guard that sees nothing is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rl_apps.cli import main
from rl_apps.cli.demo import DEMOS, demo

IN_CI = "broken-sync"

pytestmark = pytest.mark.timeout(900)


def test_demonstrations_are_listed_and_another_is_refused(capsys):
    assert main.main(["demo"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(DEMOS)
    assert main.main(["demo", "nothing-like-it"]) == 2
    assert "broken-sync" in capsys.readouterr().err


@pytest.mark.nightly
def test_fault_is_seen_by_its_guard_and_told(capsys):
    assert demo(IN_CI) == 0
    said = capsys.readouterr().out
    assert ">>> now the server acknowledges new weights" in said
    assert "The guard saw it" in said
    assert "weights not received" in said


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in DEMOS if name != IN_CI])
def test_every_fault_is_seen_by_its_guard(name):
    assert demo(name) == 0


@pytest.mark.nightly
def test_guard_that_sees_nothing_is_told(monkeypatch, capsys):
    monkeypatch.setitem(DEMOS, IN_CI, replace(DEMOS[IN_CI], fault=""))
    assert demo(IN_CI) == 1
    assert "did NOT see it" in capsys.readouterr().out
