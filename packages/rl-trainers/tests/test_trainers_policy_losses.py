"""Policy losses against values computed by hand from the papers' formulas, and against finite differences."""

import math

import pytest
import torch
from policy_toys import terms_of

from rl_contracts.batch.trajectory import pack
from rl_contracts.errors import ConfigError
from rl_contracts.testing.batches import make_batch
from rl_trainers.algorithms.functional.kl import kl_estimate
from rl_trainers.algorithms.functional.policy_losses import (
    cispo_loss,
    clip_loss,
    importance_loss,
    reinforce_loss,
    sapo_loss,
)
from rl_trainers.algorithms.functional.policy_terms import policy_terms


def _single(loss, ratio, advantage, logprob=-1.0, **constants):
    """Return the loss of one token, its derivative with respect to the log-prob, and the marks."""
    leaf, terms = terms_of([ratio], [advantage], [logprob])
    losses, marks = loss(terms, **constants)
    losses.sum().backward()
    return losses.item(), leaf.grad.item(), {name: bool(mark) for name, mark in marks.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "has_gradient"),
    [
        (1.0, 2.0, -2.0, True),
        (1.5, 2.0, -2.56, False),
        (0.5, 2.0, -1.0, True),
        (0.5, -2.0, 1.6, False),
        (1.5, -2.0, 3.0, True),
    ],
)
def test_clip_loss_each_side_of_the_clip_matches_ppo_equation_7(ratio, advantage, expected, has_gradient):
    value, gradient, marks = _single(clip_loss, ratio, advantage, clip_low=0.2, clip_high=0.28)
    assert value == pytest.approx(expected)
    # where the loss is not clipped, d(-rho A) / d log pi = -rho A
    assert gradient == pytest.approx(-ratio * advantage if has_gradient else 0.0)
    assert marks["clip/high"] == (ratio > 1.28 and advantage > 0)
    assert marks["clip/low"] == (ratio < 0.8 and advantage < 0)


def test_clip_loss_dual_clip_bounds_the_loss_of_negative_advantages():
    value, gradient, marks = _single(clip_loss, 10.0, -1.0, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert (value, gradient) == (pytest.approx(3.0), 0.0)
    assert marks["clip/dual"]
    assert _single(clip_loss, 10.0, 1.0, clip_low=0.2, clip_high=0.2, dual_clip=3.0)[0] == pytest.approx(-1.2)


@pytest.mark.parametrize(
    ("loss", "constants", "message"),
    [
        (
            clip_loss,
            {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.5},
            "dual_clip: expected 0 .off. or more than 1",
        ),
        (sapo_loss, {"tau_negative": 0.0}, "tau_positive, tau_negative: expected more than 0"),
    ],
)
def test_policy_loss_invalid_constant_is_rejected(loss, constants, message):
    with pytest.raises(ConfigError, match=message):
        _single(loss, 1.0, 1.0, **constants)


def test_importance_loss_is_the_surrogate_without_a_clip():
    assert _single(importance_loss, 10.0, -1.5)[:2] == (pytest.approx(15.0), pytest.approx(15.0))


def test_reinforce_loss_does_not_depend_on_ratio():
    assert _single(reinforce_loss, 7.0, 2.0, logprob=-0.5)[:2] == (pytest.approx(1.0), pytest.approx(-2.0))


@pytest.mark.parametrize(("ratio", "weight"), [(0.01, 0.01), (1.5, 1.5), (9.0, 5.0)])
def test_cispo_loss_clips_weight_and_keeps_gradient(ratio, weight):
    value, gradient, marks = _single(cispo_loss, ratio, 2.0, logprob=-0.5, clip_low=1.0, clip_high=4.0)
    # -sg[min(rho, 5)] A log pi, MiniMax-M1 equation 4; its gradient is -min(rho, 5) A
    assert value == pytest.approx(-weight * 2.0 * -0.5)
    assert gradient == pytest.approx(-weight * 2.0)
    assert marks == {"clip/low": False, "clip/high": ratio > 5}


@pytest.mark.parametrize(("ratio", "advantage", "tau"), [(1.0, 2.0, 1.0), (1.7, 2.0, 1.0), (0.4, -1.0, 1.05)])
def test_sapo_loss_matches_soft_gate_of_paper(ratio, advantage, tau):
    value, gradient, _ = _single(sapo_loss, ratio, advantage, tau_positive=1.0, tau_negative=1.05)
    p = 1 / (1 + math.exp(-tau * (ratio - 1)))
    assert value == pytest.approx(-4 / tau * p * advantage)
    # d/d log pi = -4 p (1 - p) rho A; at rho = 1 this is the gradient of the unclipped surrogate
    assert gradient == pytest.approx(-4 * p * (1 - p) * ratio * advantage)


def test_sapo_loss_marks_tokens_whose_gradient_is_halved():
    # 4 p (1 - p) = 1/2 at p = (1 + sqrt(1/2)) / 2, which is rho = 1 + log(p / (1 - p)) = 2.763 for tau = 1
    assert not _single(sapo_loss, 2.7, 1.0, tau_positive=1.0, tau_negative=1.0)[2]["gate/closed"]
    assert _single(sapo_loss, 2.8, 1.0, tau_positive=1.0, tau_negative=1.0)[2]["gate/closed"]


@pytest.mark.parametrize(
    ("loss", "constants"),
    [
        (clip_loss, {"clip_low": 0.2, "clip_high": 0.28}),
        (clip_loss, {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 2.0}),
        (importance_loss, {}),
        (reinforce_loss, {}),
        (sapo_loss, {"tau_positive": 1.0, "tau_negative": 1.05}),
    ],
)
def test_policy_losses_gradients_match_finite_differences(loss, constants):
    generator = torch.Generator().manual_seed(0)
    old, noise, advantages = torch.randn(3, 40, generator=generator, dtype=torch.float64)
    trained = torch.ones(40, dtype=torch.bool)

    def total(logprobs):
        return loss(policy_terms(logprobs, old, advantages, trained), **constants)[0]

    assert torch.autograd.gradcheck(total, ((old + 0.3 * noise).requires_grad_(),))


def test_policy_terms_sequence_ratio_matches_gspo_equation_7():
    batch = make_batch(3, seed=4)
    packed = pack(batch)
    trained = packed["loss_mask"]
    old = packed["logprobs"].double()
    logprobs = (old + torch.linspace(-0.5, 0.7, len(old), dtype=torch.float64)).requires_grad_()
    advantages = packed["rewards"].double()[packed.sequence_of_token] + 0.5
    terms = policy_terms(logprobs, old, advantages, trained, packed)
    for row in range(3):
        in_sequence = trained & (packed.sequence_of_token == row)
        expected = (logprobs - old)[in_sequence].mean().exp()
        torch.testing.assert_close(terms.ratio[in_sequence], expected.expand(int(in_sequence.sum())))
    # the mean over the sequence of -s_t A has the same gradient as GSPO's -s A: -s A / |y| for each token
    count = packed.sequence_sums(trained.double())[packed.sequence_of_token]
    value = (importance_loss(terms)[0] / count)[trained].sum()
    (gradient,) = torch.autograd.grad(value, logprobs)
    expected = torch.where(trained, -terms.ratio.detach() * terms.advantages / count, 0.0)
    torch.testing.assert_close(gradient, expected)


def test_policy_terms_untrained_tokens_may_have_any_value():
    logprobs = torch.tensor([0.0, 800.0, -math.inf, math.nan], requires_grad=True)
    trained = torch.tensor([True, False, False, False])
    terms = policy_terms(logprobs, torch.tensor([0.0, -800.0, math.nan, 0.0]), torch.full((4,), math.nan), trained)
    assert torch.isfinite(terms.ratio).all()
    terms.advantages[0] = 1.0
    losses = [
        clip_loss(terms, clip_low=0.2, clip_high=0.2)[0],
        importance_loss(terms)[0],
        reinforce_loss(terms)[0],
        cispo_loss(terms, clip_low=1.0, clip_high=1.0)[0],
        sapo_loss(terms, tau_positive=1.0, tau_negative=1.0)[0],
    ]
    torch.stack(losses).sum().backward()
    assert logprobs.grad[0] != 0
    assert logprobs.grad[1:].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("log_ratio", "advantage"), [(100.0, 1.0), (100.0, -1.0), (-100.0, 1.0)])
def test_policy_losses_extreme_log_ratio_has_finite_gradient(log_ratio, advantage):
    old, trained = torch.tensor([-0.5, -0.5 - log_ratio]), torch.ones(2, dtype=torch.bool)
    for loss, constants in (
        (clip_loss, {"clip_low": 0.2, "clip_high": 0.28}),
        (cispo_loss, {"clip_low": 1.0, "clip_high": 4.0}),
        (sapo_loss, {}),
        (importance_loss, {}),
    ):
        leaf = torch.tensor([-0.5, -0.5], requires_grad=True)
        losses, _ = loss(policy_terms(leaf, old, torch.tensor([1.0, advantage]), trained), **constants)
        losses.sum().backward()
        assert losses.isfinite().all(), loss
        assert leaf.grad.isfinite().all(), loss
        assert leaf.grad[0] != 0, loss


def test_kl_estimate_k3_is_clipped_for_large_differences():
    d = torch.tensor([0.5, -2.0, -30.0, -100.0, 100.0], requires_grad=True)
    estimate = kl_estimate(d, torch.zeros(5), "k3")
    estimate.sum().backward()

    assert estimate.tolist() == pytest.approx([math.exp(-0.5) - 0.5, math.exp(2.0) - 3, 10.0, 10.0, 10.0])
    assert d.grad.tolist() == pytest.approx([1 - math.exp(-0.5), 1 - math.exp(2.0), 0.0, 0.0, 0.0])
