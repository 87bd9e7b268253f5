"""The optimizer steps of a batch: empty minibatches are skipped and counted, and invalid components are rejected."""

import logging
import math

import pytest
import torch
from policy_toys import objective, prepared_batch

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.batch.redistribution import shard_batch
from rl_contracts.config import OptimizerConfig
from rl_contracts.data import FinetuneSpec
from rl_contracts.errors import ConfigError
from rl_contracts.testing import ReferenceTrainEngine, make_batch, make_tiny_model
from rl_trainers import Critic, PolicyActor
from rl_trainers.algorithms.config import AdvantageConfig, AlgorithmConfig, CorrectionConfig, LossConfig, MaskConfig
from rl_trainers.learners.optimizer_steps import take_steps, trained_tokens


@pytest.fixture
def engine(tmp_path):
    engine = ReferenceTrainEngine()
    model = make_tiny_model(tmp_path / "model", layers=1, hidden=32)
    engine.initialize(FinetuneSpec(str(model), 10, optimizer=OptimizerConfig(lr=1e-3)))
    yield engine
    engine.destroy()


def _prepared(actor, rows):
    batch = shard_batch(make_batch(rows).exclude("advantages"), ParallelContext(), actor.minibatches)
    batch["versions"] = torch.where(batch["versions"] >= 0, actor.version, -1).int()
    batch["loss_mask"] = batch["versions"] >= 0
    actor.prepare(batch)
    return batch


def test_actor_update_fewer_sequences_than_minibatches_is_applied(engine):
    actor = PolicyActor(engine, AlgorithmConfig(advantage=AdvantageConfig("return")), minibatches=4)
    stats = actor.update(_prepared(actor, rows=3))
    assert stats["minibatches/empty"] == 1
    assert stats["applied"] == 1.0
    assert actor.version == 1
    assert stats["grad_norm"] > 0


class FlatCritic(Critic):
    """A critic whose values are all 0, on an engine without a value head."""

    def values(self, batch):
        return torch.zeros(batch["input_ids"].shape)


def test_actor_update_critic_skips_same_minibatches_as_policy(engine, monkeypatch):
    sizes = []

    def train_batch(rows, loss, weigh):
        sizes.append(len(rows))
        return {"loss": 0.0, "grad_norm": 0.0, "applied": 1.0}

    monkeypatch.setattr(engine, "train_batch", train_batch)
    algorithm = AlgorithmConfig(advantage=AdvantageConfig("gae"))
    actor = PolicyActor(engine, algorithm, minibatches=4, critic=FlatCritic(engine, minibatches=4))
    stats = actor.update(_prepared(actor, rows=3))
    assert sizes == [1] * 6
    assert stats["critic/minibatches/empty"] == 1


def test_actor_update_fully_masked_minibatch_is_skipped_and_counted(engine):
    actor = PolicyActor(engine, AlgorithmConfig(advantage=AdvantageConfig("return")), minibatches=2)
    batch = _prepared(actor, rows=8)
    batch["loss_mask"][batch["minibatch"] == 1] = False
    stats = actor.update(batch)
    assert (stats["minibatches/empty"], stats["applied"], actor.version) == (1, 1.0, 1)


def test_actor_update_without_trained_tokens_keeps_version(engine):
    actor = PolicyActor(engine, AlgorithmConfig(mask=MaskConfig(truncated=True)), minibatches=2)
    batch = shard_batch(make_batch(8).exclude("advantages"), ParallelContext(), 2)
    batch["truncated"][:] = True
    actor.prepare(batch)
    stats = actor.update(batch)
    assert (stats["minibatches/empty"], stats["applied"], actor.version) == (2, 0.0, 0)


def test_truncated_mask_drops_sequences_but_keeps_them_in_groups(engine):
    actor = PolicyActor(engine, AlgorithmConfig(mask=MaskConfig(truncated=True)))
    batch = shard_batch(make_batch(8).exclude("advantages"), ParallelContext())
    is_truncated = torch.arange(8) % 4 == 0
    batch["truncated"] = is_truncated
    batch["rewards"] = torch.where(is_truncated, 1.0, 0.0)
    batch["rewards"][1] = 0.5
    actor.prepare(batch)
    assert not batch["loss_mask"][is_truncated].any()
    assert batch["loss_weights"][is_truncated].abs().max() == 0
    # the other completions of each group are still compared with the dropped one
    trained = batch["loss_mask"] & ~is_truncated[:, None]
    assert (batch["advantages"][4:][trained[4:]] < 0).all()
    assert actor.update(batch)["applied"] == 1.0


class CountingEngine:
    """An engine that reports the number of sequences of each minibatch as statistics."""

    version, parallel = 0, ParallelContext()

    def train_batch(self, batch, loss_fn, loss_weight_fn):
        rows = float(len(batch))
        metrics = {"size/max": rows, "applied": 1.0, "grad_norm": rows, "tokens": rows}
        return {"loss": rows, "rows": rows} | metrics


def test_take_steps_statistics_of_unequal_minibatches_are_weighted():
    batch = make_batch(4, lengths=(6, 6))
    batch["loss_mask"][:] = True
    batch["loss_mask"][3, 3:] = False  # 6, 6 and 6 tokens; 3 tokens
    batch["minibatch"] = torch.tensor([0, 0, 0, 1])

    stats = take_steps(CountingEngine(), batch, None, lambda rows: torch.tensor(float(len(rows))), 2)

    assert stats["rows"] == pytest.approx((18 * 3 + 3 * 1) / 21)  # by tokens
    assert stats["loss"] == pytest.approx((3 * 3 + 1 * 1) / 4)  # by denominators
    assert (stats["grad_norm"], stats["tokens"], stats["size/max"]) == (2.0, 4.0, 3.0)


def test_take_steps_one_minibatch_needs_no_minibatch_entry(engine):
    batch = make_batch(4).exclude("advantages")
    assert take_steps(engine, batch, lambda outputs, packed: (-outputs.logprobs.sum(), {}), trained_tokens)["applied"]


def test_actor_update_non_finite_step_is_logged_and_keeps_version(engine, caplog):
    actor = PolicyActor(engine, AlgorithmConfig())
    batch = _prepared(actor, rows=8)
    batch["advantages"][batch["loss_mask"]] = math.nan
    with caplog.at_level(logging.WARNING):
        assert actor.update(batch)["applied"] == 0.0
    assert "version 0: skipped minibatch 0 with non-finite values: {'loss': nan" in caplog.text
    assert actor.version == 0


def mean_loss(terms):
    """A loss that is averaged over the tokens."""
    return (-terms.ratio * terms.advantages).mean(), {}


def column_loss(terms):
    """A loss with a shape that would broadcast to [N, N]."""
    return (-terms.ratio * terms.advantages)[:, None], {}


def bare_loss(terms):
    """A loss without marks."""
    return -terms.ratio * terms.advantages


def odd_mark_loss(terms):
    """A loss with a mark of the wrong shape."""
    return -terms.ratio * terms.advantages, {"odd": terms.trained.any()}


def one_weight(off):
    """A correction of the wrong shape."""
    return off.log_ratio.sum(), {}


def one_verdict(off):
    """A mask of the wrong shape."""
    return off.trained.any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": LossConfig("here:mean_loss")}, r"algorithm\.loss: .*found tuple with shapes \[\[\]\]"),
        ({"loss": LossConfig("here:column_loss")}, r"algorithm\.loss: .*found tuple with shapes .*, 1\]\]"),
        ({"loss": LossConfig("here:bare_loss")}, r"algorithm\.loss: .*found Tensor with shapes \[\[\d+\]\]"),
        ({"loss": LossConfig("here:odd_mark_loss")}, r"algorithm\.loss: .*found tuple with shapes .*, \[\]\]"),
        ({"correction": CorrectionConfig("here:one_weight")}, r"algorithm\.correction: expected a pair"),
        ({"mask": MaskConfig("here:one_verdict")}, r"algorithm\.mask: expected"),
    ],
)
def test_objective_component_with_wrong_shape_is_rejected(settings, message, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "here", sys.modules[__name__])
    config = AlgorithmConfig(**settings)
    with pytest.raises(ConfigError, match=message):
        objective(prepared_batch(config), config, [range(9)])
