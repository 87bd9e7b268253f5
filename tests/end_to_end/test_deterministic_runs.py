"""The deterministic mode, as a user starts it: two runs agree to the last bit, also where one was killed, and servers
with the trainer."""

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
    "evaluation.rows=4",
    "actor.optimizer.lr=3e-3",
    "actor.optimizer.warmup_steps=0",
)
MEASURED = ("timestamp", "time/", "eval/time/", "throughput/", "memory/", "server/", "groups/wait_seconds")
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

    def start(name, *overrides, kill=None):
        arguments = [f"run_dir={directory / name}", f"model.path={model}", *SETTINGS, *overrides]
        environment = {**os.environ, "PYTHONPATH": str(directory)}
        if kill is None:
            done = subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=280, env=environment)
            assert done.returncode == 0, done.stderr
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
    """SIGKILL to a command at the moment at which something is so."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "it ended before"
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait(10)


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


@pytest.mark.slow
def test_deterministic_trainer_and_server_agree_on_a_row_of_several_blocks_of_logits(tmp_path, monkeypatch):
    path = str(make_tiny_model(tmp_path / "model", layers=1, hidden=32))
    served = load_model(EmbeddedEngineConfig(slots=1), ServeSpec(path, device="cpu", deterministic=True))
    assert served.block == LOGITS_AT_ONCE // served.vocab_size
    served.block = 16
    monkeypatch.setattr("rl_engines_fsdp.model.maker.LOGITS_AT_ONCE", 16 * served.vocab_size)
    monkeypatch.setattr("rl_contracts.models.fused_logprobs.FEWEST", 16)
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


@pytest.mark.nightly
def test_deterministic_run_repeated_gives_the_same_metrics_to_the_last_bit(run, first):
    assert _differences(run("again"), first) == []
    assert all(record["grad_norm"] > 0 for record in first if "grad_norm" in record)


@pytest.mark.nightly
def test_deterministic_run_servers_and_trainer_agree_to_the_last_bit(first):
    steps = [record for record in first if "grad_norm" in record]
    assert [record["gap/max_abs"] for record in steps] == [0.0, 0.0, 0.0]
    assert [record["ratio/max"] for record in steps] == [1.0, 1.0, 1.0]


@pytest.mark.nightly  # a third run
def test_deterministic_run_with_another_seed_differs(run, first):
    assert _differences(run("other", "seed=2"), first)


def _last(run_dir):
    """The last step of which there is a record."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def _answers(run_dir, step):
    return (run_dir / "rollouts" / f"step_{step}-0.jsonl").exists()


def generating(run_dir):
    """A step is over; the servers write the answers of the next, which only begin when its weights are there."""
    step = _last(run_dir)
    return step >= 3 and not _answers(run_dir, step + 1)


def training(run_dir):
    """The answers of a step are there, its record is not."""
    step = _last(run_dir)
    return step >= 5 and _answers(run_dir, step + 1) and _last(run_dir) == step


def writing(run_dir):
    """A recover point is half written."""
    return _last(run_dir) >= 7 and any((run_dir / "recover").glob(".step_*.partial"))


@pytest.mark.nightly  # five runs
@pytest.mark.timeout(900)
def test_deterministic_run_killed_three_times_ends_as_the_unbroken_one_to_the_last_bit(run):
    settings = ("total_steps=16", "recover.every=2", "checkpoint.every=8")
    whole = run("whole", *settings)
    for moment in (generating, training, writing):
        run("cut", *settings, kill=moment)
    cut = run("cut", *settings)

    assert [record["step"] for record in cut if "grad_norm" in record] == [*range(1, 17)]
    assert _differences(cut, whole) == []
    files = sorted(path.relative_to(run.directory / "whole") for path in _tensors(run.directory / "whole"))
    assert {path.parts[:2] for path in files} >= {("recover", "step_16"), ("checkpoints", "step_16")}
    assert files == sorted(path.relative_to(run.directory / "cut") for path in _tensors(run.directory / "cut"))
    for file in files:
        found, expected = (load_file(run.directory / name / file) for name in ("cut", "whole"))
        assert found.keys() == expected.keys()
        assert [name for name in expected if not found[name].equal(expected[name])] == [], file
    assert any("exp_avg" in name for file in files for name in load_file(run.directory / "whole" / file))


def _tensors(run_dir):
    return [path for folder in ("recover", "checkpoints") for path in (run_dir / folder).rglob("*.safetensors")]
