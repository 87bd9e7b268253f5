"""Scores of an evaluation: accuracy, pass@k, maj@k and a standard error, from the outcomes of each example."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, variance


@dataclass
class ExampleOutcome:
    """Outcomes of the completions of one example."""

    example: int
    """Index of the example in the evaluation."""
    rewards: list[float] = field(default_factory=list)
    """Reward of each finished episode; 1 means correct."""
    truncated: list[bool] = field(default_factory=list)
    """Whether each finished episode was cut off at a length limit."""
    answers: list[str | None] = field(default_factory=list)
    """Answer of each finished episode, None without one. Empty if the reward extracts no answers."""
    lengths: list[int] = field(default_factory=list)
    """Generated tokens of each sequence."""


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the probability that at least one of k completions, drawn without replacement from n, is correct.

    1 - C(n - correct, k) / C(n, k), the unbiased estimator of Chen et al. 2021 (arXiv:2107.03374), equation 1.
    """
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def majority_at_k(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> float:
    """Return the accuracy of the most frequent answer among k completions, the mean over the len(answers) // k chunks.

    Completions vote with the text of their answer; None does not vote. A tie gives the expected value of a random
    choice, and a chunk without an answer counts as wrong.

    Args:
        answers: answer of each completion.
        correct: whether each completion is correct.
        k: completions per chunk.
    """
    starts = range(0, len(answers) - k + 1, k)
    return fmean(_majority(answers[start : start + k], correct[start : start + k]) for start in starts)


def _majority(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    votes: dict[str, list[bool]] = defaultdict(list)
    for answer, is_correct in zip(answers, correct, strict=True):
        if answer is not None:
            votes[answer].append(is_correct)
    most = max(map(len, votes.values()), default=0)
    return fmean(fmean(voters) for voters in votes.values() if len(voters) == most) if votes else 0.0


def standard_error(means: Sequence[float]) -> float | None:
    """Return the standard error of the mean over examples; None for fewer than two examples.

    Args:
        means: mean of each example. The completions of an example are one cluster, because they are not independent.
    """
    return math.sqrt(variance(means) / len(means)) if len(means) > 1 else None


def scores(outcomes: Sequence[ExampleOutcome], n: int, ks: Sequence[int]) -> dict[str, float | None]:
    """Return the scores of an evaluation by name. Means are None if there is no completion.

    An episode without a reward counts as wrong, with reward 0. `accuracy`, `pass@k` and `maj@k` exist only if each
    reward is 0 or 1, and `maj@k` only if the reward extracts answers.

    Args:
        outcomes: outcomes of every example.
        n: completions requested per example.
        ks: values of k, each at most n.
    """
    rewards = [reward for outcome in outcomes for reward in outcome.rewards]
    means = [sum(outcome.rewards) / n for outcome in outcomes]
    mean = fmean(means) if rewards else None
    results = {
        "reward": mean,
        "standard_error": standard_error(means) if rewards else None,
        "length": _mean([length for outcome in outcomes for length in outcome.lengths]),
        "truncated": _mean([truncated for outcome in outcomes for truncated in outcome.truncated]),
        "examples": float(len(outcomes)),
        "failed": float(len(outcomes) * n - len(rewards)),
    }
    if n > 1:
        results[f"avg@{n}"] = mean
    if all(reward in (0, 1) for reward in rewards):
        results["accuracy"] = mean
        for k in ks:
            passed = [pass_at_k(n, sum(reward == 1 for reward in outcome.rewards), k) for outcome in outcomes]
            results[f"pass@{k}"] = _mean(passed) if rewards else None
            if k > 1 and any(outcome.answers for outcome in outcomes):
                results[f"maj@{k}"] = fmean(_majority_of(outcome, n, k) for outcome in outcomes)
    return results


def _majority_of(outcome: ExampleOutcome, n: int, k: int) -> float:
    failed = n - len(outcome.rewards)
    answers = [*outcome.answers, *[None] * failed]
    return majority_at_k(answers, [*(reward == 1 for reward in outcome.rewards), *[False] * failed], k)


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
