"""Hand-computed cases and properties of the pure functions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_trainers.functional.advantages import group_advantages
from rl_trainers.functional.aggregation import denominator, token_weights
from rl_trainers.functional.divergence import gap_sums
from rl_trainers.functional.policy import clipped_policy_loss, importance_weights


def test_group_advantages_mean_std_matches_hand_computation():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    result = group_advantages(rewards, torch.tensor([7, 7, 7, 7, 3, 3]), "group_mean_std")
    # mean 1/4, sample variance (9/16 + 3/16) / 3 = 1/4
    torch.testing.assert_close(result.advantages[:4], torch.tensor([1.5, -0.5, -0.5, -0.5]), atol=1e-5, rtol=0)
    assert result.advantages[4:].tolist() == [0.0, 0.0]
    assert (result.groups, result.singletons, result.zero_variance) == (2, 0, 1)


def test_group_advantages_group_of_one_is_zero_and_counted():
    result = group_advantages(torch.tensor([5.0]), torch.tensor([0]), "group_mean_std")
    assert result.advantages.tolist() == [0.0]
    assert result.singletons == 1


def test_group_advantages_leave_one_out_is_reward_minus_mean_of_others():
    rewards = torch.tensor([1.0, 2.0, 6.0])
    result = group_advantages(rewards, torch.zeros(3, dtype=torch.int64), "leave_one_out")
    torch.testing.assert_close(result.advantages, torch.tensor([1 - 4.0, 2 - 3.5, 6 - 1.5]))


def test_group_advantages_equal_inexact_rewards_are_zero_not_noise():
    rewards = torch.full((7,), 0.1)
    result = group_advantages(rewards, torch.zeros(7, dtype=torch.int64), "group_mean_std")
    assert result.advantages.abs().max() == 0


def test_group_advantages_unknown_baseline_raises():
    with pytest.raises(ValueError, match="unknown baseline"):
        group_advantages(torch.zeros(1), torch.zeros(1, dtype=torch.int64), "median")


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-5, 5, width=32)), min_size=1, max_size=30), st.randoms())
@settings(deadline=None)
def test_group_advantages_any_order_of_rows_gives_the_same(rows, random):
    shuffled = rows[:]
    random.shuffle(shuffled)

    def by_row(items):
        group = torch.tensor([g for g, _ in items])
        reward = torch.tensor([r for _, r in items], dtype=torch.float32)
        found = group_advantages(reward, group, "group_mean_std").advantages.tolist()
        return sorted((g, r, round(a, 3)) for (g, r), a in zip(items, found, strict=True))

    for (g, r, a), (h, s, b) in zip(by_row(rows), by_row(shuffled), strict=True):
        assert (g, r) == (h, s)
        assert a == pytest.approx(b, abs=2e-3)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", (1 + 2 + 3 + 4) / 4),
        ("sequence_mean_token_mean", ((1 + 2 + 3) / 3 + 4) / 2),
        ("sequence_mean_token_sum", (1 + 2 + 3 + 4) / 2),
        ("constant_length", (1 + 2 + 3 + 4) / 10 / 2),
    ],
)
def test_aggregation_two_rows_matches_hand_computation(aggregation, expected):
    losses = torch.tensor([[9.0, 1, 2, 3], [9.0, 9.0, 4, 9.0], [9.0, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0]]).bool()
    weights = token_weights(mask, aggregation, constant_length=10)
    assert ((losses * weights).sum() / denominator(mask, aggregation)).item() == pytest.approx(expected)


def _loss(logprob, old, advantage, **bounds):
    values = [torch.tensor([float(x)]) for x in (logprob, old, advantage)]
    values[0].requires_grad_()
    loss, stats = clipped_policy_loss(*values, torch.ones(1), **({"clip_low": 0.2, "clip_high": 0.28} | bounds))
    loss.backward()
    return loss.item(), values[0].grad.item(), {k: (a / b).item() for k, (a, b) in stats.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "moves"),
    [
        (1.0, 2.0, -2.0, True),
        (1.5, 2.0, -2.56, False),
        (0.5, 2.0, -1.0, True),
        (0.5, -2.0, 1.6, False),
        (1.5, -2.0, 3.0, True),
    ],
)
def test_clipped_policy_loss_each_side_of_the_clip_matches_hand_computation(ratio, advantage, loss, moves):
    found, gradient, stats = _loss(math.log(ratio), 0.0, advantage)
    assert found == pytest.approx(loss, rel=1e-5)
    assert (gradient != 0) == moves
    assert stats["clip/high"] == float(ratio > 1.28 and advantage > 0)
    assert stats["clip/low"] == float(ratio < 0.8 and advantage < 0)


def test_clipped_policy_loss_dual_clip_bounds_the_loss_of_negative_advantages():
    found, gradient, _ = _loss(math.log(10.0), 0.0, -1.0, dual_clip=3.0)
    assert found == pytest.approx(3.0)
    assert gradient == 0


def test_clipped_policy_loss_untrained_token_may_hold_anything():
    logprobs = torch.tensor([0.0, 800.0], requires_grad=True)
    loss, _ = clipped_policy_loss(
        logprobs, torch.zeros(2), torch.ones(2), torch.tensor([1.0, 0.0]), clip_low=0.2, clip_high=0.2
    )
    loss.backward()
    assert torch.isfinite(logprobs.grad).all()
    assert logprobs.grad[1] == 0


def test_clipped_policy_loss_gradient_matches_finite_differences():
    torch.manual_seed(0)
    old, advantages = torch.randn(12, dtype=torch.float64), torch.randn(12, dtype=torch.float64)
    weights = torch.rand(12, dtype=torch.float64)
    logprobs = (old + 0.1 * torch.randn(12, dtype=torch.float64)).requires_grad_()

    def loss(x):
        return clipped_policy_loss(x, old, advantages, weights, clip_low=0.2, clip_high=0.2)[0]

    assert torch.autograd.gradcheck(loss, (logprobs,))


def test_importance_weights_above_the_cap_are_truncated_and_marked():
    weights, capped = importance_weights(torch.tensor([0.0, 2.0]), torch.zeros(2), cap=2.0)
    torch.testing.assert_close(weights, torch.tensor([1.0, 2.0]))
    assert capped.tolist() == [False, True]


def test_gap_sums_masked_tokens_do_not_count():
    ours, theirs = torch.tensor([[0.0, -1.0, 50.0]]), torch.tensor([[0.0, -1.5, 0.0]])
    sums, largest = gap_sums(ours, theirs, torch.tensor([[True, True, False]]))
    count, total, k3, *_ = sums.tolist()
    assert (count, total, largest.item()) == (2, 0.5, 0.5)
    assert k3 == pytest.approx(math.exp(-0.5) - 1 + 0.5)
