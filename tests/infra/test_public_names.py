"""READMEs list the public names, and infra/ci/public_api.py compares these names with the stored list."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = [
    "rl_datasets",
    "rl_engines_fsdp",
    "rl_engines_megatron",
    "rl_inference",
    "rl_launchers",
    "rl_rewards",
    "rl_trainers",
    "rl_workflows",
]


def test_readme_of_a_package_lists_its_exports() -> None:
    missing = [
        (package, name)
        for package in PACKAGES
        for name in importlib.import_module(package).__all__
        if f"`{name}" not in (ROOT / "packages" / package.replace("_", "-") / "README.md").read_text()
    ]

    assert not missing


def test_public_api_that_differs_from_the_stored_list_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "infra" / "ci")
    public_api = importlib.import_module("public_api")
    stored = public_api.LIST.read_text()
    changed = tmp_path / "public_api.txt"
    changed.write_text(stored.replace("rl_rewards.gold_number(answer", "rl_rewards.gold_number(gold"))
    monkeypatch.setattr(public_api, "LIST", changed)
    monkeypatch.setattr(sys, "argv", ["public_api.py"])

    assert public_api.main() == 1
    assert {line[:24] for line in capsys.readouterr().out.splitlines()} == {
        "-rl_rewards.gold_number(",
        "+rl_rewards.gold_number(",
    }
