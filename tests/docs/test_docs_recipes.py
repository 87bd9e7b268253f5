"""Recipes of docs/recipes: `rl plan` finds that they fit into 80 GB, and a dry run accepts them.

A directory with the `config.json` of the real model, and the tokenizer of a tiny one, takes the place of the model.
"""

import json
import re
from pathlib import Path

import pytest
import yaml

from rl_apps.cli.main import main
from rl_apps.programs.grpo import APP
from rl_apps.settings.command_line import setting
from rl_contracts.testing import make_tiny_model
from rl_monitor.run_directory import flatten

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).parents[2] / "docs" / "recipes"
CONFIGS = Path(__file__).with_name("model_configs")
FILES = sorted(RECIPES.glob("*.yaml"))
SERVER = """#!/bin/sh
echo '["3.12.0", {"vllm": "0.32.0"}, ""]'
"""
RESIDENT = ("parameters", "optimizer")
"""Memory that the trainer needs while the servers generate on the same GPU."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, hidden=32)


@pytest.fixture
def stand_ins(tokenizer, tmp_path):
    """Return a function that returns the settings of local files in place of model, data and server of a recipe."""
    python = tmp_path / "python"
    python.write_text(SERVER)
    python.chmod(0o755)
    example = {"question": "1 + 1?", "problem": "1 + 1?", "answer": "#### 2"}
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(f"{json.dumps(example)}\n" * 256)

    def settings(recipe):
        name = recipe["model"]["path"].removeprefix("Qwen/")
        (tokenizer / "config.json").write_text((CONFIGS / f"{name}.json").read_text())
        return [f"model.path={tokenizer}", f"data.path={tmp_path}", f"rollout.server.python={python}"]

    return settings


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_recipe_fits_into_the_planned_memory_of_its_page(file, stand_ins, capsys):
    recipe = yaml.safe_load(file.read_text())
    settings = [setting(key, str(value)) for key, value in flatten(recipe).items()]

    assert main(["plan", "grpo", *settings, *stand_ins(recipe), "--gpu", "H100", "--no-splits", "--json"]) == 0

    memory = json.loads(capsys.readouterr().out)["memory"]
    trainer, server = memory["trainer rank"], memory["server device"]
    resident = sum(trainer[name] for name in RESIDENT) if "|" in recipe["allocation"] else 0.0
    gibibytes = [sum(parts.values()) / 2**30 for parts in (trainer, server)]
    assert max(*gibibytes, gibibytes[1] + resident / 2**30) < 76  # of 80: 4 GiB for two CUDA contexts and fragments
    [row] = [line for line in (RECIPES / "README.md").read_text().splitlines() if f"]({file.name})" in line]
    assert re.findall(r"([\d.]+) GiB", row) == [f"{size:.0f}" for size in gibibytes]
    assert "planned, not measured" in row


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_recipe_is_accepted_by_a_dry_run_in_bfloat16(file, stand_ins, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nonexistent")  # no Slurm
    settings = [*stand_ins(yaml.safe_load(file.read_text())), f"run_dir={tmp_path / 'run'}", "total_steps=2"]

    assert main(["grpo", "--config", str(file), *settings, "--dry-run"]) == 0

    output = capsys.readouterr().out
    assert "Dtype: trainer bfloat16, servers bfloat16" in output
    assert "warning" not in output


def test_recipes_have_a_row_of_the_table_and_name_their_status():
    linked = re.findall(r"\]\((\S+\.yaml)\)", (RECIPES / "README.md").read_text())

    assert sorted(linked) == [file.name for file in FILES]
    assert all("not measured" in file.read_text() for file in FILES)
    assert all(APP.config((), file).model.dtype == "auto" for file in FILES)
