"""Warnings about settings that work but probably give poor results."""

import json
from pathlib import Path

import pytest

from rl_apps.cli.driver import main
from rl_apps.preflight.warnings import warnings_for
from rl_apps.programs import grpo, gsm8k_grpo, sft
from rl_apps.run.app import Run
from rl_apps.settings.device_layout import layout_of

LORA = ("actor.engine.lora.rank=8", "model.path=somewhere/model")


def _warnings(app, *settings):
    """Return the settings that the warnings name."""
    config = app.config(settings)
    config.model.directories = {config.model.path: "/nonexistent"}
    run = Run(config, layout_of(config.allocation, app.servers), Path("run"), "cpu")
    warnings = warnings_for(run, app.form)
    assert all(warning.startswith("warning: ") for warning in warnings)
    return [warning.split()[1] for warning in warnings]


@pytest.fixture
def examples(tmp_path):
    """Settings of a data set with four examples."""
    (tmp_path / "train.jsonl").write_text(4 * (json.dumps({"messages": "1 + 1?", "answer": "2"}) + "\n"))
    return f"data.path={tmp_path}", "evaluation.examples=0", "data.batch_size=4"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["actor.optimizer.lr=0.011"], ["actor.optimizer.lr=0.011"]),
        (["actor.optimizer.lr=0.01"], []),
        (["actor.optimizer.lr=0.1", "actor.optimizer.name=sgd"], []),
        ([*LORA], ["actor.optimizer.lr=1e-06"]),
        ([*LORA, "actor.optimizer.lr=1e-5"], []),
        (["rollout.generation.max_new_tokens=2048"], ["rollout.generation.max_new_tokens=2048"]),
    ],
)
def test_setting_outside_its_usual_range_has_a_warning(settings, expected):
    assert _warnings(gsm8k_grpo.APP, *settings) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["total_steps=20"], []),
        (["total_steps=21"], ["total_steps=21"]),
        (["total_steps=21", "total_epochs=30"], []),
    ],
)
def test_more_than_20_passes_over_the_data_have_a_warning(examples, settings, expected):
    for app in (grpo.APP, sft.APP):
        assert _warnings(app, "model.path=embedded", *examples, *settings) == expected


def test_dry_run_prints_warnings_last_and_no_settings(capsys):
    assert main("gsm8k-grpo", ["--dry-run", "actor.optimizer.lr=5", "rollout.generation.max_new_tokens=4096"]) == 0

    lines = capsys.readouterr().out.splitlines()
    is_warning = [line.startswith("warning: ") for line in lines]
    assert is_warning == [False] * (len(lines) - 2) + [True] * 2
    assert not [line for line in lines if line.startswith(("seed:", "rollout:"))]
