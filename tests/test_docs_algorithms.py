"""The example of docs/algorithms.md: its file and its entry point, installed and used by name."""

import re
import tomllib
from pathlib import Path

import pytest
import torch

from rl_apps.gsm8k_grpo import APP
from rl_contracts.config import OptimizerConfig
from rl_contracts.data import FinetuneSpec
from rl_contracts.errors import ConfigError
from rl_contracts.parallel import ParallelContext
from rl_contracts.sharding import share
from rl_contracts.testing import ReferenceTrainEngine, make_batch, make_tiny_model
from rl_trainers import PolicyActor
from rl_trainers.functional.terms import policy_terms
from rl_trainers.objective import load_policy_loss

ROOT = Path(__file__).parents[1]
DOCS = (ROOT / "docs" / "algorithms.md").read_text()


def _block(language):
    return re.search(rf"```{language}\n(.*?)```", DOCS, re.DOTALL).group(1)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A distribution that has the example's file and registers its entry point."""
    (tmp_path / "my_losses.py").write_text(_block("python"))
    points = tomllib.loads(_block("toml"))["project"]["entry-points"]
    lines = [
        line for group, names in points.items() for line in (f"[{group}]", *(f"{n} = {v}" for n, v in names.items()))
    ]
    metadata = tmp_path / "my_losses-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-losses\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)


def _config(*overrides):
    return APP.config(["algorithm.policy_loss=tempered", *overrides]).algorithm


def test_example_loss_is_found_by_name_and_trains(installed, tmp_path):
    engine = ReferenceTrainEngine()
    engine.initialize(
        FinetuneSpec(
            str(make_tiny_model(tmp_path / "model", layers=1, hidden=32)), 1, optimizer=OptimizerConfig(lr=1e-3)
        )
    )
    actor = PolicyActor(engine, _config("algorithm.options.power=0.8"))
    batch = share(make_batch(8).exclude("advantages"), ParallelContext())
    actor.prepare(batch)
    stats = actor.update(batch)
    assert stats["applied"] == 1.0
    assert stats["grad_norm"] > 0
    assert stats["clip/high"] == 0.0
    engine.destroy()


def test_example_loss_is_its_formula(installed):
    old, trained = torch.zeros(2), torch.ones(2, dtype=torch.bool)
    terms = policy_terms(torch.tensor([0.1, 0.5]), old, torch.tensor([1.0, -2.0]), trained)
    losses, marks = load_policy_loss(_config("algorithm.options.power=0.8"))(terms)
    ratio = torch.tensor([0.1, 0.5]).exp().clamp(max=1.28)
    torch.testing.assert_close(losses, -(ratio**0.8) / 0.8 * torch.tensor([1.0, -2.0]))
    assert marks["clip/high"].tolist() == [False, True]


def test_example_loss_misspelt_constant_is_refused(installed):
    with pytest.raises(ConfigError, match=r"\['powr'\] are no constants of algorithm.policy_loss=tempered"):
        load_policy_loss(_config("algorithm.options.powr=0.8"))


def test_docs_name_every_preset_and_only_those():
    presets = {path.stem for path in (ROOT / "apps/src/rl_apps/conf/algorithm").glob("*.yaml")}
    named = set(re.findall(r"^\| `(\w+)`", DOCS, re.MULTILINE))
    assert named == presets
