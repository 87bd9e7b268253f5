"""The null inference engine on a simulated clock: times, versions across commits, pauses, injected faults."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_contracts.config import GenerationConfig
from rl_contracts.data import ModelRequest, ModelResponse, StopReason, WeightUpdateMeta
from rl_contracts.errors import InferenceError, WeightUpdateError
from rl_contracts.testing import NullInferenceEngine, NullInferenceEngineConfig, SimulatedClock, put_weights


def make_engine(clock: SimulatedClock, answer: Any = None, **config: Any) -> NullInferenceEngine:
    return NullInferenceEngine(NullInferenceEngineConfig(read_weights=False, **config), clock=clock, answer=answer)


def make_request(seed: int | None = 1, prompt: tuple[int, ...] = (5, 6), **generation: Any) -> ModelRequest:
    return ModelRequest(list(prompt), GenerationConfig(**generation), seed=seed)


async def publish(engine: NullInferenceEngine, version: int, interrupt: str = "keep") -> float:
    await engine.stage_weights(WeightUpdateMeta("shm", version))
    return await engine.commit_weights(version, interrupt)


def test_generate_takes_latency_plus_time_per_token() -> None:
    clock = SimulatedClock()
    engine = make_engine(clock, mean_tokens=10, seconds_per_token=0.5, latency=2.0)

    response = clock.run(engine.agenerate(make_request()))

    assert len(response.output_ids) == len(response.logprobs) == len(response.versions) == 10
    assert response.seconds == clock.now() == pytest.approx(7.0)
    assert response.stop_reason == StopReason.STOP
    assert response.output_ids[-1] == 0
    assert 0 not in response.output_ids[:-1]


def quarters(maximum: int) -> st.SearchStrategy[float]:
    """Return a strategy for seconds in multiples of 0.25, which floats represent exactly."""
    return st.integers(0, maximum).map(lambda steps: steps / 4)


@settings(max_examples=60, deadline=None)
@given(
    commits=st.lists(st.tuples(quarters(48), quarters(12)), max_size=4),
    starts=st.lists(quarters(32).map(lambda seconds: seconds + 0.125), min_size=1, max_size=4),
    interrupt=st.sampled_from(["keep", "recompute"]),
)
def test_versions_across_commits_match_time_of_each_token(
    commits: list[tuple[float, float]], starts: list[float], interrupt: str
) -> None:
    """Compare with an independent model: one token per second of unpaused time."""
    clock = SimulatedClock()
    engine = make_engine(clock, mean_tokens=5, seconds_per_token=1.0)
    pauses: list[tuple[float, float]] = []
    responses: list[tuple[float, ModelResponse, float]] = []

    async def generate(start: float) -> None:
        await clock.sleep(start)
        began = clock.now()
        responses.append((began, await engine.agenerate(make_request()), clock.now()))

    async def train() -> None:
        for version, (wait, commit_seconds) in enumerate(commits, start=1):
            await clock.sleep(wait)
            engine.config.commit_seconds = commit_seconds
            began = clock.now()
            await publish(engine, version, interrupt)
            pauses.append((began, clock.now()))

    async def main() -> None:
        await asyncio.gather(train(), *(generate(s) for s in starts))

    clock.run(main())

    for began, response, ended in responses:
        moments = [_moment_after(began, i + 1.0, pauses) for i in range(5)]
        if any(abs(m - edge) < 1e-6 for m in (began, *moments) for pause in pauses for edge in pause):
            continue  # at the exact moment of a commit both versions are correct
        assert response.versions == [sum(end <= m for _, end in pauses) for m in moments]
        assert ended == pytest.approx(moments[-1])
        first_work = _moment_after(began, 1e-6, pauses)  # a request without generated tokens is not interrupted
        interruptions = sum(first_work < start < ended for start, _ in pauses)
        assert response.resubmissions == (interruptions if interrupt == "recompute" else 0)


def _moment_after(began: float, seconds: float, pauses: list[tuple[float, float]]) -> float:
    moment = began
    for start, end in pauses:
        if end <= moment:
            continue
        unpaused = max(start - moment, 0.0)
        if seconds <= unpaused:
            break
        seconds, moment = seconds - unpaused, end
    return moment + seconds


def test_commit_wait_finishes_running_requests_and_queues_new_ones() -> None:
    clock = SimulatedClock()
    engine = make_engine(clock, mean_tokens=4, seconds_per_token=1.0)

    async def late() -> ModelResponse:
        await clock.sleep(2.0)
        return await engine.agenerate(make_request())

    async def commit() -> None:
        await clock.sleep(1.0)
        await publish(engine, 1, "wait")

    async def main() -> tuple[ModelResponse, ModelResponse]:
        first, second, _ = await asyncio.gather(engine.agenerate(make_request()), late(), commit())
        return first, second

    first, second = clock.run(main())

    assert first.versions == [0] * 4
    assert second.versions == [1] * 4
    assert second.seconds == pytest.approx(6.0)


@pytest.mark.slow
def test_generate_token_frequencies_follow_logprobs() -> None:
    clock = SimulatedClock()
    engine = make_engine(clock, vocab_size=4)
    first = [
        clock.run(engine.agenerate(make_request(seed=s, max_new_tokens=1, ignore_eos=True))).output_ids[0]
        for s in range(3000)
    ]

    for token in range(4):
        logprob = clock.run(engine.score([5, 6, token]))[2]
        expected = float(torch.tensor(logprob).exp())
        assert first.count(token) / 3000 == pytest.approx(expected, abs=0.04)


@pytest.mark.parametrize(
    ("generation", "length", "reason"),
    [
        ({"max_new_tokens": 8}, 8, StopReason.STOP),
        ({"max_new_tokens": 7}, 7, StopReason.LENGTH),
        ({"max_new_tokens": 12, "ignore_eos": True}, 12, StopReason.LENGTH),
        ({"min_new_tokens": 10}, 11, StopReason.STOP),
        ({"max_new_tokens": 10, "min_new_tokens": 10}, 10, StopReason.LENGTH),
        ({"stop_token_ids": list(range(64)), "min_new_tokens": 3}, 4, StopReason.STOP),
    ],
)
def test_generate_length_and_stop_reason_follow_config(
    generation: dict[str, Any], length: int, reason: StopReason
) -> None:
    clock = SimulatedClock()
    engine = make_engine(clock, mean_tokens=8)

    response = clock.run(engine.agenerate(make_request(**generation)))

    assert (len(response.output_ids), response.stop_reason) == (length, reason)


@pytest.mark.slow
def test_generate_lognormal_lengths_have_configured_mean() -> None:
    clock = SimulatedClock()
    engine = make_engine(clock, mean_tokens=50, sigma=0.8)

    async def main() -> list[int]:
        requests = (make_request(seed=s, max_new_tokens=10_000) for s in range(4000))
        return [len(r.output_ids) for r in await asyncio.gather(*map(engine.agenerate, requests))]

    lengths = clock.run(main())

    assert sum(lengths) / len(lengths) == pytest.approx(50, rel=0.06)
    assert max(lengths) > 200


def test_generate_scripted_completion_is_cut_at_end_and_limit() -> None:
    clock = SimulatedClock()
    engine = make_engine(clock, answer=lambda request: [7, 8, 0, 9] if request.seed == 1 else [7, 8, 9])

    stopped = clock.run(engine.agenerate(make_request(seed=1)))
    truncated = clock.run(engine.agenerate(make_request(seed=2, max_new_tokens=2)))

    assert (stopped.output_ids, stopped.stop_reason) == ([7, 8, 0], StopReason.STOP)
    assert (truncated.output_ids, truncated.stop_reason) == ([7, 8], StopReason.LENGTH)


@pytest.mark.parametrize(
    ("request_", "match"),
    [
        (ModelRequest([3, -1], GenerationConfig()), "found -1"),
        (ModelRequest([3], GenerationConfig(stop=["\n"])), "stop_token_ids"),
    ],
)
def test_generate_invalid_request_raises_inference_error(request_: ModelRequest, match: str) -> None:
    clock = SimulatedClock()

    with pytest.raises(InferenceError, match=match):
        clock.run(make_engine(clock).agenerate(request_))


def test_max_running_queues_requests_in_order() -> None:
    clock = SimulatedClock()
    engine = make_engine(clock, mean_tokens=1, seconds_per_token=1.0, max_running=2)

    async def main() -> list[float]:
        tasks = [asyncio.ensure_future(engine.agenerate(make_request())) for _ in range(5)]
        await asyncio.sleep(0)
        stats = await engine.stats()
        assert (stats["running"], stats["waiting"]) == (2, 3)
        tasks[2].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        return [r.seconds for r in results if isinstance(r, ModelResponse)]

    assert clock.run(main()) == pytest.approx([1, 1, 2, 2])
    assert clock.run(engine.stats()) == {
        "servers": 1.0,
        "running": 0.0,
        "waiting": 0.0,
        "generated_tokens": 4.0,
        "busy_seconds": pytest.approx(2.0),
    }


def test_injected_faults_raise_in_their_calls() -> None:
    clock = SimulatedClock()
    engine = make_engine(clock)
    engine.faults.generate = lambda request: InferenceError("lost") if request.seed == 2 else None
    engine.faults.stage = lambda meta: WeightUpdateError("no room") if meta.version == 2 else None
    engine.faults.commit = lambda version: WeightUpdateError("no answer")

    assert clock.run(engine.agenerate(make_request(seed=1))).output_ids
    with pytest.raises(InferenceError, match="lost"):
        clock.run(engine.agenerate(make_request(seed=2)))
    with pytest.raises(WeightUpdateError, match="no room"):
        clock.run(publish(engine, 2))
    with pytest.raises(WeightUpdateError, match="no answer"):
        clock.run(publish(engine, 1))
    assert engine.version == 0


def test_destroy_fails_hanging_queued_and_later_requests() -> None:
    clock = SimulatedClock()
    engine = make_engine(clock, max_running=2)
    engine.faults.hang = lambda request: request.seed == 1

    async def main() -> list[Any]:
        tasks = [asyncio.ensure_future(engine.agenerate(make_request(seed=s))) for s in (1, 2, 3)]
        cancelled = asyncio.ensure_future(engine.agenerate(make_request(seed=1)))
        await asyncio.sleep(0)
        cancelled.cancel()
        await engine.destroy()
        return await asyncio.gather(*tasks, cancelled, return_exceptions=True)

    *failed, cancelled = clock.run(main())

    assert [type(f) for f in failed] == [InferenceError] * 3
    assert isinstance(cancelled, asyncio.CancelledError)
    with pytest.raises(InferenceError, match="after destroy"):
        clock.run(engine.agenerate(make_request()))


def test_stage_reads_route_and_returns_its_checksums(tmp_path: Path) -> None:
    clock = SimulatedClock()
    engine = NullInferenceEngine(clock=clock)
    engine.initialize(["http://a", "http://b"])
    weights = {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}
    meta, sent = put_weights(tmp_path, 1, weights.items())

    receipts = clock.run(engine.stage_weights(meta))
    engine.faults.corrupt = lambda name: name == "b"
    corrupted = clock.run(engine.stage_weights(meta))[0]

    assert [r.holder for r in receipts] == ["http://a", "http://b"]
    assert all(r.checksums == sent.checksums for r in receipts)
    assert [n for n in weights if corrupted.checksums[n] != sent.checksums[n]] == ["b"]
    missing = tuple(replace(part, location=str(tmp_path / "missing")) for part in meta.parts)
    with pytest.raises(WeightUpdateError, match="cannot be opened"):
        clock.run(engine.stage_weights(replace(meta, version=2, parts=missing)))


@pytest.mark.nightly
def test_hundred_thousand_outstanding_requests_are_cheap() -> None:
    clock, started = SimulatedClock(), time.monotonic()
    engine = make_engine(clock, mean_tokens=20, sigma=1.0, commit_seconds=0.5)

    async def main() -> int:
        tasks = [asyncio.ensure_future(engine.agenerate(make_request(seed=s))) for s in range(100_000)]
        await clock.sleep(0.05)
        await publish(engine, 1)
        return sum(len(set(r.versions)) > 1 for r in await asyncio.gather(*tasks))

    assert clock.run(main()) > 10_000
    assert time.monotonic() - started < 60.0
