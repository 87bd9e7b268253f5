from itertools import combinations, product
from math import sqrt
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_contracts.errors import ConfigError
from rl_trainers import EvaluationConfig
from rl_trainers.run_log.evaluation_scores import (
    ExampleOutcome,
    majority_at_k,
    pass_at_k,
    scores,
    standard_error,
)


@pytest.mark.parametrize(("n", "correct"), list(product(range(1, 7), range(7))))
def test_pass_at_k_equals_mean_over_all_subsets(n, correct):
    outcomes = [index < correct for index in range(n)]
    for k in range(1, n + 1):
        expected = fmean(any(subset) for subset in combinations(outcomes, k))
        assert pass_at_k(n, sum(outcomes), k) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answers", "k", "expected"),
    [
        ("aab", 3, 1.0),
        ("abb", 3, 0.0),
        ("ab", 2, 0.5),
        ("aabbc", 5, 0.5),
        ("abc", 3, 1 / 3),
        ("a---", 4, 1.0),
        ("----", 4, 0.0),
        ("aabb", 2, 0.5),
        ("aabbb", 2, 0.5),
    ],
)
def test_majority_at_k_ties_and_missing_answers_equal_expected_value(answers, k, expected):
    votes = [None if answer == "-" else answer for answer in answers]
    assert majority_at_k(votes, [answer == "a" for answer in answers], k) == pytest.approx(expected)


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=2, max_size=20))
def test_scores_pass_at_1_equals_accuracy_and_majority_at_1(rewards):
    outcomes = [
        ExampleOutcome(i, [*map(float, each)], [False] * 4, [f"{reward}" for reward in each])
        for i, each in enumerate(rewards)
    ]
    results = scores(outcomes, 4, [1, 4])
    mean = fmean(map(fmean, rewards))
    assert results["accuracy"] == results["avg@4"] == pytest.approx(mean)
    assert results["pass@1"] == pytest.approx(mean)
    assert results["pass@4"] == pytest.approx(fmean(map(any, rewards)))
    assert results["accuracy"] - 1e-9 <= results["pass@4"]


def test_scores_failed_episodes_count_as_wrong_and_without_vote():
    outcomes = [ExampleOutcome(0, [1.0], [True], ["7"], [5, 7]), ExampleOutcome(1)]
    results = scores(outcomes, 2, [1, 2])
    assert results == {
        "reward": 0.25,
        "standard_error": 0.25,
        "length": 6.0,
        "truncated": 1.0,
        "examples": 2.0,
        "failed": 3.0,
        "avg@2": 0.25,
        "accuracy": 0.25,
        "pass@1": 0.25,
        "pass@2": 0.5,
        "maj@2": 0.5,
    }


def test_standard_error_of_copies_does_not_shrink_with_completions():
    means = [0.0, 1.0, 1.0, 0.0]
    assert standard_error(means) == pytest.approx(sqrt(1 / 3 / 4))
    one = [ExampleOutcome(i, [mean], [False]) for i, mean in enumerate(means)]
    eight = [ExampleOutcome(i, [mean] * 8, [False] * 8) for i, mean in enumerate(means)]
    assert scores(one, 1, [])["standard_error"] == scores(eight, 8, [])["standard_error"]
    assert standard_error([1.0]) is None


@pytest.mark.parametrize(
    ("config", "ks"), [({}, []), ({"n": 8}, [1, 8]), ({"n": 8, "k": [8, 2]}, [2, 8]), ({"n": 1, "k": [1]}, [1])]
)
def test_evaluation_k_defaults_to_1_and_n(config, ks):
    assert EvaluationConfig(**config).ks == ks


@pytest.mark.parametrize("k", [0, 5])
def test_evaluation_k_outside_of_1_to_n_is_rejected(k):
    with pytest.raises(ConfigError, match=r"evaluation\.k: expected 1 to evaluation\.n=4"):
        EvaluationConfig(n=4, k=[k])
