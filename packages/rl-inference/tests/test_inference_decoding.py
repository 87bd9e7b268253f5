"""The decode thread with everything at once that can disturb a log-prob: model families as transformers defines them,
many slots, chunked prompts of mixed lengths, shared prefixes, windows that are overrun, weights that change in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_contracts.config import GenerationConfig
from rl_contracts.data import ServeSpec
from rl_contracts.errors import ModelError
from rl_contracts.testing import put_weights
from rl_contracts.testing.families import ORIGINAL_LENGTH, make_family
from rl_contracts.testing.waiting import wait_until
from rl_inference import EmbeddedEngineConfig
from rl_inference.embedded_server.job import GenerationJob
from rl_inference.embedded_server.loop import DecodeLoop
from rl_inference.embedded_server.model.cache import SlotLayer
from rl_inference.embedded_server.model.loading import load_model
from rl_inference.embedded_server.slots import SlotTable
from rl_inference.embedded_server.weights import ServedWeights
from rl_inference.testing import reference_logprobs, reference_model, tiny_model

WINDOW = 16
ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gemma2": {**ALTERNATING, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0},
    "gemma3_text": ALTERNATING,
}
MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "gemma4_text": {  # has buffers that no trainer sends
        **ALTERNATING,
        "global_head_dim": 32,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 160,
    },
    "llama": {"tie_word_embeddings": False},
    "qwen2": {},
    "gemma": {},
    "mistral": {"sliding_window": WINDOW},
    "phi3": {"sliding_window": WINDOW},
    "qwen3 with windows": {**ALTERNATING, "use_sliding_window": True},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "olmo2": {},
    "olmo3": ALTERNATING,
    "starcoder2": {"sliding_window": WINDOW},
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.1},
    "cohere2": ALTERNATING,
    "smollm3": {"no_rope_layers": [1, 0]},
    "glm4": {},
    "gpt_neox": {},
    "phi": {},
    "ministral": ALTERNATING,
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mixtral": {"num_local_experts": 4, "sliding_window": WINDOW},
    "gpt_oss": {**ALTERNATING, "num_local_experts": 4, "num_experts_per_tok": 2},
    "exaone4": ALTERNATING,
    "seed_oss": {},
    "nemotron": {},
}
TOLERANCE = 2e-5


@contextmanager
def decoding(path: Path, scratch: Path, slots: int = 6, prefill_tokens: int = 48) -> Iterator[DecodeLoop]:
    """A decode thread over a model, whose death fails the test."""
    deaths: list[BaseException] = []
    model = load_model(
        EmbeddedEngineConfig(slots=slots, prefill_tokens=prefill_tokens), ServeSpec(str(path), device="cpu")
    )
    weights = ServedWeights(model.model, str(scratch), "test", version=0)
    loop = DecodeLoop(model, weights, slots, prefill_tokens, deaths.append)
    loop.start()
    try:
        yield loop
    finally:
        loop.stop()
    assert not deaths


def stage(weights: ServedWeights, path: Path, scratch: Path, version: int) -> None:
    """Put the weights of a model directory beside the served ones."""
    tensors = [(name, p.detach()) for name, p in reference_model(path).named_parameters()]
    weights.stage(put_weights(scratch, version, tensors, "disk")[0])


def switch(loop: DecodeLoop, path: Path, scratch: Path, version: int, recompute: bool = True) -> None:
    """Serve the weights of another directory under a version, while answers wait."""
    loop.pause(wait=False).result(30)
    stage(loop.weights, path, scratch, version)
    loop.commit(version, recompute).result(30)
    loop.resume().result(30)


def job(prompt: list[int], tokens: int, seed: int, **settings: Any) -> GenerationJob:
    """An answer of `tokens` tokens unless a stop token or string ends it."""
    generation = GenerationConfig(max_new_tokens=tokens, **settings)
    return GenerationJob(f"job-{seed}", prompt, generation, seed, frozenset(generation.stop_token_ids))


def submit(loop: DecodeLoop, jobs: list[GenerationJob]) -> list[Future[None]]:
    """Queue jobs; a future per job is done when it ends."""
    for each in jobs:
        loop.submit(each)
    return [each.ended for each in jobs]


def versions(each: GenerationJob) -> list[int]:
    """Of each token."""
    spans = each.version_spans(0, len(each.output_ids))
    return [span["version"] for span in spans for _ in range(span["start"], span["end"])]


def worst_error(jobs: list[GenerationJob], models: dict[int, Any]) -> float:
    """Largest difference between recorded log-probs and those of each token's version over the whole sequence."""
    worst = 0.0
    for each in jobs:
        stamped = versions(each)
        temperature = each.generation.temperature
        for version in set(stamped):
            expected = reference_logprobs(models[version], each.prompt, each.output_ids, temperature)
            pairs = zip(each.logprobs, expected, stamped, strict=True)
            worst = max(worst, *(abs(a - b) for a, b, v in pairs if v == version))
    return worst


def mixed_jobs() -> list[GenerationJob]:
    """Three groups that share prompts or beginnings of them, prompts of 1 to 70 tokens, answers of 20 to 60."""
    long = [3 + (7 * i) % 90 for i in range(70)]
    prompts = [long, long, [*long[:48], 77, 5], long[:33], long[:32], [9, 8, 7], [9, 8, 7], [9], [11]]
    prompts += [[20 + i, *long[i : 4 * i]] for i in range(1, 8)]
    jobs = [job(p, 20 + (13 * i) % 41, seed=i, temperature=0.8 + 0.1 * (i % 4)) for i, p in enumerate(prompts)]
    jobs += [job([6, *long[:20]], 60, 50 + i, stop_token_ids=list(range(10 * i, 10 * i + 8))) for i in range(3, 6)]
    jobs += [job([6, *long[:20]], 60, 60 + i, stop=["a", "Q", "7", "st"]) for i in range(3)]
    return jobs


def check_stops(each: GenerationJob, tokenizer: Any) -> None:
    """It ended at the first place where it could, or at its length."""
    assert each.finish_reason is not None
    end = len(each.output_ids) - 1 if each.finish_reason["type"] == "stop" else len(each.output_ids)
    assert not each.end_ids.intersection(each.output_ids[:end])
    assert not any(text in tokenizer.decode(each.output_ids[:end]) for text in each.generation.stop)
    if each.finish_reason["type"] == "length":
        assert len(each.output_ids) == each.generation.max_new_tokens
    elif each.generation.stop:
        assert each.finish_reason["matched"] in tokenizer.decode(each.output_ids)
    else:
        assert each.finish_reason["matched"] == each.output_ids[-1]


@pytest.mark.parametrize(
    "family", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.nightly) for name in MORE_FAMILIES)]
)
def test_generate_any_family_through_weight_updates_equals_transformers(family: str, tmp_path: Path) -> None:
    settings = (FAMILIES | MORE_FAMILIES)[family]
    paths = [tiny_model(tmp_path / f"model{seed}", family.split()[0], seed=seed, **settings) for seed in (0, 1)]
    jobs = mixed_jobs()

    with decoding(paths[0], tmp_path / "weights") as loop:
        ended = submit(loop, jobs[:12])
        wait_until(lambda: loop.stats()["generated_tokens"] >= 100, interval=0.0005)
        switch(loop, paths[1], tmp_path / "weights", version=1)
        ended += submit(loop, jobs[12:])
        target = loop.stats()["generated_tokens"] + 100
        wait_until(lambda: loop.stats()["generated_tokens"] >= target, interval=0.0005)
        switch(loop, paths[0], tmp_path / "weights", version=2)
        for future in ended:
            future.result(60)
        tokenizer = loop.model.tokenizer

    first, second = map(reference_model, paths)
    assert worst_error(jobs, {0: first, 1: second, 2: first}) < TOLERANCE
    assert {v for each in jobs for v in versions(each)} == {0, 1, 2}
    assert any(len(set(versions(each))) > 1 for each in jobs)
    assert max(each.length for each in jobs) > 5 * WINDOW
    for each in jobs:
        check_stops(each, tokenizer)
    assert any((each.finish_reason or {})["type"] == "stop" for each in jobs)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("diffllama", "computes other numbers"),  # has two softmaxes
        ("bert", "computes other numbers"),  # looks ahead
    ],
)
def test_load_family_that_would_be_served_wrong_is_refused(family: str, reason: str, tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model", family)

    with pytest.raises(ModelError, match=rf"{reason}.*Use another engine for this model"):
        load_model(EmbeddedEngineConfig(), ServeSpec(str(path), device="cpu"))


@pytest.mark.parametrize("window", [8, 100_000])
def test_load_a_window_that_attention_is_not_told_is_found_in_the_configuration(window: int, tmp_path: Path) -> None:
    """Also one that no check of a few tokens would meet: it is shortened for the check."""
    settings = {**ALTERNATING, "use_sliding_window": True, "sliding_window": window, "num_experts": 4}
    small = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    path = tiny_model(tmp_path / "model", "qwen2_moe", **settings, **small)

    with decoding(path, tmp_path) as loop:
        each = answer(loop, [5, 9, 30, *range(40, 60)])

    assert each.logprobs == pytest.approx(
        reference_logprobs(reference_model(path), each.prompt, each.output_ids), abs=TOLERANCE
    )


def test_load_a_window_that_is_not_honoured_is_refused_however_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model(tmp_path / "model", "mistral", sliding_window=100_000)
    monkeypatch.setattr("rl_inference.embedded_server.model.slot_model.layer_window", lambda *_: None)

    with pytest.raises(ModelError, match="computes other numbers"):
        load_model(EmbeddedEngineConfig(), ServeSpec(str(path), device="cpu"))


def test_load_longrope_is_served_up_to_the_length_at_which_it_changes(tmp_path: Path) -> None:
    path = make_family(tmp_path / "model", "phi3")
    spec = ServeSpec(str(path), device="cpu")

    assert load_model(EmbeddedEngineConfig(), spec).context_length == ORIGINAL_LENGTH
    with pytest.raises(ModelError, match=r"context_length 9: .* 8 positions before its rotary .*lower it"):
        load_model(EmbeddedEngineConfig(context_length=9), spec)


@pytest.mark.parametrize(("family", "reason"), [("doge", "a mask or a bias of its own"), ("roberta", "other numbers")])
def test_load_what_is_wrong_is_refused_also_where_all_weights_are_small(
    family: str, reason: str, tmp_path: Path
) -> None:
    path = make_family(tmp_path / "model", family, spread=None)

    with pytest.raises(ModelError, match=reason):
        load_model(EmbeddedEngineConfig(), ServeSpec(str(path), device="cpu"))


def test_load_a_layer_whose_attention_is_not_replaced_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlotLayer, "used", property(lambda _: False))

    with pytest.raises(ModelError, match="does not let its attention be replaced"):
        load_model(EmbeddedEngineConfig(), ServeSpec(str(tiny_model(tmp_path / "model")), device="cpu"))


@pytest.mark.parametrize("head_dim", [6, 10])
def test_generate_heads_of_any_size_equal_transformers(head_dim: int, tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model", head_dim=head_dim)

    with decoding(path, tmp_path) as loop:
        each = answer(loop, [5, 9, 30])

    expected = reference_logprobs(reference_model(path), each.prompt, each.output_ids)
    assert each.logprobs == pytest.approx(expected, abs=TOLERANCE)


def test_load_in_bfloat16_logits_are_not_rounded_to_it(model_path: Path) -> None:
    model = load_model(EmbeddedEngineConfig(dtype="bfloat16"), ServeSpec(str(model_path), device="cpu"))
    ids = [5, 9, 30, 44, 7]
    states: list[torch.Tensor] = []
    head = model.model.get_output_embeddings()
    head.register_forward_hook(lambda _, inputs, logits: states.extend((inputs[0], logits)))

    model.score(ids, 1.0)

    hidden, logits = states
    expected = hidden[0].double() @ head.weight.double().T
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits[0].double(), expected, atol=1e-5, rtol=1e-5)


def test_load_in_bfloat16_rounding_is_no_other_numbers(model_path: Path) -> None:
    model = load_model(EmbeddedEngineConfig(dtype="bfloat16"), ServeSpec(str(model_path), device="cpu"))

    assert model.model.dtype == torch.bfloat16


LONG_PROMPT = [3 + (11 * i) % 90 for i in range(200)]


@pytest.fixture(scope="module")
def new_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("new") / "qwen3", seed=1)


def answer(loop: DecodeLoop, prompt: list[int], seed: int = 1) -> GenerationJob:
    """One answer of 10 tokens, waited for."""
    each = job(prompt, 10, seed)
    (ended,) = submit(loop, [each])
    ended.result(60)
    return each


def answers_around_a_commit(
    model_path: Path, new_path: Path, scratch: Path, recompute: bool, version: int = 1
) -> list[GenerationJob]:
    """Two to the same long prompt before, and two to it and to a part of it after the weights changed."""
    with decoding(model_path, scratch) as loop:
        before = [answer(loop, LONG_PROMPT, seed) for seed in range(2)]
        switch(loop, new_path, scratch, version, recompute)
        return [*before, answer(loop, LONG_PROMPT, 3), answer(loop, LONG_PROMPT[:150], 4)]


@pytest.mark.parametrize("recompute", [True, False])
def test_prefix_read_with_old_weights_is_not_used_after_a_commit(
    model_path: Path, new_path: Path, tmp_path: Path, recompute: bool
) -> None:
    jobs = answers_around_a_commit(model_path, new_path, tmp_path, recompute)

    assert [versions(each)[0] for each in jobs] == [0, 0, 1, 1]
    assert worst_error(jobs, {0: reference_model(model_path), 1: reference_model(new_path)}) < TOLERANCE


def test_prefix_other_weights_under_the_same_version_are_not_mixed(
    model_path: Path, new_path: Path, tmp_path: Path
) -> None:
    *_, third, fourth = answers_around_a_commit(model_path, new_path, tmp_path, recompute=True, version=0)

    assert worst_error([third, fourth], {0: reference_model(new_path)}) < TOLERANCE


def test_prefix_cache_that_is_not_cleared_shows_in_the_logprobs(
    model_path: Path, new_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlotTable, "_clear_prefixes", lambda self: None)  # the planted fault

    jobs = answers_around_a_commit(model_path, new_path, tmp_path, recompute=True)

    assert worst_error(jobs[:2], {0: reference_model(model_path)}) < TOLERANCE
    assert worst_error(jobs[2:], {1: reference_model(new_path)}) > 0.1


def test_prefix_of_a_prompt_read_across_a_commit_is_not_used_by_its_group(
    model_path: Path, new_path: Path, tmp_path: Path
) -> None:
    model = load_model(EmbeddedEngineConfig(slots=6), ServeSpec(str(model_path), device="cpu"))
    weights = ServedWeights(model.model, str(tmp_path), "test", version=0)
    table = SlotTable(model, 6, 16, lambda: weights.version)
    first, *members = [job(LONG_PROMPT, 10, seed) for seed in range(4)]
    table.admit(deque([first]))
    for _ in range(3):
        table.step()
    assert first.output_ids == []  # 48 of 200 tokens are read

    stage(weights, new_path, tmp_path, 1)
    weights.commit(1)  # `keep`: what was read stays
    waiting = deque(members)
    while waiting or table.jobs:
        table.admit(waiting)
        table.step()

    new = reference_model(new_path)
    assert worst_error(members, {1: new}) < TOLERANCE
    assert worst_error([first], {1: new}) > 0.01  # it kept the old keys and values, as it was told


def test_pause_that_ends_wakes_a_server_that_sleeps(model_path: Path, tmp_path: Path) -> None:
    with decoding(model_path, tmp_path) as loop:
        room, whole = loop.model.cache.tokens, answer(loop, [5, 6, 7])
        loop.pause(wait=False).result(30)
        loop.sleep().result(30)
        assert (loop.sleep().result(30), loop.model.cache.tokens) == (0, 0)
        going = job([5, 6, 7], 8, 1)
        [ended] = submit(loop, [going])
        loop.resume().result(30)  # as the lease does of a client that is gone
        ended.result(30)

        assert loop.model.cache.tokens == room
        assert going.output_ids[:1] == whole.output_ids[:1]
