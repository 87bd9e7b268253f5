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
from rl_trainers import GapConfig, GapGate
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
    gap = Gap(10, mean, mean)
    if alarm.note(gap):
        alarm.speak(gap, 3, causes)


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
        if alarm.note(Gap(10, 0.03, 0.1)):
            examined += 1
            alarm.speak(Gap(10, 0.03, 0.1), 3, ROUNDING)
    assert alarm.in_row == 64
    assert examined == 7, "at 1, 2, 4, ..., 64"


def _exact_batch(engine):
    """Rows whose recorded log-probs are the engine's own."""
    batch = share(make_batch(8).exclude("advantages"), engine.parallel)
    ours = engine.forward(batch, lambda outputs, _: outputs.logprobs)
    batch["logprobs"] = torch.where(batch["versions"] >= 0, ours, 0.0)
    return batch


def _gate(engine, **settings):
    """A gate that never asks a server."""
    return GapGate(engine, None, None, GapConfig(rows=4, answer_every=0, **settings))


def test_gate_fresh_tokens_are_compared_before_the_update_on_rows_that_have_some(engine):
    batch = _exact_batch(engine)
    batch["logprobs"] = torch.where(batch["versions"] >= 0, batch["logprobs"] - 0.125, 0.0)
    engine.version = int(batch["versions"].max())
    batch["versions"][2:6] = batch["versions"][2:6].clamp(max=engine.version - 1)
    fresh = [0, 1, 6, 7]
    batch["versions"][fresh] = torch.where(batch["versions"][fresh] >= 0, engine.version, -1).int()
    stats = _gate(engine, warn=1.0, stop=1.0).before_update(batch)
    assert stats["gap/fresh_mean_abs"] == pytest.approx(0.125, abs=1e-5)
    assert stats["gap/fresh_max_abs"] == pytest.approx(0.125, abs=1e-5)
    assert stats["gap/fresh_k3"] > 0
    assert stats["gap/fresh_tokens"] == float((batch["versions"][fresh] >= 0).sum())


def test_gate_batch_without_fresh_tokens_gives_null_and_a_count_of_zero(engine):
    batch = _exact_batch(engine)
    engine.version = 1 + int(batch["versions"].max())
    stats = _gate(engine).before_update(batch)
    assert stats.pop("gap/fresh_tokens") == 0.0
    assert set(stats.values()) == {None}
