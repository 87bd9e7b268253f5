"""Decode slots in this process: log-probs of every family compared with transformers, in any batch."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_contracts.config import GenerationConfig
from rl_contracts.data import ServeSpec
from rl_inference import EmbeddedEngineConfig
from rl_inference.embedded_server.job import GenerationJob
from rl_inference.embedded_server.model.attention import TokenPass
from rl_inference.embedded_server.model.loading import load_model
from rl_inference.embedded_server.slots import SlotTable
from rl_inference.testing import END_ID, reference_logprobs, reference_model, tiny_model

SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3-sliding": {**SLIDING, "use_sliding_window": True},
    "qwen2": {},
    "llama": {"tie_word_embeddings": False},
    "mistral": {"sliding_window": 8},
    "gemma2": {**SLIDING, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0},
    "gemma3_text": SLIDING,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512},
}
QUICK_AND_SLOW = [
    *("qwen3", "gemma2", "gemma3_text"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3-sliding", "qwen2", "llama", "mistral", "gpt2")),
]


def job(prompt: list[int], tokens: int, seed: int = 1, **settings: Any) -> GenerationJob:
    """Return a job of exactly `tokens` tokens, unless `settings` say otherwise."""
    generation = GenerationConfig(**{"max_new_tokens": tokens, "min_new_tokens": tokens, **settings})
    return GenerationJob("job", prompt, generation, seed, frozenset([END_ID]), frozenset([END_ID]))


def load(path: Path, slots: int = 8, prefill_tokens: int = 512) -> SlotTable:
    model = load_model(EmbeddedEngineConfig(max_sequences=slots), ServeSpec(str(path), device="cpu"))
    return SlotTable(model, slots, prefill_tokens, lambda: 0)


def run(table: SlotTable, jobs: list[GenerationJob], stagger: int = 0) -> None:
    """Run the jobs, one admitted every `stagger` steps (0: as soon as there is room)."""
    waiting, step = deque[GenerationJob](), 0
    queue = deque(jobs)
    while queue or waiting or table.jobs:
        while queue and (not stagger or step % stagger == 0):
            waiting.append(queue.popleft())
            if stagger:
                break
        if waiting:
            table.admit(waiting)
        if table.jobs:
            table.step()
        step += 1


@pytest.mark.parametrize("family", QUICK_AND_SLOW)
def test_decode_any_family_equals_transformers_forward(family: str, tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model", family.split("-")[0], **FAMILIES[family])
    model, table = reference_model(path), load(path)
    jobs = [job([5, 9, 30 + i, *range(40, 40 + 3 * i)], 6 + 5 * i, seed=i) for i in range(6)]

    run(table, jobs, stagger=3)

    for each in jobs:
        assert len(each.output_ids) == each.generation.max_new_tokens
        expected = reference_logprobs(model, each.prompt, each.output_ids)
        assert each.logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("family", QUICK_AND_SLOW)
def test_score_any_family_equals_transformers_forward(family: str, tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model", family.split("-")[0], **FAMILIES[family])
    ids = [5, 9, 77, *range(40, 60)]

    logprobs = load(path).model.score(ids, 0.8)

    expected = reference_logprobs(reference_model(path), ids[:1], ids[1:], 0.8)
    assert logprobs == pytest.approx([0.0, *expected], abs=1e-5)


def test_batching_same_seed_gives_same_tokens_in_any_batch(model_path: Path) -> None:
    table = load(model_path)
    alone = job([5, 9, 30], 40, seed=7, temperature=0.9)
    run(table, [alone])
    batched = job([5, 9, 30], 40, seed=7, temperature=0.9)
    other_jobs = [job([8, 9, 30 + i, *range(i)], 5 + 7 * i, seed=i, top_p=0.8 if i % 2 else 1.0) for i in range(10)]

    run(table, [*other_jobs[:4], batched, *other_jobs[4:]], stagger=2)

    assert batched.output_ids == alone.output_ids
    assert batched.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def record_pass_sizes(table: SlotTable) -> list[int]:
    """Record the number of tokens of each later pass in the returned list."""
    counts: list[int] = []
    run_pass = table.model.run

    def counting_run(tokens: torch.Tensor, span: TokenPass) -> torch.Tensor:
        counts.append(len(tokens))
        return run_pass(tokens, span)

    table.model.run = counting_run  # type: ignore[method-assign]
    return counts


def test_admit_same_prompts_share_one_prefill(model_path: Path) -> None:
    table, model = load(model_path), reference_model(model_path)
    passes = record_pass_sizes(table)
    jobs = [job([5, 9, 30 + i % 2], 12, seed=i) for i in range(8)]

    run(table, jobs)

    # two prompts of three tokens; then the first sampled tokens, and the last prompt token of the other six jobs
    assert passes[:3] == [6, 2 + 6, 8]
    assert len({tuple(each.output_ids) for each in jobs}) == 8
    for each in jobs:
        assert each.logprobs == pytest.approx(reference_logprobs(model, each.prompt, each.output_ids), abs=1e-5)


def test_admit_known_prefix_is_reused_unless_weights_changed(model_path: Path) -> None:
    table, model = load(model_path), reference_model(model_path)
    passes = record_pass_sizes(table)
    prompt = list(range(3, 3 + 40))
    jobs = [job([*prompt, 50 + i], 20, seed=i) for i in range(4)]
    for i, each in enumerate(jobs):
        table._version = lambda version=i // 2: version  # type: ignore[misc]
        table.admit(deque([each]))
        table.step()

    run(table, [])

    # 41 tokens are prefilled; one block of 32 of the second prompt is cached; then the version changes
    assert passes[:4] == [41, 1 + 9, 2 + 41, 3 + 9]
    for each in jobs:
        assert each.logprobs == pytest.approx(reference_logprobs(model, each.prompt, each.output_ids), abs=1e-5)


def test_admit_stale_prefix_changes_logprobs(model_path: Path) -> None:
    """Injected fault: without a version change, keys and values of old weights are reused."""
    table, model = load(model_path), reference_model(model_path)
    prompt = list(range(3, 3 + 40))
    run(table, [job([*prompt, 50], 4)])
    with torch.no_grad():
        for served, reference in zip(table.model.model.parameters(), model.parameters(), strict=True):
            served.mul_(1.5)
            reference.mul_(1.5)
    stale = job([*prompt, 51], 4)

    run(table, [stale])

    assert stale.logprobs != pytest.approx(reference_logprobs(model, stale.prompt, stale.output_ids), abs=1e-3)


def test_admit_next_turn_prefills_only_new_tokens(model_path: Path) -> None:
    table, model = load(model_path), reference_model(model_path)
    first = job(list(range(3, 40)), 30)
    run(table, [first])
    passes = record_pass_sizes(table)
    second = job([*first.tokens, 7, 8], 5)

    run(table, [second])

    assert passes[0] == len(second.prompt) - 66  # all but the last token of the first turn are in the cache
    assert second.logprobs == pytest.approx(reference_logprobs(model, second.prompt, second.output_ids), abs=1e-5)


@pytest.mark.parametrize("number", ["nan", "-inf"])
def test_record_non_finite_logprob_ends_job_with_error(model_path: Path, number: str) -> None:
    """Minus infinity occurs if only the end token is possible but still blocked. JSON has neither value."""
    table, end = load(model_path), torch.tensor([END_ID])
    lm_head = table.model.model.get_output_embeddings()
    lm_head.register_forward_hook(lambda _, __, out: torch.full_like(out, float(number)).index_fill(-1, end, 0.0))
    broken = job([5], 20)

    run(table, [broken])

    assert broken.finish_reason is not None
    assert broken.finish_reason["type"] == "error"
    assert broken.finish_reason["message"].startswith("version 0 of the weights")
    assert number in broken.finish_reason["message"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_decode_on_a_gpu_equals_transformers_forward(model_path: Path) -> None:
    model = reference_model(model_path)
    slots = load_model(EmbeddedEngineConfig(max_sequences=8), ServeSpec(str(model_path), device="cuda"))
    table = SlotTable(slots, 8, 512, lambda: 0)
    jobs = [job([5, 9, 30 + i // 2], 40, seed=i) for i in range(12)]

    run(table, jobs, stagger=2)

    for each in jobs:
        assert each.logprobs == pytest.approx(reference_logprobs(model, each.prompt, each.output_ids), abs=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2"])
def test_step_long_prompts_are_prefilled_in_chunks(family: str, tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model", family, **FAMILIES[family])
    table, model = load(path, slots=6, prefill_tokens=50), reference_model(path)
    decoding = job([5, 9], 60)
    table.admit(deque([decoding]))
    table.step()
    passes = record_pass_sizes(table)
    jobs = [job([3 + (i * k) % 90 for k in range(30 + 70 * i)], 8, seed=i) for i in range(1, 4)]

    run(table, jobs)

    assert max(passes) <= 50 + 6
    assert passes[0] == 1 + 50
    for each in [decoding, *jobs]:
        assert each.logprobs == pytest.approx(reference_logprobs(model, each.prompt, each.output_ids), abs=1e-5)


@pytest.mark.slow
def test_take_all_and_admit_again_continues_the_completion(model_path: Path) -> None:
    table = load(model_path)
    complete, interrupted = job([5, 9, 30], 30, seed=3), job([5, 9, 30], 30, seed=3)
    run(table, [complete])

    waiting = deque([interrupted])
    table.admit(waiting)
    for _ in range(11):
        table.step()
    run(table, table.take_all())

    assert interrupted.output_ids == complete.output_ids


def test_sample_end_token_blocked_until_minimum_then_allowed(model_path: Path) -> None:
    table = load(model_path)
    lm_head = table.model.model.get_output_embeddings()
    lm_head.register_forward_hook(lambda _, __, logits: logits.index_fill(-1, torch.tensor([END_ID]), 50.0))
    short, long = job([5], 20, min_new_tokens=0), job([6], 20, min_new_tokens=9)

    run(table, [short, long])

    assert short.output_ids == [END_ID]
    assert len(long.output_ids) == 10
    assert long.output_ids[-1] == END_ID
    assert END_ID not in long.output_ids[:-1]
    # the tokens sampled instead have log-probs of the full distribution, in which the end token is certain
    assert max(long.logprobs[:-1]) < -30
