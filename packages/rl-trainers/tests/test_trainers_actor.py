"""The actor on the reference engine: what it computes, and that no split changes it."""

import pytest
import torch

from rl_contracts.config import OptimizerConfig
from rl_contracts.data import FinetuneSpec
from rl_contracts.errors import ConfigError, DataError
from rl_contracts.parallel import ParallelContext
from rl_contracts.sharding import share
from rl_contracts.testing import ReferenceTrainEngine
from rl_contracts.testing.batches import make_batch
from rl_contracts.testing.models import make_tiny_model
from rl_contracts.trajectory import load_batch, pack, save_batch, select
from rl_trainers import PolicyActor, replay_batch
from rl_trainers.actor import PolicyLoss
from rl_trainers.algorithm import AlgorithmConfig


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, hidden=32)


@pytest.fixture
def engine(model_path):
    engine = ReferenceTrainEngine(OptimizerConfig(lr=1e-3, weight_decay=0.0))
    engine.initialize(FinetuneSpec(str(model_path), 10))
    yield engine
    engine.destroy()


def _batch(rows=8, minibatches=1, **kwargs):
    return share(make_batch(rows, **kwargs).exclude("advantages"), ParallelContext(), minibatches)


def test_actor_update_advances_the_version_once_however_many_minibatches(engine):
    actor = PolicyActor(engine, AlgorithmConfig(), minibatches=4)
    batch = _batch(minibatches=4)
    actor.prepare(batch)
    stats = actor.update(batch)
    assert actor.version == 1
    assert stats["applied"] == 1.0


def test_actor_prepare_puts_advantages_on_trained_tokens_only(engine):
    batch = _batch()
    PolicyActor(engine, AlgorithmConfig(), 1).prepare(batch)
    assert (batch["advantages"][~batch["loss_mask"]] == 0).all()
    for row in range(len(batch)):
        assert len(batch["advantages"][row][batch["loss_mask"][row]].unique()) <= 1


def test_actor_prepare_tokens_of_a_later_version_are_refused(engine):
    with pytest.raises(DataError, match="versions later than 0"):
        PolicyActor(engine, AlgorithmConfig()).prepare(_batch(version=3))


def test_actor_prepare_staleness_coefficient_shrinks_old_tokens(engine):
    engine.version = 2
    batch = _batch(version=0)
    PolicyActor(engine, AlgorithmConfig(staleness_coef=0.5)).prepare(batch)
    weights = batch["loss_weights"][batch["loss_mask"]]
    torch.testing.assert_close(weights, torch.full_like(weights, torch.tensor(-1.0).exp().item()))


def test_actor_prepare_episode_of_several_rows_counts_once_in_its_group(engine):
    batch = _batch(rows=4)
    batch["group_ids"][:] = 0
    batch["episode_ids"] = torch.tensor([0, 0, 0, 1])
    batch["rewards"] = torch.tensor([1.0, 1.0, 1.0, 0.0])
    PolicyActor(engine, AlgorithmConfig(baseline="group_mean")).prepare(batch)
    found = [
        float(a[m].max()) if m.any() else None for a, m in zip(batch["advantages"], batch["loss_mask"], strict=True)
    ]
    assert [x for x in found[:3] if x is not None] == pytest.approx([0.5] * sum(x is not None for x in found[:3]))


def test_actor_recompute_and_current_proximal_give_the_same_first_step(model_path):
    losses = []
    for proximal in ("recompute", "current"):
        engine = ReferenceTrainEngine(OptimizerConfig(lr=1e-3))
        engine.initialize(FinetuneSpec(str(model_path), 10))
        actor = PolicyActor(engine, AlgorithmConfig(proximal=proximal))
        batch = _batch()
        actor.prepare(batch)
        stats = actor.update(batch)
        losses.append((stats["loss"], stats["grad_norm"], stats["correction/mean"]))
        engine.destroy()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_actor_current_proximal_with_several_minibatches_is_refused(engine):
    with pytest.raises(ConfigError, match="the policy moves within the step"):
        PolicyActor(engine, AlgorithmConfig(proximal="current"), minibatches=2)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean", "constant_length"])
def test_policy_loss_any_split_of_the_rows_sums_to_the_same(engine, aggregation):
    actor = PolicyActor(engine, AlgorithmConfig(aggregation=aggregation, proximal="recompute"))
    batch = _batch(rows=9)
    actor.prepare(batch)
    loss = PolicyLoss(actor.algorithm, actor.proximal)

    def total(parts):
        result = torch.zeros(())
        for rows in parts:
            packed = pack(select(batch, rows))
            outputs = type("Outputs", (), {})()
            outputs.logprobs, outputs.entropy = packed["prox_logprobs"] + 0.1, torch.zeros_like(packed["logprobs"])
            result += loss(outputs, packed)[0]
        return result

    torch.testing.assert_close(total([range(9)]), total([[8, 1], [0], [2, 3, 4], [7, 6, 5]]), rtol=1e-5, atol=1e-6)


def test_actor_skipped_step_does_not_advance_the_version(engine):
    actor = PolicyActor(engine, AlgorithmConfig())
    batch = _batch()
    actor.prepare(batch)
    batch["advantages"][batch["loss_mask"]] = float("nan")
    stats = actor.update(batch)
    assert stats["applied"] == 0.0
    assert actor.version == 0


def test_replay_batch_saved_and_loaded_gives_the_step_of_the_run(model_path, tmp_path):
    figures = []
    for source in ("run", "replay"):
        engine = ReferenceTrainEngine(OptimizerConfig(lr=1e-3))
        engine.initialize(FinetuneSpec(str(model_path), 10))
        actor = PolicyActor(engine, AlgorithmConfig(), minibatches=2)
        if source == "run":
            whole = make_batch(8).exclude("advantages")
            save_batch(whole, tmp_path / "b.safetensors")
            batch = share(load_batch(tmp_path / "b.safetensors"), ParallelContext(), 2)
            figures.append(actor.prepare(batch) | actor.update(batch))
        else:
            figures.append(replay_batch(actor, tmp_path / "b.safetensors"))
        engine.destroy()
    assert figures[0] == figures[1]
