"""The policy actor on the reference engine: its computations, and their independence of the split of a batch."""

import pytest
import torch

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.batch.redistribution import shard_batch
from rl_contracts.batch.trajectory import load_batch, save_batch, select
from rl_contracts.config import OptimizerConfig
from rl_contracts.data import FinetuneSpec
from rl_contracts.engine import TokenOutputs
from rl_contracts.errors import ConfigError, DataError, EngineError
from rl_contracts.testing import ReferenceTrainEngine
from rl_contracts.testing.batches import make_batch
from rl_contracts.testing.models import make_tiny_model
from rl_trainers import Critic, PolicyActor, replay_batch
from rl_trainers.algorithms.config import (
    AdvantageConfig,
    AggregationConfig,
    AlgorithmConfig,
    CorrectionConfig,
    KLConfig,
    LossConfig,
    MaskConfig,
    RewardConfig,
)
from rl_trainers.algorithms.functional.kl import k3
from rl_trainers.run_log.run_log import COMPUTED, batch_metrics


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, hidden=32)


@pytest.fixture
def engine(model_path):
    engine = ReferenceTrainEngine()
    engine.initialize(FinetuneSpec(str(model_path), 10, optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.0)))
    yield engine
    engine.destroy()


def _batch(rows=8, minibatches=1, **kwargs):
    return shard_batch(make_batch(rows, **kwargs).exclude("advantages"), ParallelContext(), minibatches)


def test_actor_prepare_tokens_of_later_version_are_rejected(engine):
    with pytest.raises(DataError, match="version 0"):
        PolicyActor(engine, AlgorithmConfig()).prepare(_batch(version=3))


def test_actor_prepare_staleness_coefficient_reduces_old_weights(engine):
    engine.version = 2
    batch = _batch(version=0)
    PolicyActor(engine, AlgorithmConfig(staleness_coef=0.5)).prepare(batch)
    weights = batch["loss_weights"][batch["loss_mask"]]
    torch.testing.assert_close(weights, torch.full_like(weights, torch.tensor(-1.0).exp().item()))


def test_actor_recompute_and_current_proximal_give_the_same_first_step(model_path):
    losses = []
    for proximal in ("recompute", "current"):
        engine = ReferenceTrainEngine()
        engine.initialize(FinetuneSpec(str(model_path), 10, optimizer=OptimizerConfig(lr=1e-3)))
        actor = PolicyActor(engine, AlgorithmConfig(proximal=proximal))
        batch = _batch()
        actor.prepare(batch)
        stats = actor.update(batch)
        losses.append((stats["loss"], stats["grad_norm"], stats["correction/mean"]))
        engine.destroy()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_actor_current_proximal_with_several_minibatches_is_rejected(engine):
    with pytest.raises(ConfigError, match=r"algorithm\.proximal"):
        PolicyActor(engine, AlgorithmConfig(proximal="current"), minibatches=2)


def test_replay_batch_gives_metrics_of_original_step(model_path, tmp_path):
    metrics = []
    for source in ("run", "replay"):
        engine = ReferenceTrainEngine()
        engine.initialize(FinetuneSpec(str(model_path), 10, optimizer=OptimizerConfig(lr=1e-3)))
        actor = PolicyActor(engine, AlgorithmConfig(), minibatches=2)
        if source == "run":
            batch_on_disk = make_batch(8).exclude("advantages")
            save_batch(batch_on_disk, tmp_path / "b.safetensors")
            batch = shard_batch(load_batch(tmp_path / "b.safetensors"), ParallelContext(), 2)
            metrics.append(actor.prepare(batch) | actor.update(batch))
        else:
            metrics.append(replay_batch(actor, tmp_path / "b.safetensors"))
        engine.destroy()
    assert metrics[0] == metrics[1]


M2PO = {
    "loss": LossConfig("importance"),
    "correction": CorrectionConfig("plain"),
    "mask": MaskConfig("second_moment", threshold=0.04),
}
COMPOSITIONS = {
    "kl in the reward": {
        "kl": KLConfig("reward", 0.1, "k1"),
        "advantage": AdvantageConfig(std="none", leave_one_out=True),
    },
    "second moment": M2PO,
    "gae, sequence ratio": {"advantage": AdvantageConfig("gae", whiten=True), "ratio": "sequence"},
}


class ValueEngine(ReferenceTrainEngine):
    """A reference engine with a value head, a weighted sum of the logits before each token."""

    def initialize(self, spec):
        super().initialize(spec)
        torch.manual_seed(7)
        self.value_head = torch.nn.Parameter(0.1 * torch.randn(self.model.config.vocab_size))
        self._optimizer.add_param_group({"params": [self.value_head], "weight_decay": 0.0})

    def _row(self, ids, temperature):
        logits = self.model(input_ids=ids[None]).logits[0].float()
        values = torch.cat([torch.zeros(1), (logits[:-1] @ self.value_head) / 10])
        return values, torch.zeros_like(values)

    def _run(self, batch):
        for rows, outputs, packed in super()._run(batch):
            zeros = torch.zeros_like(outputs.entropy)
            yield rows, TokenOutputs(zeros, zeros, outputs.logprobs), packed


def _engine_of(kind, path):
    engine = kind()
    engine.initialize(FinetuneSpec(str(path), 20, optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.0)))
    return engine


def _full_actor(model_path, reference_path, minibatches=1, **settings):
    algorithm = AlgorithmConfig(**settings)
    reference = _engine_of(ReferenceTrainEngine, reference_path) if algorithm.needs_reference else None
    critic = Critic(_engine_of(ValueEngine, model_path), 0.2, minibatches) if algorithm.needs_critic else None
    return PolicyActor(_engine_of(ReferenceTrainEngine, model_path), algorithm, minibatches, reference, critic)


@pytest.fixture(scope="module")
def other_path(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("other"), layers=1, hidden=32, seed=9)


@pytest.mark.parametrize(
    "name", [next(iter(COMPOSITIONS)), *(pytest.param(n, marks=pytest.mark.slow) for n in [*COMPOSITIONS][1:])]
)
def test_actor_order_of_sequences_does_not_change_metrics(name, model_path, other_path):
    results = []
    whole = make_batch(8).exclude("advantages")
    for order in (list(range(8)), [5, 2, 7, 0, 1, 3, 6, 4]):
        actor = _full_actor(model_path, other_path, 2, **COMPOSITIONS[name])
        batch = shard_batch(select(whole, order), ParallelContext(), 2)
        stats = actor.prepare(batch) | actor.update(batch)
        results.append(stats)
    assert results[1] == pytest.approx(results[0], rel=1e-4, abs=1e-5)


def test_actor_reference_logprobs_come_from_reference_model(model_path, other_path):
    actor = _full_actor(model_path, other_path, kl=KLConfig("loss", 0.1, "k3"))
    batch = _batch()
    actor.prepare(batch)
    policy_logprobs = actor.engine.forward(batch, lambda outputs, _: outputs.logprobs)
    learn = batch["loss_mask"]
    assert (batch["ref_logprobs"] - policy_logprobs)[learn].abs().min() > 0
    before = batch["ref_logprobs"].clone()
    stats = actor.update(batch)
    assert stats["kl/ref_k3"] == pytest.approx(_k3(policy_logprobs - before, learn), rel=1e-4)
    actor.prepare(batch)
    torch.testing.assert_close(batch["ref_logprobs"], before)


def _k3(d, learn):
    return float(k3(d)[learn].mean())


@pytest.mark.slow
def test_actor_kl_in_the_loss_pulls_the_policy_to_the_reference(model_path, other_path):
    distances = []
    actor = _full_actor(
        model_path,
        other_path,
        kl=KLConfig("loss", 1.0, "k3"),
        loss=LossConfig("importance"),
        correction=CorrectionConfig("none"),
    )
    batch = _batch()
    batch["rewards"][:] = 0.0
    for _ in range(5):
        batch["versions"] = torch.where(batch["versions"] >= 0, actor.version, -1).int()
        actor.prepare(batch)
        distances.append(actor.update(batch)["kl/ref_k3"])
    assert distances[-1] < 0.8 * distances[0]


def test_actor_kl_in_reward_adds_penalty_to_go_to_advantage(model_path, other_path):
    actor = _full_actor(model_path, other_path, kl=KLConfig("reward", 0.5, "k1"), advantage=AdvantageConfig("return"))
    batch = _batch(rows=4)
    actor.prepare(batch)
    learn = batch["loss_mask"]
    penalty = torch.where(learn, -0.5 * (batch["logprobs"] - batch["ref_logprobs"]), 0.0)
    to_go = penalty.flip(-1).cumsum(-1).flip(-1) + batch["rewards"][:, None]
    torch.testing.assert_close(batch["advantages"], torch.where(learn, to_go, 0.0), rtol=1e-4, atol=1e-4)


def test_actor_distillation_moves_the_policy_to_its_teacher(model_path, other_path):
    actor = _full_actor(
        model_path,
        other_path,
        advantage=AdvantageConfig("return", gamma=0.0),
        loss=LossConfig("importance"),
        reward=RewardConfig(scale=0.0),
        kl=KLConfig("reward", 1.0, "k1"),
    )
    batch = _batch()
    learn = batch["loss_mask"]
    batch["logprobs"] = actor.engine.forward(batch, lambda outputs, _: outputs.logprobs)
    actor.prepare(batch)
    gap = batch["ref_logprobs"] - batch["logprobs"]
    torch.testing.assert_close(batch["advantages"], torch.where(learn, gap, 0.0), rtol=1e-4, atol=1e-4)
    actor.update(batch)
    after = actor.engine.forward(batch, lambda outputs, _: outputs.logprobs)
    moved = (after - batch["logprobs"])[learn]
    assert float((moved * gap[learn]).mean()) > 0


def test_actor_custom_loss_reads_entropy(engine, monkeypatch):
    entropies = []

    def entropy_recording_loss(terms):
        entropies.append(terms.entropy)
        return -terms.ratio * terms.advantages, {}

    monkeypatch.setattr(
        "rl_trainers.algorithms.functional.policy_losses.entropy_recording_loss", entropy_recording_loss, raising=False
    )
    batch = _batch()
    expected = engine.forward(batch, lambda outputs, _: outputs.entropy)
    loss = LossConfig("rl_trainers.algorithms.functional.policy_losses:entropy_recording_loss")
    actor = PolicyActor(engine, AlgorithmConfig(loss=loss))
    actor.prepare(batch)
    entropies.clear()
    actor.update(batch)

    assert float(torch.cat(entropies).sum()) == pytest.approx(float(expected[batch["loss_mask"]].sum()), rel=1e-4)


def test_actor_overlong_penalty_counts_the_generated_tokens_of_an_episode(engine):
    settings = RewardConfig(overlong_max=10, overlong_cache=5)
    batch = _batch(rows=4)
    batch["group_ids"][:] = torch.arange(4)
    actor = PolicyActor(engine, AlgorithmConfig(advantage=AdvantageConfig("return"), reward=settings))
    actor.prepare(batch)
    length = (batch["versions"] >= 0).sum(-1)
    expected = batch["rewards"] + ((5 - length) / 5).clamp(-1, 0)
    for row in range(4):
        assert (batch["advantages"][row][batch["loss_mask"][row]] - expected[row]).abs().max() < 1e-6


def test_actor_overlong_penalty_counts_shared_tokens_once(engine):
    batch = _batch(rows=1)
    whole, learn = select(batch, [0]), batch["loss_mask"]
    first = learn & (learn.cumsum(-1) <= 2)
    rows = torch.cat([whole, select(batch, [0])])
    rows["loss_mask"] = torch.cat([first, learn & ~first])
    reward = RewardConfig(overlong_max=40, overlong_cache=40)
    actor = PolicyActor(engine, AlgorithmConfig(advantage=AdvantageConfig("return"), reward=reward))
    actor.prepare(rows)

    expected = batch["rewards"][0] - learn.sum() / 40
    assert rows["advantages"][rows["loss_mask"]].numpy() == pytest.approx(float(expected))


def test_actor_turn_rewards_reach_the_tokens_before_them(engine):
    batch = _batch(rows=2)
    batch["rewards"][:] = 0.0
    batch["token_rewards"] = torch.zeros(batch["input_ids"].shape)
    last = int(batch["attention_mask"][0].sum()) - 1
    batch["token_rewards"][0, last] = 3.0
    PolicyActor(engine, AlgorithmConfig(advantage=AdvantageConfig("return"))).prepare(batch)
    assert (batch["advantages"][0][batch["loss_mask"][0]] == 3.0).all()
    assert batch["advantages"][1].abs().max() == 0


def test_actor_turn_rewards_unread_by_estimator_are_rejected(engine):
    batch = _batch(rows=2)
    batch["token_rewards"] = torch.zeros(batch["input_ids"].shape)
    with pytest.raises(DataError, match=r"algorithm\.advantage\.kind=outcome"):
        PolicyActor(engine, AlgorithmConfig()).prepare(batch)


def test_summary_staleness_fractions_count_trained_tokens():
    batch = _batch()
    generated = batch["versions"] >= 0
    batch["versions"] = torch.where(generated, torch.arange(len(batch))[:, None] % 3 * 3, -1).int()
    metrics = batch_metrics(batch, 6).results()
    age = 6 - batch["versions"][batch["loss_mask"]]
    for name, has_age in (("0", age == 0), ("3", age == 3), ("4_and_more", age == 6)):
        assert metrics[f"staleness/fraction_{name}"] == pytest.approx(float(has_age.float().mean()))
    assert metrics["staleness/fraction_1"] == 0


def test_actor_second_moment_mask_bounds_each_minibatch(engine):
    threshold = 0.5
    algorithm = AlgorithmConfig(**M2PO | {"mask": MaskConfig("second_moment", threshold=threshold)})
    batch = _batch(minibatches=2)
    actor = PolicyActor(engine, algorithm, minibatches=2)
    actor.prepare(batch)
    log_ratio, retained = batch["prox_logprobs"] - batch["logprobs"], ~batch["moment_dropped"]
    in_trust_region = batch["loss_mask"] & (log_ratio * batch["advantages"] > 0)
    assert retained[~in_trust_region].all()
    assert not retained[in_trust_region].all()
    for number in range(2):
        chosen = in_trust_region & retained & (batch["minibatch"] == number)[:, None]
        assert not chosen.any() or log_ratio[chosen].double().square().mean() <= threshold + 1e-6
    stats = actor.update(batch)
    assert 0 < stats["correction/masked"] < 1


def test_actor_without_required_reference_or_critic_is_rejected(engine):
    with pytest.raises(ConfigError, match=r"algorithm\.kl\.place=loss .*`reference` is None"):
        PolicyActor(engine, AlgorithmConfig(kl=KLConfig("loss", 0.1)))
    with pytest.raises(ConfigError, match=r"algorithm\.advantage\.kind=gae .*`critic` is None"):
        PolicyActor(engine, AlgorithmConfig(advantage=AdvantageConfig("gae")))
    with pytest.raises(ConfigError, match="constant_length"):
        PolicyActor(engine, AlgorithmConfig(aggregation=AggregationConfig("constant_length")))


@pytest.mark.slow
def test_critic_learns_returns_and_reports_explained_variance(model_path, other_path):
    actor = _full_actor(model_path, other_path, advantage=AdvantageConfig("gae"))
    batch = _batch(rows=6)
    explained_variances = []
    for _ in range(12):
        batch["versions"] = torch.where(batch["versions"] >= 0, actor.version, -1).int()
        metrics = actor.prepare(batch) | actor.update(batch)
        explained_variances.append(metrics["critic/explained_variance"])
    assert explained_variances[-1] > explained_variances[0] + 0.2
    assert actor.critic.engine.version == actor.version == 12
    assert metrics["critic/applied"] == 1.0
    learn = batch["loss_mask"]
    torch.testing.assert_close(batch["returns"][learn], (batch["rewards"][:, None].expand_as(learn))[learn])


def test_critic_on_engine_without_values_raises(engine):
    with pytest.raises(EngineError, match="head=value"):
        Critic(engine).values(_batch())


def test_critic_negative_clip_is_rejected(model_path):
    with pytest.raises(ConfigError, match=r"critic\.clip"):
        Critic(_engine_of(ValueEngine, model_path), clip=-1.0)


def test_prepared_entries_are_all_listed_in_run_log(model_path, other_path):
    initial_keys = set(_batch().keys())
    added_keys = set()
    for settings in (
        {"advantage": AdvantageConfig("gae")},
        {"kl": KLConfig("loss", 0.1)} | M2PO,
        {"proximal": "interpolate"},
    ):
        batch = _batch(version=1)
        actor = _full_actor(model_path, other_path, **settings)
        actor.engine.version = 3
        actor.prepare(batch)
        added_keys |= set(batch.keys()) - initial_keys
    assert added_keys <= set(COMPUTED)
    assert (batch["staleness"][batch["loss_mask"]] == 2).all()


def test_actor_prompt_mean_weighs_groups_equally(engine):
    batch, minibatches = _batch(rows=6), 2
    batch["group_ids"] = torch.tensor([7, 7, 7, 3, 3, 3])
    algorithm = AlgorithmConfig(aggregation=AggregationConfig("prompt_mean"))
    actor = PolicyActor(engine, algorithm, minibatches=minibatches)
    batch["minibatch"] = torch.arange(6) % minibatches
    actor.prepare(batch)

    weights, learn = batch["loss_weights"], batch["loss_mask"]
    assert [float(weights[batch["group_ids"] == group].sum()) for group in (7, 3)] == pytest.approx([1.0, 1.0])
    contributions = [
        actor._denominator(select(batch, (batch["minibatch"] == m).nonzero().flatten())) for m in range(minibatches)
    ]
    assert float(sum(contributions)) == pytest.approx(2.0)
    assert bool((weights[~learn] == 0).all())
