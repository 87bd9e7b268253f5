"""Every preset improves the reward of the embedded task in thirty steps, with real servers and a real trainer."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

from rl_contracts.testing.models import make_tiny_model

STEPS = 30
SETTINGS = (
    "recipe=embedded",
    "seed=1",
    f"total_steps={STEPS}",
    "evaluation.examples=0",
    "data.options.levels=1",
    "data.batch_size=16",
    "rollout.group_size=16",
    "actor.minibatches=4",
    "actor.optimizer.lr=2e-4",
    "actor.optimizer.warmup_steps=10",
)
"""Short problems, large groups and several minibatches, so that thirty steps raise the reward measurably."""
PRESETS = (
    "dapo",
    "gspo",
    "reinforce_pp_baseline",
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_pp",
    "ppo",
    "cispo",
    "sapo",
    "m2po",
    "lite_ppo",
    "maxrl",
    "gdpo",
    "decoupled",
    "tis",
    "icepop",
    "sequence_mask",
    "geometric_mask",
)

OTHER_SETTINGS = {
    "ppo": ["critic.lr=1e-3"],
    "m2po": ["actor.optimizer.lr=4e-4"],
    "gdpo": [f"rollout.reward={Path(__file__).parents[1] / 'support' / 'composite_reward.py'}:correct_and_short"],
}


def _run(name, directory, metric, *settings):
    """Run a preset and return a metric of each step."""
    command = [str(Path(sys.executable).parent / "gsm8k-grpo"), f"algorithm={name}", f"run_dir={directory}", *settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [record[metric] for record in records if metric in record]


@pytest.fixture
def improves(record_property, tmp_path):
    def check(name, *settings):
        rewards = _run(name, tmp_path / "run", "reward/mean", *settings)
        assert len(rewards) == STEPS
        first, last = mean(rewards[:5]), mean(rewards[-5:])
        record_property("mean reward, first and last five steps", f"{first:.3f}, {last:.3f}")
        assert last >= first + 0.05, (
            f"{name}: mean reward {first:.3f} in the first and {last:.3f} in the last five steps"
        )

    return check


@pytest.mark.nightly
@pytest.mark.parametrize("name", PRESETS)
def test_preset_improves_the_reward(name, improves):
    improves(name, *SETTINGS, *OTHER_SETTINGS.get(name, ()))


@pytest.mark.nightly
def test_preset_reinforce_improves_the_reward_on_policy(improves):
    improves("reinforce", *SETTINGS, "actor.minibatches=1", "rollout.max_staleness=0")


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_lora_training_improves_accuracy(tmp_path, record_property):
    adapters = ("actor.engine.lora.rank=16", "actor.optimizer.lr=1e-3", "total_steps=60", "evaluation.examples=256")

    accuracy = _run("grpo", tmp_path / "run", "eval/accuracy", *SETTINGS, *adapters)

    first, last = accuracy[0], accuracy[-1]
    record_property("accuracy before and after", f"{first:.3f}, {last:.3f}")
    assert last >= first + 0.2


@pytest.mark.nightly
def test_preset_distillation_reduces_kl_to_teacher(tmp_path, record_property):
    models = [make_tiny_model(tmp_path / name, seed=seed, layers=1) for name, seed in (("student", 0), ("teacher", 1))]
    settings = (f"model.path={models[0]}", f"ref.path={models[1]}", *SETTINGS, "actor.optimizer.lr=2e-3")
    short = ("data.batch_size=8", "rollout.generation.max_new_tokens=16")

    divergences = _run("distillation", tmp_path / "run", "kl/ref_k1", *settings, *short)

    first, last = mean(divergences[:5]), mean(divergences[-5:])
    record_property("mean KL in nats, first and last five steps", f"{first:.4f}, {last:.4f}")
    assert last < 0.8 * first


def test_every_preset_has_a_test():
    presets = {path.stem for path in (Path(__file__).parents[2] / "apps/src/rl_apps/conf/algorithm").glob("*.yaml")}
    assert presets == {*PRESETS, "reinforce", "distillation"}
