"""Decode slots in this process: scores, shared and chunked prefills, and ends of completions."""

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
    "gemma2": {**SLIDING, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512},
}


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


@pytest.mark.parametrize("family", ["qwen3", "gemma2", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_score_any_family_equals_transformers_forward(family: str, tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model", family, **FAMILIES[family])
    ids = [5, 9, 77, *range(40, 60)]

    logprobs = load(path).model.score(ids, 0.8)

    expected = reference_logprobs(reference_model(path), ids[:1], ids[1:], 0.8)
    assert logprobs == pytest.approx([0.0, *expected], abs=1e-5)


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


def test_record_non_finite_logprob_ends_job_with_error(model_path: Path) -> None:
    """Minus infinity occurs if only the end token is possible but still blocked. JSON does not have it."""
    table, end = load(model_path), torch.tensor([END_ID])
    lm_head = table.model.model.get_output_embeddings()
    lm_head.register_forward_hook(lambda _, __, out: torch.full_like(out, float("-inf")).index_fill(-1, end, 0.0))
    broken = job([5], 20)

    run(table, [broken])

    assert broken.finish_reason is not None
    assert broken.finish_reason["type"] == "error"
    assert broken.finish_reason["message"].startswith("version 0 of the weights")
    assert "-inf" in broken.finish_reason["message"]


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


def test_step_long_prompts_are_prefilled_in_chunks(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model", "gemma2", **FAMILIES["gemma2"])
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
