"""Conformance suite for inference engines.

Subclass `InferenceEngineConformance` and override the `engine` fixture and the `next_weights` hook.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from rl_contracts.config import GenerationConfig
from rl_contracts.data import ModelRequest, ModelResponse, StopReason, WeightReceipt, WeightUpdateMeta
from rl_contracts.errors import InferenceError, WeightUpdateError
from rl_contracts.inference import InferenceEngine
from rl_contracts.weights import verify_receipt

__all__ = ["InferenceEngineConformance"]

PROMPT = [5, 17, 42, 9, 28, 33]


def request(seed: int | None = 1, prompt: list[int] | None = None, **generation: Any) -> ModelRequest:
    """Return a request for 16 tokens that ignores the end token, unless `generation` overrides this."""
    options = {"max_new_tokens": 16, "ignore_eos": True, **generation}
    return ModelRequest(list(prompt or PROMPT), GenerationConfig(**options), seed=seed)


@pytest.mark.asyncio
class InferenceEngineConformance:
    """Tests of the `InferenceEngine` contract. On the servers, they change only the version of the weights."""

    logprob_tolerance = 1e-4
    """Largest allowed difference between sampled and scored log-probs, in nats."""
    seeded = True
    """True if a seed alone determines the sampled tokens, independent of concurrent requests."""
    long_completion = 400
    """Length of a completion that takes the servers much longer than staging and committing weights, in tokens."""
    context_length: int | None = None
    """Maximum tokens of prompt and completion together, or None to skip the tests that fill the context."""

    @pytest.fixture
    async def engine(self) -> InferenceEngine:
        """Initialized engine with running servers, destroyed after the test. Subclasses override it.

        In pytest-asyncio's strict mode, use `pytest_asyncio.fixture`.
        """
        raise NotImplementedError("the `engine` fixture is not implemented: override it")

    async def next_weights(self, version: int) -> tuple[WeightUpdateMeta, WeightReceipt]:
        """Send `version` over a route, with weights that the servers can load. Subclasses override it.

        Returns:
            The metadata of the update and the trainer's receipt.
        """
        raise NotImplementedError("`next_weights` is not implemented: override it")

    async def publish(self, engine: InferenceEngine, interrupt: str = "keep") -> int:
        """Stage, verify and commit the next version, and return its number."""
        await engine.stats()
        version = engine.version + 1
        meta, sent = await self.next_weights(version)
        for receipt in await engine.stage_weights(meta):
            if engine.capabilities.checksums:
                verify_receipt(sent, receipt, meta.route)
        seconds = await engine.commit_weights(version, interrupt)
        assert seconds >= 0
        assert engine.version == version
        return version

    async def check(self, engine: InferenceEngine, response: ModelResponse, temperature: float = 1.0) -> None:
        """Assert that a response has one log-prob and version per token and that `score` returns the same log-probs."""
        count = len(response.output_ids)
        assert count == len(response.logprobs) == len(response.versions) > 0
        assert all(logprob <= 0 for logprob in response.logprobs)
        assert response.stop_reason in (StopReason.STOP, StopReason.LENGTH)
        if temperature != 1 and not engine.capabilities.any_score_temperature:
            return
        scores = await engine.score(response.input_ids + response.output_ids, temperature)
        assert len(scores) == len(response.input_ids) + count
        assert scores[0] == 0.0
        assert scores[-count:] == pytest.approx(response.logprobs, abs=self.logprob_tolerance)

    # ---- generation

    @pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
    async def test_agenerate_returns_aligned_logprobs_and_versions(
        self, engine: InferenceEngine, temperature: float
    ) -> None:
        await engine.stats()

        response = await engine.agenerate(request(temperature=temperature))

        assert response.input_ids == PROMPT
        assert (len(response.output_ids), response.stop_reason) == (16, StopReason.LENGTH)
        assert set(response.versions) == {engine.version}
        assert response.server
        assert response.seconds >= 0
        await self.check(engine, response, temperature or 1.0)

    async def test_agenerate_top_p_and_top_k_keep_full_vocabulary_logprobs(self, engine: InferenceEngine) -> None:
        try:
            response = await engine.agenerate(request(top_k=3, top_p=0.9))
        except InferenceError:
            pytest.skip("the engine rejects top_k and top_p, as the contract allows")

        await self.check(engine, response)

    async def test_agenerate_same_seed_repeats_and_other_seed_differs(self, engine: InferenceEngine) -> None:
        if not (self.seeded and engine.capabilities.seeds):
            pytest.skip("the servers of this engine do not support seeds")

        first, repeated, other = [(await engine.agenerate(request(seed=s))).output_ids for s in (1, 1, 2)]
        concurrent = await asyncio.gather(*(engine.agenerate(request(seed=s)) for s in (2, 1, 3, 1)))

        assert first == repeated == concurrent[1].output_ids == concurrent[3].output_ids
        assert other == concurrent[0].output_ids != first

    async def test_agenerate_without_seed_varies_and_greedy_repeats(self, engine: InferenceEngine) -> None:
        sampled = [(await engine.agenerate(request(seed=None))).output_ids for _ in range(2)]
        greedy = [(await engine.agenerate(request(seed=s, temperature=0.0))).output_ids for s in (None, 1, 2)]

        assert sampled[0] != sampled[1]
        assert greedy[0] == greedy[1] == greedy[2]

    async def test_agenerate_stop_token_ends_completion_and_is_included(self, engine: InferenceEngine) -> None:
        unstopped = (await engine.agenerate(request(temperature=0.0))).output_ids
        stop = unstopped[5]

        response = await engine.agenerate(request(temperature=0.0, stop_token_ids=[stop]))
        continued = await engine.agenerate(request(temperature=0.0, stop_token_ids=[stop], min_new_tokens=16))

        assert response.output_ids == unstopped[: unstopped.index(stop) + 1]
        assert response.stop_reason == StopReason.STOP
        assert (len(continued.output_ids), continued.stop_reason) == (16, StopReason.LENGTH)
        await self.check(engine, response)

    async def test_agenerate_max_new_tokens_limits_the_completion(self, engine: InferenceEngine) -> None:
        for limit in (1, 5):
            response = await engine.agenerate(request(max_new_tokens=limit))

            assert (len(response.output_ids), response.stop_reason) == (limit, StopReason.LENGTH)

    async def test_agenerate_completion_at_context_length_is_truncated(self, engine: InferenceEngine) -> None:
        if self.context_length is None:
            pytest.skip("context_length is None")
        for remaining in (5, 1):
            prompt = [7] * (self.context_length - remaining)

            response = await engine.agenerate(request(prompt=prompt, max_new_tokens=16, min_new_tokens=9))

            assert (len(response.output_ids), response.stop_reason) == (remaining, StopReason.LENGTH)
            await self.check(engine, response)

    async def test_agenerate_prompt_filling_the_context_raises(self, engine: InferenceEngine) -> None:
        if self.context_length is None:
            pytest.skip("context_length is None")
        for length in (self.context_length, self.context_length + 1):
            with pytest.raises(InferenceError):
                await engine.agenerate(request(prompt=[7] * length))

    async def test_agenerate_concurrent_requests_get_their_own_completions(self, engine: InferenceEngine) -> None:
        prompts = [[7 + i % 40, 11, *PROMPT[: i % 5]] for i in range(24)]
        requests = [request(seed=i, prompt=p, max_new_tokens=4 + i % 9) for i, p in enumerate(prompts)]

        responses = await asyncio.gather(*map(engine.agenerate, requests))

        for sent, response in zip(requests, responses, strict=True):
            assert response.input_ids == sent.input_ids
            assert len(response.output_ids) == sent.generation.max_new_tokens
            await self.check(engine, response)

    async def test_agenerate_bad_request_raises_and_other_requests_succeed(self, engine: InferenceEngine) -> None:
        bad = ModelRequest([], GenerationConfig())

        error, response = await asyncio.gather(
            engine.agenerate(bad), engine.agenerate(request()), return_exceptions=True
        )

        assert isinstance(error, InferenceError)
        assert isinstance(response, ModelResponse)

    async def test_agenerate_after_cancelled_requests_succeeds(self, engine: InferenceEngine) -> None:
        tasks = await self._running(engine, 8)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

        assert all(task.cancelled() for task in tasks)
        await self.check(engine, await engine.agenerate(request()))

    # ---- servers by name

    async def test_score_on_each_named_server_agrees(self, engine: InferenceEngine) -> None:
        response = await engine.agenerate(request())
        ids = response.input_ids + response.output_ids
        expected = await engine.score(ids)

        assert response.server in engine.servers
        assert len(set(engine.servers)) == len(engine.servers)
        for server in engine.servers:
            assert await engine.score(ids, server=server) == pytest.approx(expected, abs=self.logprob_tolerance)

    async def test_score_unknown_server_raises_inference_error(self, engine: InferenceEngine) -> None:
        with pytest.raises(InferenceError, match="unknown-server"):
            await engine.score(PROMPT, server="unknown-server")

    # ---- weights

    @pytest.mark.parametrize("interrupt", ["keep", "recompute", "wait"])
    async def test_commit_weights_stamps_new_version_on_later_tokens_only(
        self, engine: InferenceEngine, interrupt: str
    ) -> None:
        await self.publish(engine)
        for _ in range(5):  # a completion can end before the commit on a busy machine: try again
            old = engine.version
            [running] = await self._running(engine)

            new = await self.publish(engine, interrupt)

            response, later = await running, await engine.agenerate(request())
            assert len(response.output_ids) == len(response.logprobs) == len(response.versions) == self.long_completion
            assert response.versions == sorted(response.versions)
            assert set(later.versions) == {new}
            if interrupt == "wait" or new in response.versions:
                break
        assert set(response.versions) == ({old} if interrupt == "wait" else {old, new})

    async def test_stage_weights_serves_old_version_until_commit(self, engine: InferenceEngine) -> None:
        await self.publish(engine)
        old = engine.version
        meta, sent = await self.next_weights(old + 1)

        receipts = await engine.stage_weights(meta)

        assert {receipt.version for receipt in receipts} == {old + 1}
        checksums = sent.checksums if engine.capabilities.checksums else {}
        assert all(receipt.checksums == checksums for receipt in receipts)
        assert engine.version == old
        assert set((await engine.agenerate(request())).versions) == {old}

    async def test_stage_missing_or_commit_unstaged_raises_weight_update_error(self, engine: InferenceEngine) -> None:
        await self.publish(engine)
        version = engine.version
        meta, _ = await self.next_weights(version + 1)

        missing = tuple(replace(part, location=part.location + "-missing") for part in meta.parts)
        with pytest.raises(WeightUpdateError):
            await engine.stage_weights(replace(meta, parts=missing))
        with pytest.raises(WeightUpdateError):
            await engine.commit_weights(version + 7)

    # ---- pause, statistics, destroy

    async def test_pause_blocks_completions_until_resume(self, engine: InferenceEngine) -> None:
        for _ in range(5):  # a completion can end before the pause on a busy machine: try again
            [running] = await self._running(engine)

            await engine.pause()
            queued = asyncio.ensure_future(engine.agenerate(request()))
            done, _ = await asyncio.wait({running, queued}, timeout=0.5)
            await engine.resume()

            assert queued not in done
            assert len((await running).output_ids) == self.long_completion
            assert len((await queued).output_ids) == 16
            if not done:
                break
        assert not done

    async def test_stats_counts_servers_and_generated_tokens(self, engine: InferenceEngine) -> None:
        before = await engine.stats()
        await engine.agenerate(request(max_new_tokens=10))
        after = await engine.stats()

        assert {"servers", "running", "waiting", "generated_tokens", "busy_seconds"} <= after.keys()
        assert after["servers"] >= 1
        assert after["generated_tokens"] - before["generated_tokens"] >= 10
        assert after["busy_seconds"] >= before["busy_seconds"]

    async def test_destroy_fails_pending_and_later_requests(self, engine: InferenceEngine) -> None:
        [pending] = await self._running(engine)

        await engine.destroy()

        with pytest.raises(InferenceError):
            await asyncio.wait_for(pending, 30)
        with pytest.raises(InferenceError):
            await engine.agenerate(request())
        await engine.destroy()  # may be called twice

    async def _running(self, engine: InferenceEngine, count: int = 1) -> list[asyncio.Task[ModelResponse]]:
        """Start `count` long completions and return their tasks while all of them are running.

        If one ends before `stats` shows a running request, start over.
        """
        long = request(max_new_tokens=self.long_completion)
        async with asyncio.timeout(120):
            while True:
                tasks = [asyncio.create_task(engine.agenerate(long)) for _ in range(count)]
                while not any(task.done() for task in tasks):
                    stats = await engine.stats()
                    if stats["running"] >= 1 and not any(task.done() for task in tasks):
                        return tasks
                    await asyncio.sleep(0.002)
                await asyncio.gather(*tasks)
