"""PPO with a critic and a reference model, and its replay on one and two trainer processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rl_contracts.testing.models import make_tiny_model

BIN = Path(sys.executable).parent
ALGORITHM = (
    "algorithm=ppo",
    "algorithm.kl.place=loss",
    "algorithm.kl.coef=0.1",
    # all rewards of the tiny model are 0: the entropy bonus changes the policy, and the reward bias changes the critic
    "algorithm.entropy_coef=0.1",
    "algorithm.reward.bias=1.0",
    "actor.minibatches=2",
)
SMALL = (
    "recipe=embedded",
    "data.batch_size=4",
    "rollout.group_size=4",
    "rollout.generation.max_new_tokens=12",
    "evaluation.examples=0",
)


def _run(name, *arguments):
    """Run a command and return its output."""
    done = subprocess.run([str(BIN / name), *map(str, arguments)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A finished run of PPO with a KL penalty and an entropy bonus in the loss."""
    model = make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, hidden=32)
    run_dir = tmp_path_factory.mktemp("runs") / "ppo"
    settings = ("total_steps=3", "checkpoint.save_batches=true", "critic.lr=1e-3", *ALGORITHM, *SMALL)
    _run("gsm8k-grpo", f"run_dir={run_dir}", f"model.path={model}", *settings)
    return run_dir


@pytest.mark.nightly
def test_ppo_trains_the_critic_and_its_replay_on_two_trainers_matches_one(run_dir):
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "reward/mean" in record]
    assert [step["version"] for step in steps] == [1, 2, 3]
    assert all(step["critic/applied"] == 1.0 for step in steps)
    # the reference is the initial policy, so the KL is 0 in the first step and grows
    assert steps[0]["kl/ref_k3"] < steps[2]["kl/ref_k3"]
    assert abs(steps[0]["critic/value/mean"]) < steps[2]["critic/value/mean"]
    one, two = (
        json.loads(_run("rl", "replay", run_dir, "--step", 3, "--allocation", allocation))
        for allocation in ("fsdp:d1", "fsdp:d2")
    )
    for name in (
        "grad_norm",
        "loss",
        "critic/grad_norm",
        "critic/loss",
        "entropy/mean",
        "kl/ref_k3",
        "weight/effective",
    ):
        assert two[name] == pytest.approx(one[name], rel=2e-5, abs=1e-6), name
