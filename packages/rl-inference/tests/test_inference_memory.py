"""What sequences take of the cache, who gives way where it is short, and what a server promises."""

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
    """Slots whose cache holds so many tokens in all (0: as many as they can need)."""
    model = load_model(EmbeddedEngineConfig(slots=slots, **settings), ServeSpec(str(path), device="cpu"))
    if tokens:
        model.cache.allocate(tokens)
    return SlotTable(model, slots, 512, lambda: 0)


def job(prompt: list[int], tokens: int, seed: int = 1) -> GenerationJob:
    return GenerationJob("job", prompt, GenerationConfig(max_new_tokens=tokens), seed, frozenset())


def run(table: SlotTable, jobs: list[GenerationJob]) -> int:
    """Answer them; how often one gave up its slot."""
    waiting, given_up = deque(jobs), 0
    while waiting or table.jobs:
        table.admit(waiting)
        table.step()
        lost = table.take_evicted()
        waiting.extendleft(lost)
        given_up += len(lost)
    return given_up


def check(path: Path, jobs: list[GenerationJob]) -> None:
    """All have their length and the log-probs of transformers."""
    model = reference_model(path)
    for each in jobs:
        assert len(each.output_ids) == each.generation.max_new_tokens
        assert each.logprobs == pytest.approx(reference_logprobs(model, each.prompt, each.output_ids), abs=2e-5)


def ids(count: int, start: int = 0) -> list[int]:
    return [3 + (7 * i + start) % 90 for i in range(count)]


def test_long_sequence_takes_pages_for_itself_alone_and_they_can_be_had_again(model_path: Path) -> None:
    table = load(model_path, slots=8)
    cache = table.model.cache
    others = [job([5, 9, 30 + i], 20, i) for i in range(4)]
    long = job(ids(400), 10)

    waiting = deque([*others, long])
    table.admit(waiting)
    table.step()

    taken = cache.tokens - len(cache.pages.free) * PAGE
    assert taken == 4 * PAGE + 4 * PAGE  # a page for each of the others
    run(table, [])
    check(model_path, [*others, long])
    table.forget_prefixes()
    assert len(cache.pages.free) * PAGE == cache.tokens


@pytest.mark.slow
def test_memory_short_the_youngest_give_way_and_all_answers_are_right(model_path: Path) -> None:
    table = load(model_path, slots=6, tokens=5 * PAGE)
    jobs = [job(ids(90, i), 200, seed=i) for i in range(6)]

    given_up = run(table, jobs)

    assert given_up > 0
    check(model_path, jobs)
    assert len(table.model.cache.pages.free) < 5  # prefixes are still held
    table.forget_prefixes()
    assert len(table.model.cache.pages.free) == 5


def test_memory_prompt_that_does_not_fit_beside_the_others_waits(model_path: Path) -> None:
    table = load(model_path, slots=4, tokens=4 * PAGE)
    first, large = job([5, 9], 30), job(ids(450), 20)
    waiting = deque([first])
    table.admit(waiting)
    table.step()

    waiting.append(large)
    table.admit(waiting)

    assert list(waiting) == [large]
    run(table, [large])
    check(model_path, [first, large])


def test_memory_prefix_that_fills_it_gives_way_to_a_prompt(model_path: Path) -> None:
    table = load(model_path, slots=4, tokens=4 * PAGE)
    jobs = [job(ids(440), 20), job([*ids(200), *ids(240, 50)], 20)]  # the second could share a page

    for each in jobs:
        run(table, [each])

    check(model_path, jobs)


def test_prefix_shared_pages_are_not_written_by_who_goes_on(model_path: Path) -> None:
    table = load(model_path, slots=4)
    prompt = ids(300)
    first = job(prompt, 40, seed=1)
    group = [job(prompt, 40, seed=seed) for seed in (2, 3)]
    run(table, [first, *group])
    free = len(table.model.cache.pages.free)
    # both go on from what the first one holds: one in its slot, one from its beginning
    further = [job([*first.tokens, 8, 9], 30, seed=4), job([*prompt[:290], 7], 30, seed=5)]

    run(table, further)

    check(model_path, [first, *group, *further])
    assert table.model.cache.tokens - free * PAGE == 2 * PAGE + 3 * PAGE  # two whole pages of the prompt are shared
    assert table.prefix_tokens == 2 * 299 + 339 + 288
    assert table.prompt_tokens == 3 * 300 + 342 + 291


def test_prefix_conversations_that_take_turns_read_only_what_is_new(model_path: Path) -> None:
    table = load(model_path, slots=8)
    talks = [ids(40, 1), ids(40, 5)]

    read = 0
    for turn in range(6):
        for number in (0, 1):
            before = table.prefix_tokens
            each = job([*talks[number], 10 + turn], 10, seed=turn)
            run(table, [each])
            read += len(each.prompt) - (table.prefix_tokens - before)
            talks[number] = each.tokens

    # the first prompts whole; then the last token of each answer and the new one
    assert read == 2 * 41 + 2 * 5 * 2


def test_prefix_all_slots_used_the_least_recently_used_gives_way(model_path: Path) -> None:
    table = load(model_path, slots=3)
    talks = [job(ids(40, start), 2) for start in (1, 5, 9)]
    for each in talks:
        run(table, [each])
    talks[0] = job([*talks[0].tokens, 7], 2)
    run(table, [talks[0]])  # uses the first one again
    run(table, [job(ids(40, 13), 2)])  # takes the slot of the second

    found = []
    for each in (talks[0], talks[2], talks[1]):
        before = table.prefix_tokens
        run(table, [job([*each.tokens, 8], 2)])
        found.append(table.prefix_tokens - before)

    assert found == [len(talks[0].tokens) - 1, 41, 0]


def test_waiting_answers_are_hashed_once(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_inference.embedded_server import slots

    table = load(model_path, slots=4)
    table._prefill_tokens = 16
    hashed: list[int] = []

    def counted(tokens: list[int]) -> list[int]:
        hashed.append(len(tokens))
        return pages.prefix_keys(tokens)

    monkeypatch.setattr(slots, "prefix_keys", counted)
    waiting = deque(job(ids(200), 4, seed=i) for i in range(200))

    for _ in range(10):
        table.admit(waiting)
        table.step()

    assert len(waiting) == 199  # they wait for the first one's prompt
    assert len(hashed) <= 5


@pytest.mark.slow
def test_weights_that_compute_nan_leave_nothing_behind_in_bfloat16(model_path: Path) -> None:
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


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_stage_weights_that_are_not_finite_are_refused_by_name(model_path: Path, tmp_path: Path, number: float) -> None:
    weights = ServedWeights(load(model_path, slots=1).model.model, str(tmp_path), "test", version=0)
    tensors = {name: p.detach().clone() for name, p in reference_model(model_path).named_parameters()}
    tensors["model.norm.weight"][5] = number

    with pytest.raises(WeightUpdateError, match=r"version 1: .* nan or infinity in 1 parameters.*model.norm.weight"):
        weights.stage(put_weights(tmp_path, 1, tensors.items(), "disk")[0])

    assert weights.staged_version is None
    tensors["model.norm.weight"][5] = 1.0
    weights.stage(put_weights(tmp_path, 2, tensors.items(), "disk")[0])
    assert weights.staged_version == 2


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)])
def test_score_in_parts_equals_the_whole(model_path: Path, dtype: str) -> None:
    table = load(model_path, slots=2, tokens=5 * PAGE, dtype=dtype)
    row = ids(450)
    whole = table.model.score(row, 0.7)
    answers = [job(ids(60, i), 150, seed=i) for i in range(2)]
    table.admit(deque(answers))
    table.step()

    parts = [0.0]
    for start in range(0, len(row) - 1, 100):
        count = min(100, len(row) - 1 - start)
        table.make_room(2, start + count)
        parts += table.model.score_part(row, start, count, 0.7)

    assert parts == pytest.approx(whole, abs=2e-5 if dtype == "float32" else 0.1)
    lost = table.take_evicted()
    assert lost == [answers[1]]  # one of five pages was left for it
    table.model.cache.pages.assign(2, [])
    run(table, lost)
    if dtype == "float32":
        check(model_path, answers)


def test_load_announces_the_context_that_fits(model_path: Path) -> None:
    model = load_model(EmbeddedEngineConfig(slots=4, cache_gib=200 * 2**10 / 2**30), ServeSpec(str(model_path)))

    # 2 layers, keys and values, 2 heads of 16 numbers of 4 bytes
    assert model.cache.token_bytes == 2 * 2 * 2 * 16 * 4
    assert model.context_length == model.cache.tokens == 3 * PAGE


@pytest.mark.slow
async def test_server_serves_the_context_it_announces_to_more_than_fit_at_once(
    model_path: Path, tmp_path: Path
) -> None:
    """The cache holds one: they take turns, and nobody fails."""
    options = {"slots": 4, "cache_gib": 200 * 2**10 / 2**30}
    with ServerProcess(model_path, tmp_path / "server.log", options=options) as server:
        async with aiohttp.ClientSession(server.address) as http, http.get("/model_info") as response:
            context = (await response.json())["context_length"]
        assert 3 * PAGE == context < reference_model(model_path).config.max_position_embeddings
        engine = EmbeddedEngine()
        engine.initialize([server.address])
        asked = [
            ModelRequest(ids(context - 40, start), GenerationConfig(max_new_tokens=40, min_new_tokens=40))
            for start in range(6)
        ]
        try:
            answers = await asyncio.gather(*(engine.agenerate(request) for request in asked))
            with pytest.raises(InferenceError, match=f"{context}"):
                await engine.agenerate(ModelRequest(ids(context), GenerationConfig()))
        finally:
            await engine.destroy()
        assert server.exit_code is None
    assert [len(answer.output_ids) for answer in answers] == [40] * 6


@pytest.mark.parametrize("weights_dir", ["", "somewhere"])
def test_load_servers_that_share_a_machine_promise_no_more_together_than_one_alone(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, weights_dir: str
) -> None:
    monkeypatch.setattr("rl_inference.embedded_server.model.memory.free_bytes", lambda _: 8 * 2**20)

    def promised(sharing: int) -> int:
        spec = ServeSpec(str(model_path), device="cpu", weights_dir=weights_dir)
        return load_model(EmbeddedEngineConfig(slots=64), spec, sharing).cache.tokens

    assert 0 < 4 * promised(4) <= promised(1)


@pytest.mark.slow
def test_server_takes_its_part_of_what_it_shares(model_path: Path, tmp_path: Path) -> None:
    server = ServerProcess(model_path, tmp_path / "server.log", options={"sharing": 10**9})

    with pytest.raises(InferenceError, match="free for this one of 1000000000 servers"):
        server.start().wait_ready()


def test_score_whole_sequence_makes_a_bounded_block_of_logits_at_once_and_reads_it_once(model_path: Path) -> None:
    """As the deterministic mode scores an answer when it ends."""
    model, row, blocks, passes = load(model_path, slots=1).model, ids(350), list[int](), list[int]()
    whole = model.score(row, 0.7)
    head = model.model.get_output_embeddings()
    head.register_forward_hook(lambda _, __, logits: blocks.append(logits.numel()))
    model.model.base_model.layers[0].register_forward_hook(lambda *_: passes.append(1))
    assert model.block == 2**26 // VOCAB_SIZE
    model.block = 100

    parts = model.score(row, 0.7)

    assert parts == pytest.approx(whole, abs=2e-5)
    assert blocks == [100 * VOCAB_SIZE] * 3 + [49 * VOCAB_SIZE]
    assert len(passes) == 1
    assert model.score(row[:90], 0.7) == pytest.approx(whole[:90], abs=2e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cache_gib": 1e-4, "context_length": 500}, r"500 tokens of context need .*512 bytes.*cache_gib"),
        ({"cache_gib": 1e6}, r"GiB of memory are free"),
    ],
)
def test_load_cache_that_does_not_fit_is_refused_with_the_arithmetic(
    model_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(EmbeddedEngineConfig(slots=4, **settings), ServeSpec(str(model_path), device="cpu"))


def test_group_bytes_of_both_versions_is_what_every_group_still_allows(tmp_path: Path) -> None:
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
async def test_server_that_sleeps_gives_the_caches_memory_back_and_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "wide", num_hidden_layers=4, num_key_value_heads=4, head_dim=128)
    needed = 8 * 350 * 4 * 2 * 4 * 128 * 4  # bytes of the keys and values of eight answers
    options = GenerationConfig(max_new_tokens=250, min_new_tokens=250, ignore_eos=True)
    with ServerProcess(path, tmp_path / "server.log", options={"slots": 8}) as server:
        engine = EmbeddedEngine(client=ClientConfig(progress_timeout=60))
        engine.initialize([server.address])
        room = await cache_tokens(server)

        def asked() -> Any:
            return asyncio.gather(*(engine.agenerate(ModelRequest(ids(100, i), options, seed=i)) for i in range(8)))

        await asked()
        going = asyncio.ensure_future(asked())
        async with asyncio.timeout(30):
            while (await engine.stats())["running"] < 8:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.001)
        process = psutil.Process(server.process.pid)
        awake = process.memory_info().rss
        said = await engine.sleep()
        seen = awake - process.memory_info().rss
        scoring = asyncio.ensure_future(engine.score(ids(400)))
        assert await cache_tokens(server) == 0
        assert not going.done()
        await engine.wake()
        after = await asyncio.wait_for(going, 60)
        await asyncio.wait_for(scoring, 60)
        assert await cache_tokens(server) == room
        async with aiohttp.ClientSession() as session, session.post(f"{server.address}/sleep", json={}) as refused:
            assert refused.status >= 400
            assert "only a paused server sleeps" in await refused.text()
        await engine.destroy()

    assert said > 0.8 * needed
    assert seen > 0.8 * needed
    model = reference_model(path)
    for answer in after[:2]:
        assert len(answer.output_ids) == 250
        assert answer.logprobs == pytest.approx(
            reference_logprobs(model, answer.input_ids, answer.output_ids), abs=2e-5
        )
