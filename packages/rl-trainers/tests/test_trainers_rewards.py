"""Reward shaping, and generalized advantage estimation against its recursion."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_trainers.algorithms.functional.advantages import gae, group_by_id, normalize, reverse_discounted_sum
from rl_trainers.algorithms.functional.reward_shaping import (
    overlong_penalty,
    shape,
    terminal_rewards,
    to_trained_tokens,
)
from rl_trainers.algorithms.functional.value_and_preference_losses import (
    clipped_value_loss,
    explained_variance,
    variance_sums,
)


def test_overlong_penalty_matches_dapo_equation_13():
    lengths = torch.tensor([3, 16, 18, 20, 25])
    penalty = overlong_penalty(lengths, maximum=20, cache=4)
    assert penalty.tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]


def test_shape_scales_then_shifts_then_clips():
    shaped = shape(torch.tensor([0.0, 1.0, 3.0]), scale=2.0, bias=-1.0, clip=4.0)
    assert shaped.tolist() == [-1.0, 1.0, 4.0]
    assert shape(torch.tensor([3.0]), 2.0, -1.0, 0.0).tolist() == [5.0]


def test_normalize_over_batch_and_groups_matches_hand_computation():
    rewards = torch.tensor([1.0, 3.0, 5.0, 5.0])
    groups, batch = group_by_id(rewards, torch.tensor([0, 0, 1, 1])), group_by_id(rewards)
    # mean 3.5, sample variance (6.25 + 0.25 + 2.25 + 2.25) / 3 = 11 / 3
    expected = torch.tensor([-2.5, -0.5, 1.5, 1.5]) / math.sqrt(11 / 3)
    torch.testing.assert_close(normalize(rewards, batch, batch), expected, atol=1e-5, rtol=0)
    expected = torch.tensor([-1.0, 1.0, 0.0, 0.0]) / math.sqrt(2)
    torch.testing.assert_close(normalize(rewards, groups, groups), expected, atol=1e-5, rtol=0)
    alone = torch.tensor([7.0])
    assert normalize(alone, group_by_id(alone), group_by_id(alone)).tolist() == [0.0]


def test_terminal_rewards_are_on_last_trained_token():
    mask = torch.tensor([[0, 1, 1, 0, 0], [1, 0, 1, 1, 0], [0, 0, 0, 0, 0]]).bool()
    token_rewards = terminal_rewards(torch.tensor([2.0, -1.0, 5.0]), mask)
    assert token_rewards.tolist() == [[0, 0, 2, 0, 0], [0, 0, 0, -1, 0], [0, 0, 0, 0, 0]]


def test_to_trained_tokens_moves_rewards_to_trained_token_before():
    mask = torch.tensor([[0, 1, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0]]).bool()
    values = torch.tensor([[1.0, 2.0, 3.0, 0.0, 5.0, 7.0], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    # rewards before the first trained token go to that token; a sequence without trained tokens has no rewards
    assert to_trained_tokens(values, mask).tolist() == [[0, 6, 0, 0, 12, 0], [0] * 6]


def _recursion(rewards, values, mask, gamma, lam):
    """Return GAE of one sequence by the backward recursion over its trained tokens."""
    advantage, next_value, advantages = 0.0, 0.0, [0.0] * len(mask)
    for t in reversed(range(len(mask))):
        if mask[t]:
            delta = rewards[t] + gamma * next_value - values[t]
            advantage = delta + gamma * lam * advantage
            next_value, advantages[t] = values[t], advantage
    return advantages


def test_gae_masked_token_between_matches_hand_computation():
    rewards = torch.tensor([[0.0, 0.0, 9.0, 1.0]])
    values = torch.tensor([[9.0, 0.5, 9.0, 0.8]])
    mask = torch.tensor([[False, True, False, True]])
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.5)
    # delta_1 = 1 - 0.8 = 0.2; delta_0 = 0.9 * 0.8 - 0.5 = 0.22; A_0 = 0.22 + 0.45 * 0.2 = 0.31
    torch.testing.assert_close(advantages, torch.tensor([[0.0, 0.31, 0.0, 0.2]]))
    torch.testing.assert_close(returns, torch.tensor([[0.0, 0.81, 0.0, 1.0]]))


@given(
    st.integers(1, 30), st.integers(0, 2**31), st.sampled_from([0.0, 0.5, 0.97, 1.0]), st.sampled_from([0.0, 0.9, 1.0])
)
@settings(deadline=None, max_examples=60)
def test_gae_any_mask_equals_the_recursion(width, seed, gamma, lam):
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 3, width, generator=generator)
    mask = torch.rand(3, width, generator=generator) < 0.6
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    for row in range(3):
        expected = torch.tensor(_recursion(rewards[row].tolist(), values[row].tolist(), mask[row].tolist(), gamma, lam))
        torch.testing.assert_close(advantages[row], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(returns, torch.where(mask, advantages + values, 0.0), rtol=1e-4, atol=1e-5)


def test_gae_turns_have_one_advantage_each():
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1]]).bool()
    rewards = torch.tensor([[9.0, 0.25, 0.25, 9.0, 0.0, 0.0, 1.0]])
    values = torch.tensor([[9.0, 0.3, 7.0, 9.0, 0.6, 7.0, 7.0]])
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=1.0, unit="turn")
    # turns: (reward 0.5, value 0.3), (reward 1, value 0.6): delta 0.4; 0.5 + 0.5 * 0.6 - 0.3 = 0.5, plus 0.5 * 0.4
    torch.testing.assert_close(advantages, torch.tensor([[0.0, 0.7, 0.7, 0.0, 0.4, 0.4, 0.4]]))
    torch.testing.assert_close(returns, torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0]]))


def test_reverse_discounted_sum_empty_batch_is_empty():
    assert reverse_discounted_sum(torch.zeros(0, 4), 0.9).shape == (0, 4)
    assert gae(torch.zeros(0, 1), torch.zeros(0, 1), torch.zeros(0, 1).bool(), 1.0, 1.0)[0].shape == (0, 1)


def test_clipped_value_loss_takes_the_larger_error():
    values = torch.tensor([1.0, 0.5, 3.0], requires_grad=True)
    old, returns = torch.tensor([0.0, 0.5, 0.0]), torch.tensor([2.0, 1.0, 3.0])
    losses, clipped = clipped_value_loss(values, old, returns, clip=0.2)
    # clipped values 0.2, 0.5, 0.2: errors max(1, 3.24), 0.25, max(0, 7.84), halved
    torch.testing.assert_close(losses, torch.tensor([1.62, 0.125, 3.92]))
    assert clipped.tolist() == [True, False, True]
    losses.sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([0.0, -0.5, 0.0]))
    torch.testing.assert_close(clipped_value_loss(values, old, returns, 0.0)[0], torch.tensor([0.5, 0.125, 0.0]))


def test_clipped_value_loss_gradient_matches_finite_differences():
    generator = torch.Generator().manual_seed(0)
    old, noise, returns = torch.randn(3, 30, generator=generator, dtype=torch.float64)
    values = (old + 0.3 * noise).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: clipped_value_loss(v, old, returns, 0.2)[0], (values,))


def test_explained_variance_matches_hand_computation():
    returns, mask = torch.tensor([1.0, 3.0, 5.0]), torch.ones(3).bool()
    assert explained_variance(variance_sums(returns + 7, returns, mask)) == pytest.approx(1.0)
    assert explained_variance(variance_sums(torch.full((3,), 3.0), returns, mask)) == pytest.approx(0.0)
    # errors 1, 0, -1: variance 2/3 of 8/3
    assert explained_variance(variance_sums(torch.tensor([0.0, 3.0, 6.0]), returns, mask)) == pytest.approx(0.75)
    assert explained_variance(variance_sums(returns, torch.ones(3), mask)) is None
    assert explained_variance(variance_sums(returns, returns, torch.zeros(3).bool())) is None
