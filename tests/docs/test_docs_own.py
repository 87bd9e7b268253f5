"""Run the programs of docs/own-app.md and docs/own-loop.md with the commands on these pages."""

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rl_contracts.testing.models import make_tiny_model

DOCS = Path(__file__).parents[2] / "docs"
OWN_APP, OWN_LOOP = (DOCS / "own-app.md").read_text(), (DOCS / "own-loop.md").read_text()


def _block(page, language):
    return re.search(rf"```{language}\n(.*?)```", page, re.DOTALL).group(1)


def _commands(page):
    return re.findall(r"^\$ (.*)$", _block(page, "console"), re.MULTILINE)


def _run(folder, command):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        command.split(), cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _steps(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def own_app(tmp_path):
    (tmp_path / "my_app.py").write_text(_block(OWN_APP, "python"))
    return tmp_path


@pytest.mark.slow
def test_own_app_explain_and_dry_run_print_its_settings(own_app):
    explain, plan, _ = _commands(OWN_APP)

    assert re.search(r"^  words=5 +Number of words of each answer to learn", _run(own_app, explain), re.MULTILINE)
    assert "  3 words of each answer" in _run(own_app, plan)


def test_own_app_is_found_by_its_entry_point(own_app):
    entry_points = tomllib.loads(_block(OWN_APP, "toml"))["project"]["entry-points"]["rl.apps"]
    metadata = own_app / "my_app-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-app\nVersion: 1.0\n")
    lines = ["[rl.apps]", *(f"{name} = {value}" for name, value in entry_points.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    (command,) = re.findall(r"\(`(rl run first-words)`\)", OWN_APP)

    assert _run(own_app, f"{command} --help").startswith("usage: first-words ")


@pytest.mark.nightly  # test_apps_custom_app.py runs a similar app for each commit
def test_own_app_runs_20_steps_and_lowers_the_loss(own_app):
    *_, train = _commands(OWN_APP)

    assert "Training loss: " in _run(own_app, train)

    (run_dir,) = (own_app / "runs" / "rl").iterdir()
    records = _steps(run_dir)
    assert [record["step"] for record in records] == [*range(1, 21)]
    assert records[-1]["loss/train"] < records[0]["loss/train"]


def test_public_names_on_the_page_exist_and_cover_the_app():
    table = dict(re.findall(r"^\| `(rl_(?:apps|monitor)\.[\w.]+)` \| (.*) \|$", OWN_APP, re.MULTILINE))
    for module, cell in table.items():
        names = re.findall(r"`(\w+)`", cell)
        assert names, module
        assert all(hasattr(importlib.import_module(module), name) for name in names), module
    used = re.findall(r"^from (rl_(?:apps|monitor)\.[\w.]+) import", _block(OWN_APP, "python"), re.MULTILINE)
    assert used
    assert set(used) <= set(table)


@pytest.mark.slow
def test_own_loop_publishes_three_versions_and_saves(tmp_path):
    (tmp_path / "own_loop.py").write_text(_block(OWN_LOOP, "python"))
    make_tiny_model(tmp_path / "MODEL", layers=1, hidden=32)
    (command,) = _commands(OWN_LOOP)

    _run(tmp_path, command)

    records = _steps(tmp_path / "RUN")
    assert [record["version"] for record in records] == [1, 2, 3]
    assert max(record["gap/max_abs"] for record in records) < 1e-5
    assert (tmp_path / "RUN" / "checkpoints" / "step_3" / "model.safetensors").exists()
