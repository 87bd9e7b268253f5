"""Sampler: distribution, truncation and randomness."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_contracts.config import GenerationConfig
from rl_inference.embedded_server.job import GenerationJob
from rl_inference.embedded_server.sampling import SamplingBatch, uniforms

CPU = torch.device("cpu")


def batch(rows: int, seeds: list[int] | None = None, **config: Any) -> SamplingBatch:
    generation = GenerationConfig(**config)
    seeds = list(range(rows)) if seeds is None else seeds
    return SamplingBatch.of([GenerationJob("", [1], generation, seed, frozenset()) for seed in seeds], CPU)


def draws(logits: torch.Tensor, count: int, **config: Any) -> torch.Tensor:
    """Return `count` tokens drawn from the same logits, each with its own seed."""
    return batch(count, **config).sample(logits.expand(count, -1), torch.full((count,), 5))[0]


def test_uniforms_many_seeds_and_positions_are_uniform_and_uncorrelated() -> None:
    count = 200_000
    by_seed = uniforms(torch.arange(count), torch.zeros(count, dtype=torch.int64))
    by_position = uniforms(torch.zeros(count, dtype=torch.int64), torch.arange(count))

    for values in (by_seed, by_position):
        assert values.min() >= 0
        assert values.max() < 1
        counts = torch.histc(values.float(), 100, 0, 1)
        assert ((counts - count / 100) ** 2 / (count / 100)).sum() < 160  # chi-squared, 99 degrees: p of 1e-4
        assert abs(torch.corrcoef(torch.stack([values[:-1], values[1:]]))[0, 1]) < 0.01


def test_uniforms_equal_the_reference_in_python_integers() -> None:
    values = uniforms(torch.tensor([0, 1, -1, 2**62]), torch.tensor([0, 7, 123456, 3]))

    expected = [_reference_uniform(*pair) for pair in ((0, 0), (1, 7), (-1, 123456), (2**62, 3))]
    assert values.tolist() == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_uniforms_on_gpu_equal_cpu() -> None:
    seeds, positions = torch.arange(-5000, 5000) * 2**50, torch.arange(10_000)

    assert torch.equal(uniforms(seeds.cuda(), positions.cuda()).cpu(), uniforms(seeds, positions))


def _reference_uniform(seed: int, position: int) -> float:
    """Compute `uniforms` in Python integers."""
    mask = 2**64 - 1

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    return (mix((mix((seed + golden) & mask) + (position + 1) * golden) & mask) >> 11) * 2.0**-53


@pytest.mark.slow
def test_sample_many_draws_follow_the_tempered_distribution() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 20) * 2

    counts = torch.bincount(draws(logits, 50_000, temperature=0.5), minlength=20) / 50_000

    torch.testing.assert_close(counts, torch.softmax(logits[0] / 0.5, -1), atol=0.01, rtol=0)


def test_sample_truncated_logprobs_are_of_the_full_distribution() -> None:
    torch.manual_seed(0)
    logits = torch.randn(50, 30) * 2

    tokens, logprobs = batch(50, temperature=0.7, top_p=0.5, top_k=5).sample(logits, torch.arange(50))

    expected = torch.log_softmax(logits / 0.7, -1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, atol=1e-6, rtol=0)


def test_sample_greedy_takes_likeliest_token_at_temperature_one() -> None:
    logits = torch.randn(10, 30)

    tokens, logprobs = batch(10, temperature=0.0).sample(logits, torch.arange(10))

    expected = torch.log_softmax(logits, -1).max(-1)
    assert torch.equal(tokens, expected.indices)
    torch.testing.assert_close(logprobs, expected.values)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.9),
)
def test_sample_truncated_draws_stay_inside_the_allowed_set(seed: int, top_k: int, top_p: float, min_p: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 12, generator=generator) * 2

    tokens = set(draws(logits, 300, top_k=top_k, top_p=top_p, min_p=min_p).tolist())

    assert tokens <= _allowed(logits[0], top_k, top_p, min_p)


def _allowed(logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Return the allowed tokens, computed in plain Python with tolerance for rounding at the limits."""
    order = logits.argsort(descending=True).tolist()[: top_k or None]
    probs = torch.softmax(logits[order].double(), -1).tolist()
    allowed, mass = set(), 0.0
    for token, p in zip(order, probs, strict=True):
        if mass < top_p + 1e-5 and p >= min_p * probs[0] - 1e-6:
            allowed.add(token)
        mass += p
    return allowed


def test_sample_mixed_settings_in_one_batch_are_independent() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 40) * 2
    configs = [{}, {"top_p": 0.5}, {"temperature": 0.0}, {"temperature": 0.5, "top_k": 3}]
    jobs = [GenerationJob("", [1], GenerationConfig(**c), 7, frozenset()) for c in configs]  # type: ignore[arg-type]

    batched, _ = SamplingBatch.of(jobs, CPU).sample(logits, torch.full((4,), 9))

    for row, job in enumerate(jobs):
        single, _ = SamplingBatch.of([job], CPU).sample(logits[row : row + 1], torch.tensor([9]))
        assert single.item() == batched[row].item()


def test_sample_blocked_token_of_nearly_all_mass_is_never_drawn() -> None:
    logits = torch.zeros(100, 8)
    logits[:, 3] = 500.0
    generation = GenerationConfig(min_new_tokens=5)
    jobs = [GenerationJob("", [1], generation, seed, frozenset([3]), frozenset([3])) for seed in range(100)]

    tokens, _ = SamplingBatch.of(jobs, CPU).sample(logits, torch.full((100,), 2))
    later, _ = SamplingBatch.of(jobs, CPU).sample(logits, torch.full((100,), 6))

    assert set(tokens.tolist()) == {0, 1, 2, 4, 5, 6, 7}
    assert set(later.tolist()) == {3}
