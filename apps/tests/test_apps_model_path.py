"""Models by hub id: the command resolves them to directories, which all later code uses."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants
from omegaconf import OmegaConf

from rl_apps.cli.driver import main
from rl_apps.embedded.prepare import EmbeddedRecipe, prepare_embedded
from rl_apps.programs.gsm8k_grpo import APP
from rl_apps.settings.model import find_models
from rl_contracts.errors import ModelError

BIN = Path(sys.executable).parent
FEW = ("recipe=embedded", "total_steps=1", "data.batch_size=4", "evaluation.examples=0")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Hub cache that contains `me/tiny`, without a network."""
    cache = tmp_path / "hub"
    repository = cache / "models--me--tiny"
    shutil.copytree(prepare_embedded(1, EmbeddedRecipe(warm_up=None)), repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return cache


@pytest.mark.nightly
def test_hub_id_in_the_cache_trains_and_saves(hub, tmp_path):
    run_dir = tmp_path / "run"
    command = [str(BIN / "gsm8k-grpo"), "model.path=me/tiny", f"run_dir={run_dir}", *FEW]
    environment = os.environ | {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1"}

    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    assert done.returncode == 0, done.stdout + done.stderr
    config = OmegaConf.load(run_dir / "config.yaml")
    assert config.model.path == "me/tiny"
    assert config.model.directories == {"me/tiny": str(hub / "models--me--tiny" / "snapshots" / ("a" * 40))}
    assert (run_dir / "checkpoints" / "step_1" / "tokenizer.json").exists()


def test_unknown_hub_id_is_rejected_before_start(hub, tmp_path, capsys):
    assert main("gsm8k-grpo", ["model.path=me/other", f"run_dir={tmp_path / 'run'}"]) == 2

    err = capsys.readouterr().err
    assert "model.path=me/other: expected a directory" in err
    assert str(hub) in err
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


def test_incomplete_model_in_the_cache_is_rejected(hub):
    (hub / "models--me--tiny" / "snapshots" / ("a" * 40) / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model.path .*: expected weights"):
        find_models({"model.path": "me/tiny"})


def test_dry_run_downloads_nothing(hub, capsys):
    assert main("gsm8k-grpo", ["--dry-run", "model.path=me/other"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert "Model: me/other, recipe pretrained" in lines
    assert lines[-1].startswith("warning: model.path=me/other is no directory and not in the hub's cache")


def test_reference_and_critic_are_resolved_if_needed(hub, tmp_path):
    paths = ("ref.path=me/tiny", "critic.path=me/tiny", "actor.dtype=float32")
    config = APP.config([*paths, "algorithm=ppo", "algorithm.kl.coef=0.1", "algorithm.kl.place=loss"])
    config.model.directories = find_models(config.model_paths())
    directory = str(hub / "models--me--tiny" / "snapshots" / ("a" * 40))

    assert config.reference_spec().model_path == config.critic_spec().model_path == directory
    assert APP.config([]).model_paths() == {"model.path": "embedded"}


def test_relative_directory_becomes_absolute(hub, monkeypatch):
    monkeypatch.chdir(hub / "models--me--tiny" / "snapshots")
    assert find_models({"model.path": "a" * 40}) == {"a" * 40: str(Path("a" * 40).absolute())}
