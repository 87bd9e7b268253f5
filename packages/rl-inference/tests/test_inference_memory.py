"""Memory of the KV cache: pages of sequences, eviction when pages are short, and the announced context length."""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from rl_contracts.config import ClientConfig, GenerationConfig
from rl_contracts.data import ModelRequest, ServeSpec
from rl_contracts.errors import InferenceError, ModelError, WeightUpdateError
from rl_contracts.testing import put_weights
from rl_inference import EmbeddedEngine, EmbeddedEngineConfig
from rl_inference.embedded_server.job import GenerationJob
from rl_inference.embedded_server.model import pages
from rl_inference.embedded_server.model.loading import load_model
from rl_inference.embedded_server.model.memory import group_bytes
from rl_inference.embedded_server.model.pages import PAGE
from rl_inference.embedded_server.slots import SlotTable
from rl_inference.embedded_server.weights import ServedWeights
from rl_inference.testing import VOCAB_SIZE, ServerProcess, reference_logprobs, reference_model, tiny_model


def load(path: Path, slots: int, tokens: int = 0, **settings: Any) -> SlotTable:
    """Return slots over a cache of `tokens` tokens in total (0: enough for all slots)."""
    model = load_model(EmbeddedEngineConfig(max_sequences=slots, **settings), ServeSpec(str(path), device="cpu"))
    if tokens:
        model.cache.allocate(tokens)
    return SlotTable(model, slots, 512, lambda: 0)


def job(prompt: list[int], tokens: int, seed: int = 1) -> GenerationJob:
    return GenerationJob("job", prompt, GenerationConfig(max_new_tokens=tokens), seed, frozenset())


def run(table: SlotTable, jobs: list[GenerationJob]) -> int:
    """Run the jobs to their end, and return the number of evictions."""
    waiting, evictions = deque(jobs), 0
    while waiting or table.jobs:
        table.admit(waiting)
        table.step()
        evicted = table.take_evicted()
        waiting.extendleft(evicted)
        evictions += len(evicted)
    return evictions


def check(path: Path, jobs: list[GenerationJob]) -> None:
    """Assert that all jobs have their full length and the log-probs of transformers."""
    model = reference_model(path)
    for each in jobs:
        assert len(each.output_ids) == each.generation.max_new_tokens
        assert each.logprobs == pytest.approx(reference_logprobs(model, each.prompt, each.output_ids), abs=2e-5)


def ids(count: int, start: int = 0) -> list[int]:
    return [3 + (7 * i + start) % 90 for i in range(count)]


def test_long_sequence_takes_and_frees_only_its_own_pages(model_path: Path) -> None:
    table = load(model_path, slots=8)
    cache = table.model.cache
    short_jobs = [job([5, 9, 30 + i], 20, i) for i in range(4)]
    long = job(ids(400), 10)

    waiting = deque([*short_jobs, long])
    table.admit(waiting)
    table.step()

    used_tokens = cache.tokens - len(cache.pages.free) * PAGE
    assert used_tokens == 4 * PAGE + 4 * PAGE  # one page for each short job
    run(table, [])
    check(model_path, [*short_jobs, long])
    table.forget_prefixes()
    assert len(cache.pages.free) * PAGE == cache.tokens


@pytest.mark.slow
def test_cache_full_evicts_youngest_jobs_and_all_complete(model_path: Path) -> None:
    table = load(model_path, slots=6, tokens=5 * PAGE)
    jobs = [job(ids(90, i), 200, seed=i) for i in range(6)]

    evictions = run(table, jobs)

    assert evictions > 0
    check(model_path, jobs)
    assert len(table.model.cache.pages.free) < 5  # prefixes are still cached
    table.forget_prefixes()
    assert len(table.model.cache.pages.free) == 5


def test_prefix_that_fills_cache_is_evicted_for_new_prompt(model_path: Path) -> None:
    table = load(model_path, slots=4, tokens=4 * PAGE)
    jobs = [job(ids(440), 20), job([*ids(200), *ids(240, 50)], 20)]  # the second job could share a page

    for each in jobs:
        run(table, [each])

    check(model_path, jobs)


def test_prefix_shared_pages_are_not_overwritten(model_path: Path) -> None:
    table = load(model_path, slots=4)
    prompt = ids(300)
    first = job(prompt, 40, seed=1)
    group = [job(prompt, 40, seed=seed) for seed in (2, 3)]
    run(table, [first, *group])
    free = len(table.model.cache.pages.free)
    # both continue a cached sequence of the first job: one in its slot, one from a prefix of it
    further = [job([*first.tokens, 8, 9], 30, seed=4), job([*prompt[:290], 7], 30, seed=5)]

    run(table, further)

    check(model_path, [first, *group, *further])
    assert table.model.cache.tokens - free * PAGE == 2 * PAGE + 3 * PAGE  # two whole pages of the prompt are shared
    assert table.prefix_tokens == 2 * 299 + 339 + 288
    assert table.prompt_tokens == 3 * 300 + 342 + 291


def test_prefix_alternating_conversations_prefill_only_new_tokens(model_path: Path) -> None:
    table = load(model_path, slots=8)
    conversations = [ids(40, 1), ids(40, 5)]

    prefilled = 0
    for turn in range(6):
        for number in (0, 1):
            before = table.prefix_tokens
            each = job([*conversations[number], 10 + turn], 10, seed=turn)
            run(table, [each])
            prefilled += len(each.prompt) - (table.prefix_tokens - before)
            conversations[number] = each.tokens

    # the whole first prompts; then the last token of each completion and the new token
    assert prefilled == 2 * 41 + 2 * 5 * 2


def test_prefix_least_recently_used_is_evicted_first(model_path: Path) -> None:
    table = load(model_path, slots=3)
    conversations = [job(ids(40, start), 2) for start in (1, 5, 9)]
    for each in conversations:
        run(table, [each])
    conversations[0] = job([*conversations[0].tokens, 7], 2)
    run(table, [conversations[0]])  # uses the first prefix again
    run(table, [job(ids(40, 13), 2)])  # takes the slot of the second prefix

    reused = []
    for each in (conversations[0], conversations[2], conversations[1]):
        before = table.prefix_tokens
        run(table, [job([*each.tokens, 8], 2)])
        reused.append(table.prefix_tokens - before)

    assert reused == [len(conversations[0].tokens) - 1, 41, 0]


def test_waiting_prompts_are_hashed_once(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_inference.embedded_server import slots

    table = load(model_path, slots=4)
    table._prefill_tokens = 16
    hashed: list[int] = []

    def counted_prefix_keys(tokens: list[int]) -> list[int]:
        hashed.append(len(tokens))
        return pages.prefix_keys(tokens)

    monkeypatch.setattr(slots, "prefix_keys", counted_prefix_keys)
    waiting = deque(job(ids(200), 4, seed=i) for i in range(200))

    for _ in range(10):
        table.admit(waiting)
        table.step()

    assert len(waiting) == 199  # they wait for the prefill of the first prompt
    assert len(hashed) <= 5


@pytest.mark.slow
def test_nan_of_broken_weights_does_not_reach_later_jobs(model_path: Path) -> None:
    table = load(model_path, slots=4, dtype="bfloat16")
    weight = table.model.model.get_input_embeddings().weight
    good = weight.data.clone()
    weight.data.fill_(float("nan"))
    broken = [job(ids(60, i), 20, seed=i) for i in range(4)]
    run(table, broken)
    assert all((each.finish_reason or {})["type"] == "error" for each in broken)
    weight.data.copy_(good)
    table._version = lambda: 1  # type: ignore[method-assign]

    after = [job(ids(20, i), 20, seed=i) for i in range(8)]
    for each in after:
        run(table, [each])

    assert [len(each.output_ids) for each in after] == [20] * 8


def test_stage_non_finite_weights_names_the_parameter(model_path: Path, tmp_path: Path) -> None:
    weights = ServedWeights(load(model_path, slots=1).model.model, str(tmp_path), "test", version=0)
    tensors = {name: p.detach().clone() for name, p in reference_model(model_path).named_parameters()}
    tensors["model.norm.weight"][5] = float("inf")

    with pytest.raises(WeightUpdateError, match=r"version 1: .* nan or infinity in 1 parameters.*model.norm.weight"):
        weights.stage(put_weights(tmp_path, 1, tensors.items(), "disk")[0])

    assert weights.staged_version is None
    tensors["model.norm.weight"][5] = 1.0
    weights.stage(put_weights(tmp_path, 2, tensors.items(), "disk")[0])
    assert weights.staged_version == 2


def test_score_in_chunks_equals_one_pass(model_path: Path) -> None:
    table = load(model_path, slots=2, tokens=5 * PAGE)
    sequence = ids(450)
    expected = table.model.score(sequence, 0.7)
    jobs = [job(ids(60, i), 150, seed=i) for i in range(2)]
    table.admit(deque(jobs))
    table.step()

    logprobs = [0.0]
    for start in range(0, len(sequence) - 1, 100):
        count = min(100, len(sequence) - 1 - start)
        table.make_room(2, start + count)
        logprobs += table.model.score_part(sequence, start, count, 0.7)

    assert logprobs == pytest.approx(expected, abs=2e-5)
    evicted = table.take_evicted()
    assert evicted == [jobs[1]]  # only one of five pages remained for it
    table.model.cache.pages.assign(2, [])
    run(table, evicted)
    check(model_path, jobs)


@pytest.mark.slow
async def test_server_with_small_cache_completes_full_context_requests(model_path: Path, tmp_path: Path) -> None:
    """The cache holds one sequence; the requests take turns, and none fails."""
    options = {"max_sequences": 4, "cache_gib": 200 * 2**10 / 2**30}
    with ServerProcess(model_path, tmp_path / "server.log", options=options) as server:
        async with aiohttp.ClientSession(server.address) as http, http.get("/model_info") as response:
            context = (await response.json())["context_length"]
        assert 3 * PAGE == context < reference_model(model_path).config.max_position_embeddings
        engine = EmbeddedEngine()
        engine.initialize([server.address])
        requests = [
            ModelRequest(ids(context - 40, start), GenerationConfig(max_new_tokens=40, min_new_tokens=40))
            for start in range(6)
        ]
        try:
            responses = await asyncio.gather(*(engine.agenerate(request) for request in requests))
            with pytest.raises(InferenceError, match=f"{context}"):
                await engine.agenerate(ModelRequest(ids(context), GenerationConfig()))
        finally:
            await engine.destroy()
        assert server.exit_code is None
    assert [len(response.output_ids) for response in responses] == [40] * 6


@pytest.mark.parametrize("weights_dir", ["", "somewhere"])
def test_load_with_sharing_divides_the_cache_between_servers(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, weights_dir: str
) -> None:
    monkeypatch.setattr("rl_inference.embedded_server.model.memory.free_bytes", lambda _: 8 * 2**20)

    def cache_size(sharing: int) -> int:
        spec = ServeSpec(str(model_path), device="cpu", weights_dir=weights_dir)
        return load_model(EmbeddedEngineConfig(max_sequences=64), spec, sharing).cache.tokens

    assert 0 < 4 * cache_size(4) <= cache_size(1)


@pytest.mark.slow
def test_server_with_sharing_uses_its_part_of_the_memory(model_path: Path, tmp_path: Path) -> None:
    server = ServerProcess(model_path, tmp_path / "server.log", options={"sharing": 10**9})

    with pytest.raises(InferenceError, match="each of 1000000000 servers"):
        server.start().wait_ready()


def test_score_computes_logits_in_blocks_after_one_decoder_pass(model_path: Path) -> None:
    """The deterministic mode scores a completion this way when it ends."""
    model, sequence, logit_counts, passes = load(model_path, slots=1).model, ids(350), list[int](), list[int]()
    expected = model.score(sequence, 0.7)
    lm_head = model.model.get_output_embeddings()
    lm_head.register_forward_hook(lambda _, __, logits: logit_counts.append(logits.numel()))
    model.model.base_model.layers[0].register_forward_hook(lambda *_: passes.append(1))
    assert model.block == 2**26 // VOCAB_SIZE
    model.block = 100

    logprobs = model.score(sequence, 0.7)

    assert logprobs == pytest.approx(expected, abs=2e-5)
    assert logit_counts == [100 * VOCAB_SIZE] * 3 + [49 * VOCAB_SIZE]
    assert len(passes) == 1
    assert model.score(sequence[:90], 0.7) == pytest.approx(expected[:90], abs=2e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cache_gib": 1e-4, "context_length": 500}, r"500 tokens of context need .*512 bytes.*cache_gib"),
        ({"cache_gib": 1e6}, r"GiB free for each of 1 servers"),
    ],
)
def test_load_cache_that_does_not_fit_is_rejected_with_sizes(
    model_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(EmbeddedEngineConfig(max_sequences=4, **settings), ServeSpec(str(model_path), device="cpu"))


def test_group_bytes_returns_remaining_bytes_of_each_group(tmp_path: Path) -> None:
    listing = tmp_path / "cgroup"
    files = {
        "a/b/memory.max": "max",
        "a/b/memory.current": "10",
        "a/b/memory.stat": "inactive_file 4\n",
        "a/memory.max": "1000",
        "a/memory.current": "900",
        "a/memory.stat": "anon 700\ninactive_file 150\n",
        "memory/c/memory.limit_in_bytes": "500",
        "memory/c/memory.usage_in_bytes": "600",
        "memory/c/memory.stat": "inactive_file 1\ntotal_inactive_file 40\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    listing.write_text("0::/a/b\n3:cpu,cpuacct:/x\n2:memory:/c\n")

    assert group_bytes(listing, tmp_path) == [1000 - 900 + 150, 0]
    assert group_bytes(tmp_path / "missing", tmp_path) == []


async def cache_tokens(server: ServerProcess) -> int:
    async with aiohttp.ClientSession() as session, session.get(f"{server.address}/stats") as stats:
        return int((await stats.json())["cache_tokens"])


@pytest.mark.slow
async def test_sleeping_server_frees_cache_and_resumes_completions(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "wide", num_hidden_layers=4, num_key_value_heads=4, head_dim=128)
    cache_bytes = 8 * 350 * 4 * 2 * 4 * 128 * 4  # bytes of the keys and values of eight completions
    generation = GenerationConfig(max_new_tokens=250, min_new_tokens=250, ignore_eos=True)
    with ServerProcess(path, tmp_path / "server.log", options={"max_sequences": 8}) as server:
        engine = EmbeddedEngine(client=ClientConfig(progress_timeout=60))
        engine.initialize([server.address])
        tokens_before = await cache_tokens(server)

        def generate_all() -> Any:
            return asyncio.gather(*(engine.agenerate(ModelRequest(ids(100, i), generation, seed=i)) for i in range(8)))

        await generate_all()
        task = asyncio.ensure_future(generate_all())
        async with asyncio.timeout(30):
            while (await engine.stats())["running"] < 8:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.001)
        process = psutil.Process(server.process.pid)
        bytes_before = process.memory_info().rss
        reported_bytes = await engine.sleep()
        measured_bytes = bytes_before - process.memory_info().rss
        scoring = asyncio.ensure_future(engine.score(ids(400)))
        assert await cache_tokens(server) == 0
        assert not task.done()
        await engine.wake()
        responses = await asyncio.wait_for(task, 60)
        await asyncio.wait_for(scoring, 60)
        assert await cache_tokens(server) == tokens_before
        async with aiohttp.ClientSession() as session, session.post(f"{server.address}/sleep", json={}) as rejected:
            assert rejected.status >= 400
            assert "must be paused" in await rejected.text()
        await engine.destroy()

    assert reported_bytes > 0.8 * cache_bytes
    assert measured_bytes > 0.8 * cache_bytes
    model = reference_model(path)
    for response in responses[:2]:
        assert len(response.output_ids) == 250
        assert response.logprobs == pytest.approx(
            reference_logprobs(model, response.input_ids, response.output_ids), abs=2e-5
        )
