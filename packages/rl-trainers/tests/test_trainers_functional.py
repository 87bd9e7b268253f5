"""Hand-computed cases and properties of advantages and aggregation."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_trainers.algorithms.credit import normalization_scope
from rl_trainers.algorithms.functional.advantages import group_by_id, moments, normalize, whiten
from rl_trainers.algorithms.functional.aggregation import denominator, token_weights

GROUP_SETTINGS = ({}, {"std": "none"}, {"std": "batch"}, {"std": "none", "leave_one_out": True})
"""Settings of GRPO, Dr. GRPO, LitePPO and RLOO."""


def _advantages(rewards, group_ids, mean="group", std="group", leave_one_out=False):
    scopes = normalization_scope(rewards, group_ids)
    return normalize(rewards, scopes[mean], scopes[std], leave_one_out)


def test_advantages_group_mean_std_matches_hand_computation():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    advantages = _advantages(rewards, torch.tensor([7, 7, 7, 7, 3, 3]))
    # mean 1/4, sample variance (9/16 + 3/16) / 3 = 1/4
    torch.testing.assert_close(advantages[:4], torch.tensor([1.5, -0.5, -0.5, -0.5]), atol=1e-5, rtol=0)
    assert advantages[4:].tolist() == [0.0, 0.0]


def test_advantages_mean_of_unequal_groups_matches_hand_computation():
    rewards = torch.tensor([1.0, 0.0, 0.0, 2.0, 4.0])
    advantages = _advantages(rewards, torch.tensor([0, 1, 0, 1, 1]), std="none")
    torch.testing.assert_close(advantages, torch.tensor([0.5, -2.0, -0.5, 0.0, 2.0]))


def test_advantages_any_scopes_of_mean_and_std_match_hand_computation():
    rewards, ids = torch.tensor([3.0, 1.0, 0.0, 4.0]), torch.tensor([0, 0, 1, 1])
    means = {"none": torch.zeros(4), "group": torch.tensor([2.0] * 4), "batch": torch.tensor([2.0] * 4)}
    # groups: sample variances 2 and 8; all: (1 + 1 + 4 + 4) / 3
    stds = {"none": torch.ones(4), "group": torch.tensor([2, 2, 8, 8]).sqrt(), "batch": torch.tensor(10 / 3).sqrt()}
    for mean, std in product(means, stds):
        expected = (rewards - means[mean]) / stds[std]
        torch.testing.assert_close(_advantages(rewards, ids, mean, std), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("over", GROUP_SETTINGS)
def test_advantages_group_of_one_or_without_variance_is_zero(over):
    assert _advantages(torch.tensor([5.0, 2.0]), torch.tensor([0, 1]), **over).tolist() == [0.0, 0.0]
    assert _advantages(torch.full((4,), 0.7), torch.tensor([0, 0, 1, 1]), **over).tolist() == [0.0] * 4


def test_group_by_id_counts_and_marks_groups_without_variance():
    groups = group_by_id(torch.tensor([5.0, 0.7, 0.7, 1.0, 2.0]), torch.tensor([3, 8, 8, 9, 9]))
    assert groups.size.tolist() == [1.0, 2.0, 2.0]
    assert groups.is_constant.tolist() == [True, True, False]


def test_advantages_leave_one_out_is_reward_minus_mean_of_others():
    rewards = torch.tensor([1.0, 2.0, 6.0])
    advantages = _advantages(rewards, torch.zeros(3, dtype=torch.int64), std="none", leave_one_out=True)
    torch.testing.assert_close(advantages, torch.tensor([1 - 4.0, 2 - 3.5, 6 - 1.5]))


def test_advantages_equal_inexact_rewards_are_zero_not_noise():
    assert _advantages(torch.full((7,), 0.1), torch.zeros(7, dtype=torch.int64)).abs().max() == 0


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-5, 5, width=32)), min_size=1, max_size=30), st.randoms())
@settings(deadline=None)
def test_advantages_any_order_gives_the_same(rows, random):
    shuffled = rows[:]
    random.shuffle(shuffled)

    def by_row(items):
        group = torch.tensor([g for g, _ in items])
        reward = torch.tensor([r for _, r in items], dtype=torch.float32)
        advantages = _advantages(reward, group).tolist()
        return sorted((g, r, round(a, 3)) for (g, r), a in zip(items, advantages, strict=True))

    for (g, r, a), (h, s, b) in zip(by_row(rows), by_row(shuffled), strict=True):
        assert (g, r) == (h, s)
        assert a == pytest.approx(b, abs=2e-3)


def test_whiten_masked_values_have_mean_zero_and_sample_std_one():
    values, mask = torch.tensor([[1.0, 2.0, 6.0, 99.0]]), torch.tensor([[True, True, True, False]])
    whitened = whiten(values, mask, moments(values, mask))
    # mean 3, sample variance (4 + 1 + 9) / 2 = 7
    expected = torch.tensor([[-2.0, -1.0, 3.0, 0.0]]) / math.sqrt(7)
    torch.testing.assert_close(whitened, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("values", [[0.1, 0.1, 0.1], [4.0], [3e-8, -3e-8]])
def test_whiten_values_equal_up_to_rounding_are_zero(values):
    values = torch.tensor(values)
    mask = torch.ones_like(values).bool()
    assert whiten(values, mask, moments(values, mask)).abs().max() == 0


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", (1 + 2 + 3 + 4) / 4),
        ("sequence_mean_token_mean", ((1 + 2 + 3) / 3 + 4) / 2),
        ("sequence_mean_token_sum", (1 + 2 + 3 + 4) / 2),
        ("constant_length", (1 + 2 + 3 + 4) / 10 / 2),
        ("token_sum", 1 + 2 + 3 + 4),
        ("prompt_mean", ((1 + 2 + 3) / 3 + 4) / 2),
    ],
)
def test_aggregation_two_sequences_matches_hand_computation(aggregation, expected):
    losses = torch.tensor([[9.0, 1, 2, 3], [9.0, 9.0, 4, 9.0], [9.0, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0]]).bool()
    group_tokens = torch.tensor([3.0, 1.0, 0.0])
    weights = token_weights(mask, aggregation, constant_length=10, group_tokens=group_tokens)
    assert ((losses * weights).sum() / denominator(mask, aggregation, group_tokens)).item() == pytest.approx(expected)
