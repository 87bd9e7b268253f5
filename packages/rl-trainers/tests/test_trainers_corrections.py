"""Hand-computed cases of corrections, M2PO's mask, KL estimates and interpolated log-probs."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_contracts.batch.trajectory import pack
from rl_contracts.testing.batches import make_batch
from rl_trainers.algorithms.functional.correction import (
    LEVELS,
    OffPolicy,
    divergence_mask,
    interpolated_logprobs,
    masked_weights,
    plain_weights,
    ratio_mask,
    second_moment_outliers,
    truncated_weights,
    trust_region_tokens,
)
from rl_trainers.algorithms.functional.kl import k3, kl_estimate, weighted_kl


def _tokens(ratios):
    """Return a micro-batch of one sequence whose trained tokens have these ratios."""
    log_ratio = torch.tensor(ratios).log()
    batch = make_batch(1, seed=1, lengths=(len(ratios), len(ratios)))
    return OffPolicy(log_ratio, torch.ones(len(ratios), dtype=torch.bool), pack(batch))


def test_plain_weights_are_the_ratios():
    torch.testing.assert_close(plain_weights(_tokens([0.1, 7.4]), level="token")[0], torch.tensor([0.1, 7.4]))


def test_truncated_weights_outside_bounds_are_truncated_and_marked():
    weights, marks = truncated_weights(_tokens([0.1, 1.0, 7.4]), level="token", cap=2.0)
    torch.testing.assert_close(weights, torch.tensor([0.1, 1.0, 2.0]))
    assert marks["correction/capped"].tolist() == [False, False, True]
    weights, marks = truncated_weights(_tokens([0.1, 1.0, 7.4]), level="token", cap=2.0, floor=0.5)
    torch.testing.assert_close(weights, torch.tensor([0.5, 1.0, 2.0]))
    assert marks["correction/capped"].tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("estimator", "over", "expected"),
    [  # log r of sequence one: 0.1, -2; of sequence two: 0.3, 0.3
        ("k3", "token", [False, True, False, False]),
        ("k2", "max", [True, True, False, False]),
        ("k1", "sum", [True, True, True, True]),
        ("k2", "sum", [True, True, False, False]),
        ("k1", "mean", [True, True, False, False]),
    ],
)
def test_divergence_mask_drops_tokens_and_sequences_above_bound(estimator, over, expected):
    batch = make_batch(2, seed=1, lengths=(2, 2))
    batch["loss_mask"] = torch.ones(2, 2, dtype=torch.bool)
    log_ratio = torch.tensor([0.1, -2.0, 0.3, 0.3])
    values = {"k1": log_ratio.abs(), "k2": log_ratio.square() / 2, "k3": log_ratio.exp() - 1 - log_ratio}[estimator]
    packed = pack(batch)
    off = OffPolicy(log_ratio, packed["loss_mask"], packed)

    dropped = divergence_mask(off, bound=0.5, estimator=estimator, over=over)

    rows = values.view(2, 2)
    stat = {"token": rows, "sum": rows.sum(-1, True), "mean": rows.mean(-1, True), "max": rows.amax(-1, True)}[over]
    assert dropped.tolist() == (stat > 0.5).expand(2, 2).flatten().tolist() == expected


RATIOS = [0.4, 0.5, 1.2, 5.0, 5.1, math.inf, math.nan]


def test_masked_weights_outside_bounds_are_zero_and_others_unchanged():
    tokens = _tokens(RATIOS)
    weights, marks = masked_weights(tokens, level="token", floor=0.4999, cap=5.0001)
    torch.testing.assert_close(weights, torch.tensor([0.0, 0.5, 1.2, 5.0, 0.0, 0.0, 0.0]))
    assert marks["correction/masked"].tolist() == [True, False, False, False, True, True, True]
    assert torch.equal(ratio_mask(tokens, level="token", low=0.4999, high=5.0001), marks["correction/masked"])


def test_ratio_token_sequence_and_geometric_match_hand_computation():
    batch = make_batch(2, seed=1, lengths=(4, 4))
    batch["loss_mask"] = torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1]]).bool()
    packed = pack(batch)
    log_ratio = torch.tensor([0.0, 0.2, 0.4, 0.0, 0.0, 0.0, -0.3, 0.1])
    tokens = OffPolicy(log_ratio, packed["loss_mask"], packed)
    torch.testing.assert_close(tokens.ratio("token"), log_ratio.exp())
    rows = torch.tensor([0.6] * 4 + [-0.2] * 4)
    torch.testing.assert_close(tokens.ratio("sequence"), rows.exp())
    torch.testing.assert_close(tokens.ratio("geometric"), (rows / 2).exp())


def test_ratio_sequence_without_trained_token_is_one():
    batch = make_batch(1, seed=1)
    batch["loss_mask"][:] = False
    packed = pack(batch)
    tokens = OffPolicy(torch.zeros(packed.num_tokens), packed["loss_mask"], packed)
    for level in LEVELS:
        assert (tokens.ratio(level) == 1).all()


def _retained(squares, threshold):
    """Return the squared log-ratios that the mask retains."""
    log_ratio = torch.tensor(squares, dtype=torch.float64).sqrt().float()
    signs = torch.tensor([1.0, -1.0]).repeat(len(squares))[: len(squares)]
    dropped = second_moment_outliers(signs * log_ratio, torch.zeros(len(squares), dtype=torch.int64), 1, threshold)
    return [square for square, is_dropped in zip(squares, dropped.tolist(), strict=True) if not is_dropped]


def test_second_moment_outliers_are_largest_until_mean_is_within_bound():
    squares = [0.5, 0.01, 0.09, 0.02]
    # means of the smallest 1, 2, 3, 4: 0.01, 0.015, 0.04, 0.155
    assert _retained(squares, 0.0401) == [0.01, 0.09, 0.02]
    assert _retained(squares, 0.039) == [0.01, 0.02]
    assert _retained(squares, 1.0) == squares
    assert _retained(squares, 0.005) == []
    assert _retained([], 0.04) == []
    # equal values are dropped together: with one of the two 0.09 the mean is 0.05; with both 0.0633
    assert _retained([0.01, 0.09, 0.09], 0.055) == [0.01]


def _algorithm_1(squares, threshold):
    """Return the tokens of T that M2PO's algorithm 1 retains, implemented as printed in the paper."""
    remaining = list(range(len(squares)))
    while remaining and sum(squares[i] for i in remaining) / len(remaining) > threshold:
        remaining.remove(max(remaining, key=lambda i: squares[i]))
    return [squares[i] for i in remaining]


@given(st.lists(st.floats(0, 2, width=16), min_size=1, max_size=40), st.floats(0.001, 2))
def test_second_moment_outliers_are_as_few_as_possible(values, threshold):
    squares = [value**2 for value in values]  # exact, as is its square root
    retained = _retained(squares, threshold)
    assert not retained or sum(retained) / len(retained) <= threshold * (1 + 1e-9)
    dropped = [square for square in squares if square not in retained]
    if dropped:
        one_more = [square for square in squares if square <= min(dropped)]
        assert sum(one_more) / len(one_more) > threshold * (1 - 1e-9)


@given(st.lists(st.floats(0, 4, width=16), min_size=1, max_size=30, unique=True), st.floats(0.001, 2))
def test_second_moment_outliers_match_algorithm_of_paper(values, threshold):
    squares = [value**2 for value in values]  # exact, as is its square root
    # if a mean equals the threshold up to rounding, the two implementations may differ
    means = [sum(sorted(squares)[:n]) / n for n in range(1, len(squares) + 1)]
    assert (
        _retained(squares, threshold) == _algorithm_1(squares, threshold)
        or min(abs(mean - threshold) for mean in means) < 1e-12
    )


@given(st.lists(st.tuples(st.floats(-3, 3, width=32), st.integers(0, 2)), max_size=60), st.floats(0.001, 2))
def test_second_moment_outliers_are_independent_per_minibatch(tokens, threshold):
    log_ratio = torch.tensor([value for value, _ in tokens])
    minibatch = torch.tensor([number for _, number in tokens], dtype=torch.int64)
    outliers = second_moment_outliers(log_ratio, minibatch, 3, threshold)
    for number in range(3):
        is_member = minibatch == number
        expected = second_moment_outliers(
            log_ratio[is_member], torch.zeros(int(is_member.sum()), dtype=torch.int64), 1, threshold
        )
        assert torch.equal(outliers[is_member], expected)


def test_trust_region_tokens_moved_in_direction_of_advantage():
    # (A > 0 and r > 1) or (A < 0 and r < 1), M2PO section 5.2; others are not constrained at any ratio
    log_ratio, advantages = torch.tensor([0.3, 9.0, -0.3, -0.3, 0.0]), torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    assert trust_region_tokens(log_ratio, advantages).tolist() == [True, False, False, True, False]


@pytest.mark.parametrize("size", [1e-1, 1e-6])
def test_k3_small_differences_are_exact_and_never_negative(size):
    d = size * torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    estimate = k3(d)
    assert estimate.min() >= 0
    torch.testing.assert_close(estimate.double().mean(), k3(d.double()).mean(), rtol=2e-3, atol=0)


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [("k1", 0.5, 1.0), ("k2", 0.125, 0.5), ("k3", math.exp(-0.5) - 0.5, 1 - math.exp(-0.5))],
)
def test_kl_estimate_value_and_slope_match_schulman(estimator, value, slope):
    logprob = torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)
    estimate = kl_estimate(logprob, torch.tensor(-1.5, dtype=torch.float64), estimator)
    (gradient,) = torch.autograd.grad(estimate, logprob)
    assert (estimate.item(), gradient.item()) == (pytest.approx(value), pytest.approx(slope))


def _expected_gradient(term):
    """Return the gradients of a loss term and of KL(pi || ref) at the logits of a categorical distribution.

    The first one is the expectation over pi of the gradient of `term(log pi, log ref, ratio)`.
    """
    generator = torch.Generator().manual_seed(0)
    # small logits keep k3 below its bound
    logits, reference_logits = torch.randn(2, 5, generator=generator, dtype=torch.float64) / 2
    logits.requires_grad_()
    policy, reference = logits.log_softmax(-1), reference_logits.log_softmax(-1)
    weight = policy.detach().exp()
    ratio = (policy - policy.detach()).exp()
    (gradient,) = torch.autograd.grad((weight * term(policy, reference, ratio)).sum(), logits, retain_graph=True)
    (true_gradient,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits)
    return gradient, true_gradient


@pytest.mark.parametrize(("estimator", "weighted"), [("k2", False), ("k1", True), ("k3", True)])
def test_kl_estimate_unbiased_kinds_have_gradient_of_divergence(estimator, weighted):
    def term(policy, reference, ratio):
        estimate = kl_estimate(policy, reference, estimator)
        return weighted_kl(estimate, ratio) if weighted else estimate

    gradient, expected = _expected_gradient(term)
    torch.testing.assert_close(gradient, expected)


def test_kl_estimate_k1_gradient_is_zero_in_expectation():
    gradient, _ = _expected_gradient(lambda policy, reference, _: kl_estimate(policy, reference, "k1"))
    torch.testing.assert_close(gradient, torch.zeros_like(gradient))


def test_kl_estimate_k3_has_expected_gradient_of_reverse_kl():
    generator = torch.Generator().manual_seed(0)
    # small logits keep k3 below its bound
    logits, reference_logits = torch.randn(2, 5, generator=generator, dtype=torch.float64) / 2
    logits.requires_grad_()
    reference = reference_logits.log_softmax(-1)
    forward = (reference.exp() * (reference - logits.log_softmax(-1))).sum()
    (expected,) = torch.autograd.grad(forward, logits)
    gradient, _ = _expected_gradient(lambda policy, ref, _: kl_estimate(policy, ref, "k3"))
    torch.testing.assert_close(gradient, expected)


def test_interpolated_logprobs_depend_on_age_of_token():
    logprobs = torch.full((3,), -2.0, requires_grad=True)
    interpolated = interpolated_logprobs(logprobs, torch.full((3,), -1.0), age=torch.tensor([0, 1, 3]))
    # 0, 1/2 and 3/4 of the way from the sampler to the current policy
    torch.testing.assert_close(interpolated, torch.tensor([-1.0, -1.5, -1.75]))
    assert not interpolated.requires_grad
