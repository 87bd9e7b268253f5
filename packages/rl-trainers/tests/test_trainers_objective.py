"""The objective of a micro-batch: it does not depend on splits or untrained tokens, and its gradient is correct."""

import math

import pytest
import torch
from policy_toys import objective, prepared_batch, total

from rl_contracts import registry
from rl_contracts.batch.trajectory import pack, select
from rl_contracts.engine import TokenOutputs
from rl_contracts.errors import ConfigError, EngineError
from rl_trainers.algorithms.config import (
    AggregationConfig,
    AlgorithmConfig,
    CorrectionConfig,
    KLConfig,
    LossConfig,
    MaskConfig,
)
from rl_trainers.algorithms.objective import effective_fraction, make_policy_loss, try_loss
from rl_trainers.learners.critic import ValueLoss

SMOOTH = {
    "clip": {},
    "dual clip": {"loss": LossConfig(options={"dual_clip": 1.5})},
    "importance": {"loss": LossConfig("importance")},
    "reinforce": {"loss": LossConfig("reinforce")},
    "sapo": {"loss": LossConfig("sapo")},
    "sequence mean token mean": {"aggregation": AggregationConfig("sequence_mean_token_mean")},
    "constant length": {"aggregation": AggregationConfig("constant_length")},
    "no correction": {"correction": CorrectionConfig("none")},
    "plain": {"correction": CorrectionConfig("plain")},
    "truncated sequences": {"correction": CorrectionConfig(level="sequence", cap=1.5)},
    "masked tokens": {"correction": CorrectionConfig("mask", floor=0.7, cap=1.5)},
    "masked geometric means": {"correction": CorrectionConfig("mask", level="geometric", cap=1.1)},
    "sequence mask": {"mask": MaskConfig("ratio", level="sequence")},
    "divergence": {"mask": MaskConfig("divergence", options={"bound": 0.05, "over": "mean"})},
    "floor and cap": {"correction": CorrectionConfig(floor=0.8, cap=1.2)},
    "two masks": {"mask": MaskConfig("ratio+second_moment", low=0.9, high=1.1)},
    "kl k3": {"kl": KLConfig("loss", 0.3, "k3")},
    "weighted kl k1": {"kl": KLConfig("loss", 0.3, "k1", weighted=True)},
    "entropy": {"entropy_coef": 0.2},
    "behavior": {"proximal": "behavior"},
}
"""Compositions whose gradient is the derivative of their value."""
SURROGATE = {
    "gspo": {"ratio": "sequence", "loss": LossConfig(clip_low=0.05, clip_high=0.05)},
    "sapo of sequences": {"loss": LossConfig("sapo"), "ratio": "sequence"},
    "cispo": {"loss": LossConfig("cispo", clip_low=1.0, clip_high=0.3)},
    "interpolate": {"proximal": "interpolate"},
}
"""Compositions with a factor that is detached, so the gradient is not the derivative of their value."""
ALL = SMOOTH | SURROGATE
EACH_KIND = ("clip", "sapo", "masked geometric means", "two masks", "weighted kl k1", "kl k3", "entropy", "behavior")
"""Compositions that together use every kind of component."""
WHOLE = [range(9)]


@pytest.mark.guarantee(
    "Value, gradient and statistics of the policy losses are the same for every split into micro-batches.",
    area="layout",
)
@pytest.mark.parametrize("name", ALL)
def test_objective_any_split_and_order_gives_the_same(name):
    config = AlgorithmConfig(**ALL[name])
    batch = prepared_batch(config)
    loss, gradient, stats = objective(batch, config, WHOLE)
    assert gradient.abs().sum() > 0
    for splits in ([[8, 1], [0], [], [2, 3, 4], [7, 6, 5]], [[row] for row in reversed(range(9))]):
        other, other_gradient, other_stats = objective(batch, config, splits)
        torch.testing.assert_close(other, loss, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(other_gradient, gradient, rtol=1e-10, atol=1e-12)
        assert other_stats == pytest.approx(stats, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", [*EACH_KIND, "truncated sequences", "sequence mask", "divergence", *SURROGATE])
def test_objective_untrained_tokens_may_have_any_value(name):
    config = AlgorithmConfig(**ALL[name])
    batch = prepared_batch(config)
    loss, gradient, stats = objective(batch, config, WHOLE)
    untrained = ~batch["loss_mask"]
    # these tests compute the entropy from theta, so a NaN in theta would make the entropy NaN
    extreme_values = (800.0 if config.entropy_coef else math.nan, math.inf, -math.inf, math.nan)
    for value, key in zip(extreme_values, ("theta", "prox_logprobs", "ref_logprobs", "advantages"), strict=True):
        batch[key][untrained] = value
    batch["moment_dropped"][untrained] = True
    other, other_gradient, other_stats = objective(batch, config, WHOLE)
    torch.testing.assert_close(other, loss)
    torch.testing.assert_close(other_gradient, gradient)
    assert other_stats == pytest.approx(stats)


@pytest.mark.parametrize("name", EACH_KIND)
def test_objective_gradient_matches_finite_differences(name):
    config = AlgorithmConfig(**SMOOTH[name])
    batch = prepared_batch(config, rows=4)
    loss = make_policy_loss(config, minibatches=2)

    def value(theta):
        return loss(*_outputs(batch, theta))[0]

    assert torch.autograd.gradcheck(value, (batch["theta"].clone().requires_grad_(),), atol=1e-6)


def _outputs(batch, theta):
    logprobs = theta[batch["attention_mask"]]
    return TokenOutputs(logprobs, -0.5 * logprobs.sin()), pack(batch)


def test_value_loss_any_split_gives_the_same():
    batch = prepared_batch(AlgorithmConfig())
    whole = total(ValueLoss(0.2), batch, WHOLE, 10.0)
    split = total(ValueLoss(0.2), batch, [[8, 1], [0], [], [2, 3, 4], [7, 6, 5]], 10.0)
    torch.testing.assert_close(split[0], whole[0])
    torch.testing.assert_close(split[1], whole[1])
    assert split[2] == pytest.approx(whole[2])


def _one_sequence(**settings):
    """Return the objective of the first sequence, with the entries of its trained tokens as lists."""
    config = AlgorithmConfig(**settings)
    batch = select(prepared_batch(config), [0])
    loss, stats = make_policy_loss(config, minibatches=2)(*_outputs(batch, batch["theta"]))
    trained = batch["loss_mask"]
    names = ("theta", "prox_logprobs", "logprobs", "ref_logprobs", "advantages", "loss_weights")
    return loss.item(), stats, [batch[name][trained].tolist() for name in names]


def test_objective_is_weighted_sum_of_its_terms():
    kl = KLConfig("loss", 0.3, "k2")
    loss, _, columns = _one_sequence(
        correction=CorrectionConfig(cap=1.2), kl=kl, entropy_coef=0.2, loss=LossConfig(clip_low=0.2, clip_high=0.28)
    )
    expected = 0.0
    for theta, old, behavior, reference, advantage, weight in zip(*columns, strict=True):
        ratio, correction = math.exp(theta - old), min(math.exp(old - behavior), 1.2)
        surrogate = min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
        entropy = -0.5 * math.sin(theta)
        expected += weight * (-correction * surrogate + 0.3 * (theta - reference) ** 2 / 2 - 0.2 * entropy)
    assert loss == pytest.approx(expected)


def test_objective_statistics_match_hand_computation():
    _, stats, (theta, old, behavior, reference, *_) = _one_sequence(correction=CorrectionConfig(cap=1.2))
    metrics = {name: float(a) / float(b) for name, (a, b) in stats.items() if not name.endswith("/max")}
    effective_fraction(metrics)
    count = len(theta)
    weights = [min(math.exp(o - b), 1.2) * math.exp(t - o) for t, o, b in zip(theta, old, behavior, strict=True)]
    assert metrics["weight/effective"] == pytest.approx(sum(weights) ** 2 / sum(w * w for w in weights) / count)
    d = [b - t for t, b in zip(theta, behavior, strict=True)]
    assert metrics["kl/beh_k1"] == pytest.approx(sum(d) / count)
    assert metrics["kl/beh_k3"] == pytest.approx(sum(math.exp(-x) - 1 + x for x in d) / count)
    d = [t - r for t, r in zip(theta, reference, strict=True)]
    assert metrics["kl/ref_k3"] == pytest.approx(sum(math.exp(-x) - 1 + x for x in d) / count)
    capped = sum(math.exp(o - b) > 1.2 for o, b in zip(old, behavior, strict=True))
    assert metrics["correction/capped"] == pytest.approx(capped / count)


def test_objective_sequence_mask_drops_and_counts_whole_sequences():
    config = AlgorithmConfig(mask=MaskConfig("ratio", low=0.99, high=1.01))
    batch = prepared_batch(config)
    _, gradient, stats = objective(batch, config, WHOLE)
    trained = batch["loss_mask"]
    log_ratio = torch.where(trained, batch["prox_logprobs"] - batch["logprobs"], 0.0)
    mean = log_ratio.sum(-1) / trained.sum(-1).clamp(min=1)
    dropped = (mean.exp() < 0.99) | (mean.exp() > 1.01)
    assert dropped.sum() > 0
    assert gradient[dropped].abs().max() == 0
    assert stats["correction/masked"] == pytest.approx(float(trained[dropped].sum() / trained.sum()))


def test_objective_entropy_bonus_without_gradient_is_rejected():
    config = AlgorithmConfig(entropy_coef=0.1)
    batch = prepared_batch(config)
    outputs, packed = _outputs(batch, batch["theta"].clone().requires_grad_())
    outputs.entropy = outputs.entropy.detach()
    with pytest.raises(EngineError, match="entropy_grad=true"):
        make_policy_loss(config, minibatches=2)(outputs, packed)


def test_effective_fraction_zero_weights_give_zero():
    metrics = {"weight/mean": 0.0, "weight/square": 0.0, "loss": 1.0}
    effective_fraction(metrics)
    assert metrics == {"weight/effective": 0.0, "loss": 1.0}


def test_try_loss_accepts_all_installed_losses():
    kinds = registry.available("rl.policy_losses")
    assert {"clip", "importance", "cispo", "sapo", "reinforce"} <= set(kinds)
    for kind in kinds:
        try_loss(registry.load_component(LossConfig(kind)))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda terms: (terms.ratio.detach() * terms.advantages, {}), "algorithm.loss: the losses have no gradient"),
        (lambda terms: terms.ratio, "algorithm.loss: .*found Tensor"),
    ],
)
def test_try_loss_wrong_shape_or_missing_gradient_is_rejected(loss, message):
    with pytest.raises(ConfigError, match=message):
        try_loss(loss)
