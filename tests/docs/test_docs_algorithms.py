"""Install the example of docs/algorithms.md and use its components by name."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from rl_apps.programs.gsm8k_grpo import APP
from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.batch.redistribution import shard_batch
from rl_contracts.batch.trajectory import pack
from rl_contracts.config import OptimizerConfig
from rl_contracts.data import FinetuneSpec
from rl_contracts.registry import load_component
from rl_contracts.testing import ReferenceTrainEngine, make_batch, make_tiny_model
from rl_trainers import PolicyActor
from rl_trainers.algorithms.credit import assign_credit
from rl_trainers.algorithms.functional.correction import OffPolicy
from rl_trainers.algorithms.functional.policy_terms import policy_terms

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "algorithms.md").read_text()


def _block(language):
    return re.search(rf"```{language}\n(.*?)```", DOCS, re.DOTALL).group(1)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Add a distribution with the example's module and entry points to `sys.path`."""
    (tmp_path / "my_components.py").write_text(_block("python"))
    entry_points = tomllib.loads(_block("toml"))["project"]["entry-points"]
    lines = [
        line
        for group, names in entry_points.items()
        for line in (f"[{group}]", *(f"{n} = {v}" for n, v in names.items()))
    ]
    metadata = tmp_path / "my_components-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-components\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_components", raising=False)  # imported by another test


def _config(*overrides):
    return APP.config(list(overrides)).algorithm


COMPONENTS = ("algorithm.loss.kind=tempered", "algorithm.correction.kind=smooth", "algorithm.mask.kind=drifted")


@pytest.mark.parametrize(
    "overrides",
    [
        (*COMPONENTS, "algorithm.advantage.kind=only_right", "algorithm.loss.options.power=0.8"),
        (
            "algorithm.loss.kind=my_components:tempered_loss",
            "algorithm.mask.kind=my_components:drifted_sequences+second_moment",
            "algorithm.mask.options.bound=20",
        ),
    ],
)
def test_example_components_are_loaded_and_train(installed, tmp_path, overrides):
    engine = ReferenceTrainEngine()
    model = make_tiny_model(tmp_path / "model", layers=1, hidden=32)
    engine.initialize(FinetuneSpec(str(model), 1, optimizer=OptimizerConfig(lr=1e-3)))
    actor = PolicyActor(engine, _config(*overrides))
    batch = shard_batch(make_batch(12).exclude("advantages"), ParallelContext())
    batch["rewards"][:4] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    actor.prepare(batch)
    stats = actor.update(batch)
    assert stats["applied"] == 1.0
    assert stats["grad_norm"] > 0
    assert stats["clip/high"] == 0.0
    assert stats["correction/masked"] >= 0.0
    engine.destroy()


def test_example_components_match_their_formulas(installed):
    old, trained = torch.zeros(2), torch.ones(2, dtype=torch.bool)
    terms = policy_terms(torch.tensor([0.1, 0.5]), old, torch.tensor([1.0, -2.0]), trained)
    losses, marks = load_component(_config(*COMPONENTS, "algorithm.loss.options.power=0.8").loss)(terms)
    ratio = torch.tensor([0.1, 0.5]).exp().clamp(max=1.28)
    torch.testing.assert_close(losses, -(ratio**0.8) / 0.8 * torch.tensor([1.0, -2.0]))
    assert marks["clip/high"].tolist() == [False, True]

    batch = make_batch(2, lengths=(3, 3))
    batch["loss_mask"] = torch.ones(2, 3, dtype=torch.bool)
    batch["advantages"] = torch.tensor([[-1.0] * 3, [1.0] * 3])
    packed, algorithm = pack(batch), _config(*COMPONENTS)
    off = OffPolicy(torch.tensor([0.0, 1.0, 2.0] * 2), packed["loss_mask"], packed)
    weights, marks = load_component(algorithm.correction)(off)
    torch.testing.assert_close(weights, 2 * (off.log_ratio.exp() / 2).tanh())
    assert marks["correction/capped"].tolist() == [False, True, True] * 2
    assert load_component(algorithm.mask)(off).tolist() == [True] * 3 + [False] * 3

    batch = make_batch(8, lengths=(4, 4)).exclude("advantages")
    batch["loss_mask"][:] = True
    batch["rewards"] = torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 0])
    assign_credit(batch, _config("algorithm.advantage.kind=only_right"), ParallelContext())
    assert batch["advantages"][:, 0].tolist() == [1.0] + [0.0] * 7


def test_docs_list_exactly_the_presets():
    presets = {path.stem for path in (ROOT / "apps/src/rl_apps/conf/algorithm").glob("*.yaml")}
    named = set(re.findall(r"^\| `(\w+)`", DOCS, re.MULTILINE))
    assert named == presets
