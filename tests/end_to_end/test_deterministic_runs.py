"""Deterministic mode: repeated runs are bitwise equal, also after kills, and servers match the trainer exactly."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from rl_contracts.batch.trajectory import Trajectory, stack
from rl_contracts.data import FinetuneSpec, ServeSpec
from rl_contracts.models.token_logprobs import LOGITS_AT_ONCE
from rl_contracts.testing.models import make_tiny_model
from rl_engines_fsdp import FSDPEngine, FSDPEngineConfig
from rl_inference import EmbeddedEngineConfig
from rl_inference.embedded_server.model.loading import load_model

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
    "evaluation.examples=4",
    "actor.optimizer.lr=3e-3",
    "actor.optimizer.warmup_steps=0",
)
MEASURED = ("timestamp", "time/", "eval/time/", "throughput/", "memory/", "server/", "groups/wait_seconds")
"""Prefixes of metrics that depend on the clock or on the progress of the servers."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Function that runs the command and returns its records without the metrics in MEASURED."""
    directory = tmp_path_factory.mktemp("deterministic")
    model = make_tiny_model(directory / "model", layers=1, hidden=32)
    # a random model never solves a task; this reward differs within groups
    (directory / "reward_by_ids.py").write_text(
        "def score(prompt, completions, prompt_ids, completion_ids, **data):\n    return sum(completion_ids) % 7 / 6\n"
    )

    def start(name, *overrides, kill=None):
        arguments = [f"run_dir={directory / name}", f"model.path={model}", *SETTINGS, *overrides]
        environment = {**os.environ, "PYTHONPATH": str(directory)}
        if kill is None:
            result = subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=280, env=environment)
            assert result.returncode == 0, result.stderr
        else:
            process = subprocess.Popen([COMMAND, *arguments], stdout=subprocess.DEVNULL, env=environment)
            _kill_when(process, lambda: kill(directory / name))
        return _records(directory / name)

    start.directory = directory
    return start


def _records(run_dir):
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(MEASURED)} for line in lines]


def _kill_when(process, condition, seconds=200.0):
    """Kill the command as soon as the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the command ended before the condition held"
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait(10)


def _differences(one, other):
    """Return (step, metric, first value, second value) for each difference between two runs."""
    assert [record["step"] for record in one] == [record["step"] for record in other]
    return [
        (a["step"], name, a.get(name), b.get(name))
        for a, b in zip(one, other, strict=True)
        for name in sorted({*a, *b})
        if a.get(name) != b.get(name)
    ]


@pytest.mark.slow
def test_deterministic_trainer_and_server_agree_across_logit_blocks(tmp_path, monkeypatch):
    path = str(make_tiny_model(tmp_path / "model", layers=1, hidden=32))
    server_model = load_model(EmbeddedEngineConfig(max_sequences=1), ServeSpec(path, device="cpu", deterministic=True))
    assert server_model.block == LOGITS_AT_ONCE // server_model.vocab_size
    server_model.block = 16
    monkeypatch.setattr("rl_engines_fsdp.model.maker.LOGITS_AT_ONCE", 16 * server_model.vocab_size)
    monkeypatch.setattr("rl_contracts.models.fused_logprobs.FEWEST", 16)
    ids = [3 + 7 * i % 50 for i in range(60)]
    trajectory = Trajectory(
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
        logprobs = engine.forward(stack([trajectory]), lambda outputs, _: outputs.logprobs)
        assert server_model.score(ids, 0.7) == logprobs[0].tolist()
    finally:
        engine.destroy()


@pytest.mark.nightly
def test_deterministic_run_has_no_log_prob_gap_and_depends_on_the_seed(run):
    first = run("first")

    steps = [record for record in first if "grad_norm" in record]
    assert all(record["grad_norm"] > 0 for record in steps)
    assert [record["gap/max_abs"] for record in steps] == [0.0, 0.0, 0.0]
    assert [record["ratio/max"] for record in steps] == [1.0, 1.0, 1.0]
    assert _differences(run("other", "seed=2"), first)


def _last_step(run_dir):
    """Return the last recorded step."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def _has_rollouts(run_dir, step):
    return (run_dir / "rollouts" / f"step_{step}-0.jsonl").exists()


def is_generating(run_dir):
    """Return whether the servers generate the completions of the next step."""
    step = _last_step(run_dir)
    return step >= 3 and not _has_rollouts(run_dir, step + 1)


def is_training(run_dir):
    """Return whether the trainer trains: the completions of a step are written, but not its record."""
    step = _last_step(run_dir)
    return step >= 5 and _has_rollouts(run_dir, step + 1) and _last_step(run_dir) == step


def is_writing(run_dir):
    """Return whether a recovery checkpoint is being written."""
    return _last_step(run_dir) >= 7 and any((run_dir / "recover").glob(".step_*.partial"))


@pytest.mark.guarantee(
    "A deterministic GRPO run that is killed three times equals an uninterrupted run bit for bit.", area="failures"
)
@pytest.mark.nightly  # five runs
@pytest.mark.timeout(900)
def test_deterministic_run_killed_three_times_equals_uninterrupted_run(run):
    settings = ("total_steps=16", "recover.every=2", "checkpoint.every=8")
    uninterrupted = run("uninterrupted", *settings)
    for condition in (is_generating, is_training, is_writing):
        run("killed", *settings, kill=condition)
    killed = run("killed", *settings)

    assert [record["step"] for record in killed if "grad_norm" in record] == [*range(1, 17)]
    assert _differences(killed, uninterrupted) == []
    files = sorted(
        path.relative_to(run.directory / "uninterrupted") for path in _tensors(run.directory / "uninterrupted")
    )
    assert {path.parts[:2] for path in files} >= {("recover", "step_16"), ("checkpoints", "step_16")}
    assert files == sorted(path.relative_to(run.directory / "killed") for path in _tensors(run.directory / "killed"))
    for file in files:
        actual, expected = (load_file(run.directory / name / file) for name in ("killed", "uninterrupted"))
        assert actual.keys() == expected.keys()
        assert [name for name in expected if not actual[name].equal(expected[name])] == [], file
    assert any("exp_avg" in name for file in files for name in load_file(run.directory / "uninterrupted" / file))


def _tensors(run_dir):
    return [path for folder in ("recover", "checkpoints") for path in (run_dir / folder).rglob("*.safetensors")]
