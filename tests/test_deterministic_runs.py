"""The deterministic mode, as a user starts it: two runs agree to the last bit, and servers with the trainer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rl_contracts.data import FinetuneSpec, ServeSpec
from rl_contracts.testing.models import make_tiny_model
from rl_contracts.token_logprobs import LOGITS_AT_ONCE
from rl_contracts.trajectory import Trajectory, stack
from rl_engines_fsdp import FSDPEngine, FSDPEngineConfig
from rl_inference import EmbeddedEngineConfig
from rl_inference.server.loading import load_model

COMMAND = str(Path(sys.executable).parent / "gsm8k-grpo")
SETTINGS = (
    "recipe=embedded",
    "deterministic=true",
    "rollout.max_staleness=0",
    "total_steps=3",
    "data.batch_size=4",
    "rollout.group_size=4",
    "rollout.generation.max_new_tokens=12",
    "rollout.reward=reward_by_ids:score",
    "evaluation.rows=4",
    "actor.optimizer.lr=3e-3",
    "actor.optimizer.warmup_steps=0",
)
MEASURED = ("time/", "eval/time/", "throughput/", "memory/", "server/", "groups/wait_seconds")
"""What is read off a clock, or off servers that work on meanwhile."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs the command and returns its metrics, but for what depends on the clock."""
    directory = tmp_path_factory.mktemp("deterministic")
    model = make_tiny_model(directory / "model", layers=1, hidden=32)
    # a random model never answers right; this reward gives every batch something to learn
    (directory / "reward_by_ids.py").write_text(
        "def score(prompt, completions, prompt_ids, completion_ids, **data):\n    return sum(completion_ids) % 7 / 6\n"
    )

    def start(name, *overrides):
        arguments = [f"run_dir={directory / name}", f"model.path={model}", *SETTINGS, *overrides]
        environment = {**os.environ, "PYTHONPATH": str(directory)}
        done = subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=280, env=environment)
        assert done.returncode == 0, done.stderr
        lines = (directory / name / "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if not k.startswith(MEASURED)} for line in lines]

    return start


def _differences(one, other):
    """(step, figure, both values) of all that two runs do not agree on."""
    assert [record["step"] for record in one] == [record["step"] for record in other]
    return [
        (a["step"], name, a.get(name), b.get(name))
        for a, b in zip(one, other, strict=True)
        for name in sorted({*a, *b})
        if a.get(name) != b.get(name)
    ]


@pytest.fixture(scope="module")
def first(run):
    return run("first")


def test_deterministic_trainer_and_server_agree_on_a_row_of_several_blocks_of_logits(tmp_path, monkeypatch):
    path = str(make_tiny_model(tmp_path / "model", layers=1, hidden=32))
    served = load_model(EmbeddedEngineConfig(slots=1), ServeSpec(path, device="cpu", deterministic=True))
    assert served.block == LOGITS_AT_ONCE // served.vocab_size
    served.block = 16
    monkeypatch.setattr("rl_engines_fsdp.model.maker.LOGITS_AT_ONCE", 16 * served.vocab_size)
    monkeypatch.setattr("rl_contracts.training.logprobs.FEWEST", 16)
    ids = [3 + 7 * i % 50 for i in range(60)]
    row = Trajectory(
        input_ids=np.array(ids),
        loss_mask=np.ones(60, bool),
        logprobs=np.zeros(60, np.float32),
        versions=np.zeros(60, np.int32),
        temperature=0.7,
        prompt_id=0,
        group_id=0,
        episode_id=0,
    )
    engine = FSDPEngine(FSDPEngineConfig())
    engine.initialize(FinetuneSpec(path, 1, device="cpu", deterministic=True))
    try:
        trained = engine.forward(stack([row]), lambda outputs, _: outputs.logprobs)
        assert served.score(ids, 0.7) == trained[0].tolist()
    finally:
        engine.destroy()


@pytest.mark.slow
def test_deterministic_run_repeated_gives_the_same_metrics_to_the_last_bit(run, first):
    assert _differences(run("again"), first) == []
    assert all(record["grad_norm"] > 0 for record in first if "grad_norm" in record)


@pytest.mark.slow
def test_deterministic_run_servers_and_trainer_agree_to_the_last_bit(first):
    steps = [record for record in first if "grad_norm" in record]
    assert [record["gap/max_abs"] for record in steps] == [0.0, 0.0, 0.0]
    assert [record["ratio/max"] for record in steps] == [1.0, 1.0, 1.0]


@pytest.mark.slow
@pytest.mark.nightly  # a third run
def test_deterministic_run_with_another_seed_differs(run, first):
    assert _differences(run("other", "seed=2"), first)
