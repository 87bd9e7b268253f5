"""Decode thread under all conditions that can disturb a log-prob.

These are the model families of transformers, many slots, chunked prompts of mixed lengths, shared prefixes,
sequences longer than the attention window, and weight updates.
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
SLOW_FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512},  # absolute positions
    "mistral": {"sliding_window": WINDOW},  # a window in every layer
}
NIGHTLY_FAMILIES: dict[str, dict[str, Any]] = {
    "gemma4_text": {  # has buffers that no trainer sends
        **ALTERNATING,
        "global_head_dim": 32,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 160,
    },
    "llama": {"tie_word_embeddings": False},
    "gpt_oss": {**ALTERNATING, "num_local_experts": 4, "num_experts_per_tok": 2},  # attention sinks
}
"""One family per kind of attention and weights; `tests/end_to_end/test_families.py` tests all families."""
TOLERANCE = 2e-5


@contextmanager
def decoding(path: Path, scratch: Path, slots: int = 6) -> Iterator[DecodeLoop]:
    """Run a decode thread over a model, with passes of 48 tokens of prompts; its crash fails the test."""
    crashes: list[BaseException] = []
    model = load_model(EmbeddedEngineConfig(max_sequences=slots), ServeSpec(str(path), device="cpu"))
    weights = ServedWeights(model.model, str(scratch), "test", version=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl_inference.embedded_server.loop.PREFILL_TOKENS", 48)
        loop = DecodeLoop(model, weights, slots, crashes.append)
    loop.start()
    try:
        yield loop
    finally:
        loop.stop()
    assert not crashes


def stage(weights: ServedWeights, path: Path, scratch: Path, version: int) -> None:
    """Stage the weights of a model directory."""
    tensors = [(name, p.detach()) for name, p in reference_model(path).named_parameters()]
    weights.stage(put_weights(scratch, version, tensors, "disk")[0])


def commit_weights(loop: DecodeLoop, path: Path, scratch: Path, version: int, recompute: bool = True) -> None:
    """Stage and commit the weights of another directory as `version`, while generation is paused."""
    loop.pause(wait=False).result(30)
    stage(loop.weights, path, scratch, version)
    loop.commit(version, recompute).result(30)
    loop.resume().result(30)


def job(prompt: list[int], tokens: int, seed: int, **settings: Any) -> GenerationJob:
    """Return a job of `tokens` tokens, unless a stop token or string ends it earlier."""
    generation = GenerationConfig(max_new_tokens=tokens, **settings)
    return GenerationJob(f"job-{seed}", prompt, generation, seed, frozenset(generation.stop_token_ids))


def submit(loop: DecodeLoop, jobs: list[GenerationJob]) -> list[Future[None]]:
    """Queue jobs and return one future per job, done when the job ends."""
    for each in jobs:
        loop.submit(each)
    return [each.ended for each in jobs]


def versions(each: GenerationJob) -> list[int]:
    """Return the version of each token."""
    spans = each.version_spans(0, len(each.output_ids))
    return [span["version"] for span in spans for _ in range(span["start"], span["end"])]


def worst_error(jobs: list[GenerationJob], models: dict[int, Any]) -> float:
    """Return the largest error of the recorded log-probs.

    The reference is a forward pass over the whole sequence with the version of each token.
    """
    worst = 0.0
    for each in jobs:
        token_versions = versions(each)
        temperature = each.generation.temperature
        for version in set(token_versions):
            expected = reference_logprobs(models[version], each.prompt, each.output_ids, temperature)
            pairs = zip(each.logprobs, expected, token_versions, strict=True)
            worst = max(worst, *(abs(a - b) for a, b, v in pairs if v == version))
    return worst


def mixed_jobs() -> list[GenerationJob]:
    """Return jobs with shared prompts or prefixes, prompts of 1 to 70 tokens and completions of 20 to 60 tokens."""
    long = [3 + (7 * i) % 90 for i in range(70)]
    prompts = [long, long, [*long[:48], 77, 5], long[:33], long[:32], [9, 8, 7], [9, 8, 7], [9], [11]]
    prompts += [[20 + i, *long[i : 4 * i]] for i in range(1, 8)]
    jobs = [job(p, 20 + (13 * i) % 41, seed=i, temperature=0.8 + 0.1 * (i % 4)) for i, p in enumerate(prompts)]
    jobs += [job([6, *long[:20]], 60, 50 + i, stop_token_ids=list(range(10 * i, 10 * i + 8))) for i in range(3, 6)]
    jobs += [job([6, *long[:20]], 60, 60 + i, stop=["a", "Q", "7", "st"]) for i in range(3)]
    return jobs


def check_stops(each: GenerationJob, tokenizer: Any) -> None:
    """Assert that the job ended at the first possible position, or at its maximum length."""
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


@pytest.mark.guarantee(
    "The embedded server stamps each token with the version of the weights that computed its log-prob.",
    area="staleness",
)
@pytest.mark.parametrize(
    "family",
    [
        *FAMILIES,
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_FAMILIES),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in NIGHTLY_FAMILIES),
    ],
)
def test_generate_through_weight_updates_equals_transformers(family: str, tmp_path: Path) -> None:
    settings = (FAMILIES | SLOW_FAMILIES | NIGHTLY_FAMILIES)[family]
    paths = [tiny_model(tmp_path / f"model{seed}", family, seed=seed, **settings) for seed in (0, 1)]
    jobs = mixed_jobs()

    with decoding(paths[0], tmp_path / "weights") as loop:
        ended = submit(loop, jobs[:12])
        wait_until(lambda: loop.stats()["generated_tokens"] >= 100, interval=0.0005)
        commit_weights(loop, paths[1], tmp_path / "weights", version=1)
        ended += submit(loop, jobs[12:])
        target = loop.stats()["generated_tokens"] + 100
        wait_until(lambda: loop.stats()["generated_tokens"] >= target, interval=0.0005)
        commit_weights(loop, paths[0], tmp_path / "weights", version=2)
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
        ("diffllama", "computes other log-probs"),  # has two softmaxes
        ("roberta", "computes other log-probs"),  # attends to later positions
        ("doge", "its own mask or bias"),
    ],
)
def test_load_family_with_wrong_logprobs_is_rejected(family: str, reason: str, tmp_path: Path) -> None:
    """The weights of the last two are small, so that their log-probs differ little."""
    path = tmp_path / "model"
    if family == "diffllama":
        tiny_model(path, family)
    else:
        make_family(path, family, spread=None)

    with pytest.raises(ModelError, match=rf"{reason}.*Use another engine for this model"):
        load_model(EmbeddedEngineConfig(), ServeSpec(str(path), device="cpu"))


@pytest.mark.parametrize("window", [8, 100_000])
def test_load_window_missing_in_attention_call_is_read_from_config(window: int, tmp_path: Path) -> None:
    """The check on load also detects a window above the length of its sequence, because it shortens the window."""
    settings = {**ALTERNATING, "use_sliding_window": True, "sliding_window": window, "num_experts": 4}
    moe_settings = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    path = tiny_model(tmp_path / "model", "qwen2_moe", **settings, **moe_settings)

    with decoding(path, tmp_path) as loop:
        each = complete(loop, [5, 9, 30, *range(40, 60)])

    assert each.logprobs == pytest.approx(
        reference_logprobs(reference_model(path), each.prompt, each.output_ids), abs=TOLERANCE
    )


def test_load_ignored_window_of_any_length_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_model(tmp_path / "model", "mistral", sliding_window=100_000)
    monkeypatch.setattr("rl_inference.embedded_server.model.slot_model.layer_window", lambda *_: None)

    with pytest.raises(ModelError, match="computes other log-probs"):
        load_model(EmbeddedEngineConfig(), ServeSpec(str(path), device="cpu"))


def test_load_longrope_limits_context_to_original_length(tmp_path: Path) -> None:
    path = make_family(tmp_path / "model", "phi3")
    spec = ServeSpec(str(path), device="cpu")

    assert load_model(EmbeddedEngineConfig(), spec).context_length == ORIGINAL_LENGTH
    with pytest.raises(ModelError, match=r"context_length=9 .* 8 positions before its rotary"):
        load_model(EmbeddedEngineConfig(context_length=9), spec)


def test_load_layer_without_replaced_attention_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotLayer, "used", property(lambda _: False))

    with pytest.raises(ModelError, match="does not let its attention be replaced"):
        load_model(EmbeddedEngineConfig(), ServeSpec(str(tiny_model(tmp_path / "model")), device="cpu"))


def test_generate_with_odd_head_size_equals_transformers(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model", head_dim=10)

    with decoding(path, tmp_path) as loop:
        each = complete(loop, [5, 9, 30])

    expected = reference_logprobs(reference_model(path), each.prompt, each.output_ids)
    assert each.logprobs == pytest.approx(expected, abs=TOLERANCE)


def test_load_in_bfloat16_keeps_logits_in_float32(model_path: Path) -> None:
    model = load_model(EmbeddedEngineConfig(dtype="bfloat16"), ServeSpec(str(model_path), device="cpu"))
    ids = [5, 9, 30, 44, 7]
    states: list[torch.Tensor] = []
    lm_head = model.model.get_output_embeddings()
    lm_head.register_forward_hook(lambda _, inputs, logits: states.extend((inputs[0], logits)))

    model.score(ids, 1.0)

    hidden, logits = states
    expected = hidden[0].double() @ lm_head.weight.double().T
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits[0].double(), expected, atol=1e-5, rtol=1e-5)


LONG_PROMPT = [3 + (11 * i) % 90 for i in range(200)]


@pytest.fixture(scope="module")
def new_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("new") / "qwen3", seed=1)


def complete(loop: DecodeLoop, prompt: list[int], seed: int = 1) -> GenerationJob:
    """Generate one completion of 10 tokens and return its job."""
    each = job(prompt, 10, seed)
    (ended,) = submit(loop, [each])
    ended.result(60)
    return each


def completions_around_commit(
    model_path: Path, new_path: Path, scratch: Path, recompute: bool, version: int = 1
) -> list[GenerationJob]:
    """Return two completions from before a commit, and two from after it.

    All but the last have the same long prompt; the last has a prefix of it.
    """
    with decoding(model_path, scratch) as loop:
        before = [complete(loop, LONG_PROMPT, seed) for seed in range(2)]
        stats = loop.stats()
        assert (stats["prompt_tokens"], stats["prefix_tokens"]) == (400, 199), "the second must reuse the prompt"
        commit_weights(loop, new_path, scratch, version, recompute)
        return [*before, complete(loop, LONG_PROMPT, 3), complete(loop, LONG_PROMPT[:150], 4)]


@pytest.mark.parametrize("recompute", [True, False])
def test_prefix_of_old_weights_is_not_reused_after_commit(
    model_path: Path, new_path: Path, tmp_path: Path, recompute: bool
) -> None:
    jobs = completions_around_commit(model_path, new_path, tmp_path, recompute)

    assert [versions(each)[0] for each in jobs] == [0, 0, 1, 1]
    assert worst_error(jobs, {0: reference_model(model_path), 1: reference_model(new_path)}) < TOLERANCE


def test_prefix_of_other_weights_with_same_version_is_not_reused(
    model_path: Path, new_path: Path, tmp_path: Path
) -> None:
    *_, third, fourth = completions_around_commit(model_path, new_path, tmp_path, recompute=True, version=0)

    assert worst_error([third, fourth], {0: reference_model(new_path)}) < TOLERANCE


def test_prefix_cache_not_cleared_changes_logprobs(
    model_path: Path, new_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlotTable, "_clear_prefixes", lambda self: None)  # the injected fault

    jobs = completions_around_commit(model_path, new_path, tmp_path, recompute=True)

    assert worst_error(jobs[:2], {0: reference_model(model_path)}) < TOLERANCE
    assert worst_error(jobs[2:], {1: reference_model(new_path)}) > 0.1


def test_prefix_prefilled_across_commit_is_not_shared_with_group(
    model_path: Path, new_path: Path, tmp_path: Path
) -> None:
    model = load_model(EmbeddedEngineConfig(max_sequences=6), ServeSpec(str(model_path), device="cpu"))
    weights = ServedWeights(model.model, str(tmp_path), "test", version=0)
    table = SlotTable(model, 6, 16, lambda: weights.version)
    first, *members = [job(LONG_PROMPT, 10, seed) for seed in range(4)]
    table.admit(deque([first]))
    for _ in range(3):
        table.step()
    assert first.output_ids == []  # 48 of 200 tokens are prefilled

    stage(weights, new_path, tmp_path, 1)
    weights.commit(1)  # `keep`: the KV cache stays
    waiting = deque(members)
    while waiting or table.jobs:
        table.admit(waiting)
        table.step()

    new = reference_model(new_path)
    assert worst_error(members, {1: new}) < TOLERANCE
    assert worst_error([first], {1: new}) > 0.01  # kept the old keys and values, as requested


def test_resume_wakes_sleeping_server(model_path: Path, tmp_path: Path) -> None:
    with decoding(model_path, tmp_path) as loop:
        cache_tokens, complete_job = loop.model.cache.tokens, complete(loop, [5, 6, 7])
        loop.pause(wait=False).result(30)
        loop.sleep().result(30)
        assert (loop.sleep().result(30), loop.model.cache.tokens) == (0, 0)
        resumed_job = job([5, 6, 7], 8, 1)
        [ended] = submit(loop, [resumed_job])
        loop.resume().result(30)  # as at the end of the pause lease of a lost client
        ended.result(30)

        assert loop.model.cache.tokens == cache_tokens
        assert resumed_job.output_ids[:1] == complete_job.output_ids[:1]
