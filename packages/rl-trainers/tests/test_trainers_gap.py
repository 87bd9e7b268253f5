"""The gap gate's memory and its fresh tokens, on the reference engine. Faults of real servers: tests/test_gap_faults.py
of the workspace."""

import logging

import pytest
import torch

from rl_contracts.config import OptimizerConfig
from rl_contracts.data import FinetuneSpec
from rl_contracts.errors import WeightUpdateError
from rl_contracts.sharding import share
from rl_contracts.testing import ReferenceTrainEngine
from rl_contracts.testing.batches import make_batch
from rl_contracts.testing.models import make_tiny_model
from rl_trainers import GapConfig, PolicyActor
from rl_trainers.algorithm import AlgorithmConfig
from rl_trainers.gap.diagnosis import DTYPE, Cause, Gap
from rl_trainers.gap.gate import Alarm

ROUNDING = [Cause(DTYPE, "rounding")]
FAULT = [Cause("temperature", "a fault")]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, hidden=32)


@pytest.fixture
def engine(model_path):
    engine = ReferenceTrainEngine()
    engine.initialize(FinetuneSpec(str(model_path), 10, optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.0)))
    yield engine
    engine.destroy()


def _judge(alarm, mean, causes=FAULT):
    """What a run does at each comparison."""
    if alarm.note(mean):
        alarm.speak(Gap(10, mean, mean), 3, causes)


def test_alarm_warns_seldom_and_stops_at_patience(caplog):
    alarm = Alarm(GapConfig(patience=7), "scores")
    with caplog.at_level(logging.WARNING, logger="rl"):
        for _ in range(6):
            _judge(alarm, 0.1)
        with pytest.raises(WeightUpdateError, match=r"this is time 7\). Likely cause: temperature: a fault"):
            _judge(alarm, 0.1)
    assert alarm.in_row == 7


def test_alarm_one_good_comparison_begins_the_count_anew():
    alarm = Alarm(GapConfig(patience=2), "scores")
    for _ in range(5):
        _judge(alarm, 0.1)
        _judge(alarm, 0.001)
    assert alarm.in_row == 0


@pytest.mark.parametrize("mean", [0.6, float("nan")])
def test_alarm_far_above_stops_at_once(mean):
    with pytest.raises(WeightUpdateError, match="temperature"):
        _judge(Alarm(GapConfig(), "scores"), mean)


def test_alarm_rounding_never_stops_by_patience_and_is_not_examined_at_every_step():
    alarm, examined = Alarm(GapConfig(patience=3), "scores"), 0
    for _ in range(64):
        if alarm.note(0.03):
            examined += 1
            alarm.speak(Gap(10, 0.03, 0.1), 3, ROUNDING)
    assert alarm.in_row == 64
    assert examined == 7, "at 1, 2, 4, ..., 64"


def _exact_batch(engine, minibatches=1):
    """Rows whose recorded log-probs are the engine's own."""
    batch = share(make_batch(8).exclude("advantages"), engine.parallel, minibatches)
    ours = engine.forward(batch, lambda outputs, _: outputs.logprobs)
    batch["logprobs"] = torch.where(batch["versions"] >= 0, ours, 0.0)
    return batch


@pytest.mark.parametrize(
    ("proximal", "minibatches"), [("current", 1), ("recompute", 1), ("recompute", 2), ("behaviour", 2)]
)
def test_actor_fresh_tokens_are_compared_in_a_pass_that_is_made_anyway(engine, proximal, minibatches):
    batch = _exact_batch(engine, minibatches)
    batch["logprobs"] = torch.where(batch["versions"] >= 0, batch["logprobs"] - 0.125, 0.0)
    passes, forward = [], engine.forward
    engine.forward = lambda *args: passes.append(1) or forward(*args)
    actor = PolicyActor(engine, AlgorithmConfig(proximal=proximal), minibatches)
    stats = actor.prepare(batch)
    stats |= actor.update(batch)
    compared = batch["versions"] >= 0
    if proximal == "behaviour":
        compared = compared & (batch["minibatch"] == 0)[:, None]
    assert stats["gap/fresh_mean_abs"] == pytest.approx(0.125, abs=1e-5)
    assert stats["gap/fresh_max_abs"] == pytest.approx(0.125, abs=1e-5)
    assert stats["gap/fresh_k3"] > 0
    assert stats["gap/fresh_tokens"] == float(compared.sum())
    assert len(passes) == (proximal == "recompute"), "no further forward pass"
    assert "gap/fresh/max" not in stats


@pytest.mark.parametrize("proximal", ["current", "recompute"])
def test_actor_batch_without_fresh_tokens_gives_null_and_a_count_of_zero(engine, proximal):
    batch = _exact_batch(engine)
    engine.version = 1  # all tokens are a version old
    actor = PolicyActor(engine, AlgorithmConfig(proximal=proximal))
    stats = actor.prepare(batch)
    stats |= actor.update(batch)
    assert (stats["gap/fresh_mean_abs"], stats["gap/fresh_max_abs"], stats["gap/fresh_k3"]) == (None, None, None)
    assert stats["gap/fresh_tokens"] == 0.0
