"""Sampler compared with a reference in plain Python, token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_contracts.config import GenerationConfig
from rl_inference.embedded_server.job import GenerationJob
from rl_inference.embedded_server.sampling import SamplingBatch, uniforms

CPU = torch.device("cpu")
VOCAB = 12
TOLERANCE = 1e-4
"""Tolerance of decisions: within it, rounding may decide otherwise."""


def penalized(logits: list[float], job: GenerationJob) -> list[float]:
    """Return the logits after repetition, frequency and presence penalties."""
    config, completion = job.generation, job.prompt[len(job.prompt) - job.resumed :] + job.output_ids
    result = []
    for token, x in enumerate(logits):
        if token in job.prompt or token in completion:
            x = x / config.repetition_penalty if x > 0 else x * config.repetition_penalty
        count = completion.count(token)
        result.append(x - config.frequency_penalty * count - config.presence_penalty * (count > 0))
    return result


def acceptable(logits: list[float], job: GenerationJob) -> set[int]:
    """Return all tokens that the sampler may draw now; several if rounding decides."""
    config = job.generation
    scores = [x / (config.temperature or 1.0) for x in penalized(logits, job)]
    if job.length < job.first_stop_position:
        scores = [-math.inf if token in job.blocked_ids else x for token, x in enumerate(scores)]
    if config.greedy:
        return {token for token, x in enumerate(scores) if x > max(scores) - TOLERANCE}
    order = sorted(range(VOCAB), key=lambda token: (-scores[token], token))
    order = order[: config.top_k or VOCAB]
    mass = [math.exp(scores[token] - scores[order[0]]) for token in order]
    probs = [m / sum(mass) for m in mass]
    u = uniforms(torch.tensor([job.seed]), torch.tensor([job.length])).item()
    tokens = set()
    for slack in (-TOLERANCE, 0.0, TOLERANCE):
        before, allowed = 0.0, set()
        for token, p in zip(order, probs, strict=True):
            if (before < config.top_p + slack or config.top_p >= 1) and p >= config.min_p * probs[0] + slack:
                allowed.add(token)
            before += p
        for shift in (-TOLERANCE, 0.0, TOLERANCE):
            total, cumulative = sum(probs[order.index(token)] for token in allowed), 0.0
            for token in sorted(allowed):
                cumulative += probs[order.index(token)]
                if cumulative > (u + shift) * total:
                    tokens.add(token)
                    break
    return tokens


CONFIGS = st.builds(
    GenerationConfig,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    min_new_tokens=st.sampled_from([0, 3]),
    top_k=st.integers(0, VOCAB),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.9),
    presence_penalty=st.sampled_from([0.0, -1.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 0.6, 1.8]),
)


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(
    configs=st.lists(CONFIGS, min_size=1, max_size=5),
    prompts=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6), min_size=5, max_size=5),
    seed=st.integers(0, 2**31),
    resumed=st.integers(0, 5),
)
def test_sample_any_mix_of_settings_equals_reference(
    configs: list[GenerationConfig], prompts: list[list[int]], seed: int, resumed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    jobs = [
        GenerationJob("", prompt, config, seed + row, frozenset([3]), frozenset([3]), min(resumed, len(prompt) - 1))
        for row, (config, prompt) in enumerate(zip(configs, prompts, strict=False))
    ]
    batch = SamplingBatch.of(jobs, CPU)

    for _ in range(6):
        logits = torch.randn(len(jobs), VOCAB, generator=generator) * 2
        tokens, logprobs = batch.sample(logits, torch.tensor([job.length for job in jobs]))

        for row, job in enumerate(jobs):
            assert tokens[row].item() in acceptable(logits[row].double().tolist(), job)
            full = torch.log_softmax(logits[row] / (job.generation.temperature or 1.0), -1)
            assert logprobs[row].item() == pytest.approx(full[tokens[row]].item(), abs=1e-5)
            job.append(int(tokens[row]), float(logprobs[row]), 0)


def job(seed: int, prompt: list[int], resumed: int = 0, **config: Any) -> GenerationJob:
    return GenerationJob("", prompt, GenerationConfig(**config), seed, frozenset(), frozenset(), resumed)


def run(jobs: list[GenerationJob], steps: int, rebuild: bool = False) -> None:
    """Draw `steps` tokens for all jobs, from logits that depend only on the position.

    With `rebuild`, the batch is built again at every step.
    """
    batch = SamplingBatch.of(jobs, CPU)
    for _ in range(steps):
        batch = SamplingBatch.of(jobs, CPU) if rebuild else batch
        positions = torch.tensor([job.length for job in jobs])
        logits = torch.stack([torch.randn(40, generator=torch.Generator().manual_seed(int(p))) for p in positions])
        tokens, logprobs = batch.sample(logits, positions)
        for each, token, logprob in zip(jobs, tokens.tolist(), logprobs.tolist(), strict=True):
            each.append(token, logprob, 0)


PENALTIES = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3}


def test_penalties_batch_rebuilt_at_every_step_draws_same_tokens() -> None:
    kept_batch, rebuilt = ([job(seed, [1, 2, seed], **PENALTIES) for seed in range(4)] for _ in range(2))

    run(kept_batch, 30)
    run(rebuilt, 30, rebuild=True)

    assert [each.output_ids for each in kept_batch] == [each.output_ids for each in rebuilt]


def test_penalties_same_seed_draws_same_tokens_in_any_batch() -> None:
    alone, batched = job(7, [1, 2, 3], **PENALTIES), job(7, [1, 2, 3], **PENALTIES)
    other_jobs = [job(seed, [5], top_p=0.5) for seed in range(3)] + [job(9, [1, 6], frequency_penalty=2.0)]

    run([alone], 30)
    run([*other_jobs[:2], batched, *other_jobs[2:]], 30)

    assert batched.output_ids == alone.output_ids


def test_penalties_continued_completion_draws_same_tokens() -> None:
    complete = job(3, [1, 2], **PENALTIES)
    run([complete], 30)
    continued = job(3, [1, 2, *complete.output_ids[:11]], resumed=11, **PENALTIES)

    run([continued], 19)

    assert continued.output_ids == complete.output_ids[11:]


def test_penalties_of_one_job_do_not_change_other_jobs() -> None:
    alone, batched = job(4, [1, 2]), job(4, [1, 2])

    run([alone], 20)
    run([job(5, [1, 2], presence_penalty=2.0), batched], 20)

    assert (alone.output_ids, alone.logprobs) == (batched.output_ids, batched.logprobs)


def test_presence_penalty_greedy_close_logits_never_repeats() -> None:
    each = job(1, [1], temperature=0.0, presence_penalty=2.0)
    batch = SamplingBatch.of([each], CPU)
    logits = torch.linspace(0, 1.9, 20)[None]

    drawn = [int(batch.sample(logits, torch.tensor([position]))[0]) for position in range(20)]

    assert drawn == list(range(19, -1, -1))


def test_batch_without_penalties_has_no_counts() -> None:
    assert SamplingBatch.of([job(1, [1], top_p=0.5)], CPU).penalties is None
