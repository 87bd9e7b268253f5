"""Hand-computed cases and properties of advantages, aggregation and the comparison of log-probs."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_trainers.functional.advantages import group_advantages, moments, whitened
from rl_trainers.functional.aggregation import denominator, token_weights
from rl_trainers.gap.divergence import gap_sums

GROUPED = ("group_mean_std", "group_mean", "group_mean_batch_std", "leave_one_out")


def test_group_advantages_mean_std_matches_hand_computation():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    result = group_advantages(rewards, torch.tensor([7, 7, 7, 7, 3, 3]), "group_mean_std")
    # mean 1/4, sample variance (9/16 + 3/16) / 3 = 1/4
    torch.testing.assert_close(result.advantages[:4], torch.tensor([1.5, -0.5, -0.5, -0.5]), atol=1e-5, rtol=0)
    assert result.advantages[4:].tolist() == [0.0, 0.0]
    assert (result.groups, result.singletons, result.zero_variance) == (2, 0, 1)


def test_group_advantages_mean_of_unequal_groups_matches_hand_computation():
    rewards = torch.tensor([1.0, 0.0, 0.0, 2.0, 4.0])
    result = group_advantages(rewards, torch.tensor([0, 1, 0, 1, 1]), "group_mean")
    torch.testing.assert_close(result.advantages, torch.tensor([0.5, -2.0, -0.5, 0.0, 2.0]))


def test_group_advantages_batch_std_divides_by_the_std_of_all_rewards():
    rewards = torch.tensor([3.0, 1.0, 0.0, 0.0])
    result = group_advantages(rewards, torch.tensor([0, 0, 1, 1]), "group_mean_batch_std")
    # all rewards: mean 1, sample variance (4 + 0 + 1 + 1) / 3 = 2
    expected = torch.tensor([1.0, -1.0, 0.0, 0.0]) / math.sqrt(2)
    torch.testing.assert_close(result.advantages, expected, atol=1e-5, rtol=0)
    assert result.zero_variance == 1


@pytest.mark.parametrize("baseline", GROUPED)
def test_group_advantages_group_of_one_is_zero_and_counted(baseline):
    result = group_advantages(torch.tensor([5.0]), torch.tensor([0]), baseline)
    assert result.advantages.tolist() == [0.0]
    assert result.singletons == 1


@pytest.mark.parametrize("baseline", GROUPED)
def test_group_advantages_zero_variance_is_zero_and_counted(baseline):
    result = group_advantages(torch.full((4,), 0.7), torch.tensor([0, 0, 1, 1]), baseline)
    assert result.advantages.tolist() == [0.0] * 4
    assert result.zero_variance == 2


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


def test_whitened_masked_values_have_mean_zero_and_sample_std_one():
    values, mask = torch.tensor([[1.0, 2.0, 6.0, 99.0]]), torch.tensor([[True, True, True, False]])
    found = whitened(values, mask, moments(values, mask))
    # mean 3, sample variance (4 + 1 + 9) / 2 = 7
    expected = torch.tensor([[-2.0, -1.0, 3.0, 0.0]]) / math.sqrt(7)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("values", [[0.1, 0.1, 0.1], [4.0]])
def test_whitened_values_that_do_not_vary_are_zero(values):
    values = torch.tensor(values)
    mask = torch.ones_like(values).bool()
    assert whitened(values, mask, moments(values, mask)).abs().max() == 0


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


def test_gap_sums_masked_tokens_do_not_count():
    ours, theirs = torch.tensor([[0.0, -1.0, 50.0]]), torch.tensor([[0.0, -1.5, 0.0]])
    sums, largest = gap_sums(ours, theirs, torch.tensor([[True, True, False]]))
    count, total, k3, *_ = sums.tolist()
    assert (count, total, largest.item()) == (2, 0.5, 0.5)
    assert k3 == pytest.approx(math.exp(-0.5) - 1 + 0.5)
