"""What every inference engine promises. Subclass `InferenceEngineConformance`, with an `engine` fixture over running
servers and a `next_weights` hook."""

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
    """A request of 16 tokens that no end token cuts short, unless told otherwise."""
    options = {"max_new_tokens": 16, "ignore_eos": True, **generation}
    return ModelRequest(list(prompt or PROMPT), GenerationConfig(**options), seed=seed)


@pytest.mark.asyncio
class InferenceEngineConformance:
    """Tests of the `InferenceEngine` contract. They leave the servers as they found them, but for the version."""

    logprob_tolerance = 1e-4
    """Largest difference between log-probs as sampled and as scored."""
    seeded = True
    """Whether a seed decides the sampled tokens whatever else runs on the server."""
    long_completion = 400
    """Tokens that take the servers much longer than staging and committing weights."""
    context_length: int | None = None
    """Tokens of prompt and answer together at most; None: too many to try."""

    @pytest.fixture
    async def engine(self) -> InferenceEngine:
        """Override: an initialized engine of running servers, destroyed after the test. (In pytest-asyncio's strict
        mode use `pytest_asyncio.fixture`.)"""
        raise NotImplementedError("override the `engine` fixture")

    async def next_weights(self, version: int) -> tuple[WeightUpdateMeta, WeightReceipt]:
        """Override: put weights that the servers can load onto a route, as `version`; the trainer's receipt."""
        raise NotImplementedError("override next_weights")

    async def publish(self, engine: InferenceEngine, interrupt: str = "keep") -> int:
        """Stage, verify and commit the next version."""
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
        """Assert that a response is aligned and that its log-probs are those of its own tokens."""
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
    async def test_agenerate_logprobs_and_versions_belong_to_the_tokens(
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

    async def test_agenerate_top_p_and_top_k_leave_logprobs_of_the_full_vocabulary(
        self, engine: InferenceEngine
    ) -> None:
        try:
            response = await engine.agenerate(request(top_k=3, top_p=0.9))
        except InferenceError:
            pytest.skip("the engine refuses truncated sampling, which is allowed")

        await self.check(engine, response)

    async def test_agenerate_seed_reproduces_and_seeds_differ(self, engine: InferenceEngine) -> None:
        if not (self.seeded and engine.capabilities.seeds):
            pytest.skip("this engine's servers do not promise seeds")

        first, again, other = [(await engine.agenerate(request(seed=s))).output_ids for s in (1, 1, 2)]
        together = await asyncio.gather(*(engine.agenerate(request(seed=s)) for s in (2, 1, 3, 1)))

        assert first == again == together[1].output_ids == together[3].output_ids
        assert other == together[0].output_ids != first

    async def test_agenerate_without_seed_differs_and_greedy_does_not(self, engine: InferenceEngine) -> None:
        drawn = [(await engine.agenerate(request(seed=None))).output_ids for _ in range(2)]
        greedy = [(await engine.agenerate(request(seed=s, temperature=0.0))).output_ids for s in (None, 1, 2)]

        assert drawn[0] != drawn[1]
        assert greedy[0] == greedy[1] == greedy[2]

    async def test_agenerate_stop_token_ends_the_answer_and_is_part_of_it(self, engine: InferenceEngine) -> None:
        free = (await engine.agenerate(request(temperature=0.0))).output_ids
        stop = free[5]

        response = await engine.agenerate(request(temperature=0.0, stop_token_ids=[stop]))
        held = await engine.agenerate(request(temperature=0.0, stop_token_ids=[stop], min_new_tokens=16))

        assert response.output_ids == free[: free.index(stop) + 1]
        assert response.stop_reason == StopReason.STOP
        assert (len(held.output_ids), held.stop_reason) == (16, StopReason.LENGTH)
        await self.check(engine, response)

    async def test_agenerate_max_new_tokens_is_the_limit(self, engine: InferenceEngine) -> None:
        for limit in (1, 5):
            response = await engine.agenerate(request(max_new_tokens=limit))

            assert (len(response.output_ids), response.stop_reason) == (limit, StopReason.LENGTH)

    async def test_agenerate_answer_that_would_exceed_the_context_ends_there(self, engine: InferenceEngine) -> None:
        if self.context_length is None:
            pytest.skip("the context is too long to be filled")
        for room in (5, 1):
            prompt = [7] * (self.context_length - room)

            response = await engine.agenerate(request(prompt=prompt, max_new_tokens=16, min_new_tokens=9))

            assert (len(response.output_ids), response.stop_reason) == (room, StopReason.LENGTH)
            await self.check(engine, response)

    async def test_agenerate_prompt_that_fills_the_context_is_refused(self, engine: InferenceEngine) -> None:
        if self.context_length is None:
            pytest.skip("the context is too long to be filled")
        for length in (self.context_length, self.context_length + 1):
            with pytest.raises(InferenceError):
                await engine.agenerate(request(prompt=[7] * length))

    async def test_agenerate_many_at_once_each_gets_its_own_answer(self, engine: InferenceEngine) -> None:
        prompts = [[7 + i % 40, 11, *PROMPT[: i % 5]] for i in range(24)]
        requests = [request(seed=i, prompt=p, max_new_tokens=4 + i % 9) for i, p in enumerate(prompts)]

        responses = await asyncio.gather(*map(engine.agenerate, requests))

        for made, response in zip(requests, responses, strict=True):
            assert response.input_ids == made.input_ids
            assert len(response.output_ids) == made.generation.max_new_tokens
            await self.check(engine, response)

    async def test_agenerate_bad_request_raises_inference_error_and_others_go_on(self, engine: InferenceEngine) -> None:
        bad = ModelRequest([], GenerationConfig())

        failed, fine = await asyncio.gather(engine.agenerate(bad), engine.agenerate(request()), return_exceptions=True)

        assert isinstance(failed, InferenceError)
        assert isinstance(fine, ModelResponse)

    async def test_agenerate_cancelled_requests_leave_the_servers_usable(self, engine: InferenceEngine) -> None:
        tasks = await self._running(engine, 8)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

        assert all(task.cancelled() for task in tasks)
        await self.check(engine, await engine.agenerate(request()))

    # ---- servers by name

    async def test_servers_are_named_as_in_answers_and_each_scores_by_itself(self, engine: InferenceEngine) -> None:
        response = await engine.agenerate(request())
        ids = response.input_ids + response.output_ids
        whichever = await engine.score(ids)

        assert response.server in engine.servers
        assert len(set(engine.servers)) == len(engine.servers)
        for server in engine.servers:
            assert await engine.score(ids, server=server) == pytest.approx(whichever, abs=self.logprob_tolerance)

    async def test_score_of_a_server_that_is_not_there_raises_inference_error(self, engine: InferenceEngine) -> None:
        with pytest.raises(InferenceError, match="nowhere"):
            await engine.score(PROMPT, server="nowhere")

    # ---- weights

    @pytest.mark.parametrize("interrupt", ["keep", "recompute", "wait"])
    async def test_commit_stamps_the_new_version_on_later_tokens_only(
        self, engine: InferenceEngine, interrupt: str
    ) -> None:
        await self.publish(engine)
        for _ in range(5):  # on a busy machine an answer may end before the commit comes: then another is asked for
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

    async def test_stage_serves_nothing_new_before_the_commit(self, engine: InferenceEngine) -> None:
        await self.publish(engine)
        old = engine.version
        meta, sent = await self.next_weights(old + 1)

        receipts = await engine.stage_weights(meta)

        assert {receipt.version for receipt in receipts} == {old + 1}
        sums = sent.checksums if engine.capabilities.checksums else {}
        assert all(receipt.checksums == sums for receipt in receipts)
        assert engine.version == old
        assert set((await engine.agenerate(request())).versions) == {old}

    async def test_stage_of_missing_weights_and_commit_of_what_is_not_staged_raise_weight_update_error(
        self, engine: InferenceEngine
    ) -> None:
        await self.publish(engine)
        version = engine.version
        meta, _ = await self.next_weights(version + 1)

        missing = tuple(replace(part, location=part.location + "-missing") for part in meta.parts)
        with pytest.raises(WeightUpdateError):
            await engine.stage_weights(replace(meta, parts=missing))
        with pytest.raises(WeightUpdateError):
            await engine.commit_weights(version + 7)

    # ---- the rest

    async def test_pause_holds_answers_back_until_resume(self, engine: InferenceEngine) -> None:
        for _ in range(5):  # on a busy machine an answer may end before the pause comes: then another is asked for
            [running] = await self._running(engine)

            await engine.pause()
            late = asyncio.ensure_future(engine.agenerate(request()))
            done, _ = await asyncio.wait({running, late}, timeout=0.5)
            await engine.resume()

            assert late not in done
            assert len((await running).output_ids) == self.long_completion
            assert len((await late).output_ids) == 16
            if not done:
                break
        assert not done

    async def test_stats_count_servers_and_generated_tokens(self, engine: InferenceEngine) -> None:
        before = await engine.stats()
        await engine.agenerate(request(max_new_tokens=10))
        after = await engine.stats()

        assert {"servers", "running", "waiting", "generated_tokens", "busy_seconds"} <= after.keys()
        assert after["servers"] >= 1
        assert after["generated_tokens"] - before["generated_tokens"] >= 10
        assert after["busy_seconds"] >= before["busy_seconds"]

    async def test_destroy_fails_what_waits_and_what_comes_with_inference_error(self, engine: InferenceEngine) -> None:
        [waiting] = await self._running(engine)

        await engine.destroy()

        with pytest.raises(InferenceError):
            await asyncio.wait_for(waiting, 30)
        with pytest.raises(InferenceError):
            await engine.agenerate(request())
        await engine.destroy()  # is safe twice

    async def _running(self, engine: InferenceEngine, count: int = 1) -> list[asyncio.Task[ModelResponse]]:
        """Long answers that the servers generate, none of which has ended; asked for anew where one ends unseen."""
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
