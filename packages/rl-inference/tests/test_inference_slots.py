"""The slots in this process: every family's log-probs against transformers, whatever shares the batch."""

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
    """A job of exactly `tokens` tokens unless it is told otherwise."""
    generation = GenerationConfig(**{"max_new_tokens": tokens, "min_new_tokens": tokens, **settings})
    return GenerationJob("job", prompt, generation, seed, frozenset([END_ID]), frozenset([END_ID]))


def load(path: Path, slots: int = 8, prefill_tokens: int = 512) -> SlotTable:
    model = load_model(EmbeddedEngineConfig(slots=slots), ServeSpec(str(path), device="cpu"))
    return SlotTable(model, slots, prefill_tokens, lambda: 0)


def run(table: SlotTable, jobs: list[GenerationJob], stagger: int = 0) -> None:
    """Generate all jobs, one admitted per `stagger` steps (0: as soon as there is room)."""
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

    found = load(path).model.score(ids, 0.8)

    expected = reference_logprobs(reference_model(path), ids[:1], ids[1:], 0.8)
    assert found == pytest.approx([0.0, *expected], abs=1e-5)


def test_batching_same_seed_gives_same_tokens_alone_and_among_others(model_path: Path) -> None:
    table = load(model_path)
    alone = job([5, 9, 30], 40, seed=7, temperature=0.9)
    run(table, [alone])
    among = job([5, 9, 30], 40, seed=7, temperature=0.9)
    others = [job([8, 9, 30 + i, *range(i)], 5 + 7 * i, seed=i, top_p=0.8 if i % 2 else 1.0) for i in range(10)]

    run(table, [*others[:4], among, *others[4:]], stagger=2)

    assert among.output_ids == alone.output_ids
    assert among.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def fed(table: SlotTable) -> list[int]:
    """The number of tokens of each pass from now on."""
    counts: list[int] = []
    run_pass = table.model.run

    def counted(tokens: torch.Tensor, span: TokenPass) -> torch.Tensor:
        counts.append(len(tokens))
        return run_pass(tokens, span)

    table.model.run = counted  # type: ignore[method-assign]
    return counts


def test_admit_same_prompts_share_one_prefill_and_stay_right(model_path: Path) -> None:
    table, model = load(model_path), reference_model(model_path)
    passes = fed(table)
    jobs = [job([5, 9, 30 + i % 2], 12, seed=i) for i in range(8)]

    run(table, jobs)

    # two prompts of three tokens; then their first answers' tokens beside the last prompt token of the six others
    assert passes[:3] == [6, 2 + 6, 8]
    assert len({tuple(each.output_ids) for each in jobs}) == 8
    for each in jobs:
        assert each.logprobs == pytest.approx(reference_logprobs(model, each.prompt, each.output_ids), abs=1e-5)


def test_admit_known_prefix_is_copied_unless_the_weights_changed(model_path: Path) -> None:
    table, model = load(model_path), reference_model(model_path)
    passes = fed(table)
    prompt = list(range(3, 3 + 40))
    jobs = [job([*prompt, 50 + i], 20, seed=i) for i in range(4)]
    for i, each in enumerate(jobs):
        table._version = lambda version=i // 2: version  # type: ignore[misc]
        table.admit(deque([each]))
        table.step()

    run(table, [])

    # 41 tokens are read; of the second prompt one block of 32 is known; then the version changes
    assert passes[:4] == [41, 1 + 9, 2 + 41, 3 + 9]
    for each in jobs:
        assert each.logprobs == pytest.approx(reference_logprobs(model, each.prompt, each.output_ids), abs=1e-5)


def test_admit_prefix_of_another_version_taken_anyway_is_seen(model_path: Path) -> None:
    """The fault planted: without the change of version, keys and values of old weights would be used."""
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


def test_admit_next_turn_of_an_ended_answer_reads_what_is_new_only(model_path: Path) -> None:
    table, model = load(model_path), reference_model(model_path)
    first = job(list(range(3, 40)), 30)
    run(table, [first])
    passes = fed(table)
    second = job([*first.tokens, 7, 8], 5)

    run(table, [second])

    assert passes[0] == len(second.prompt) - 66  # all but the last token of the first turn are in the cache
    assert second.logprobs == pytest.approx(reference_logprobs(model, second.prompt, second.output_ids), abs=1e-5)


@pytest.mark.parametrize("number", ["nan", "-inf"])
def test_record_log_prob_that_is_no_finite_number_ends_the_answer_as_an_error(model_path: Path, number: str) -> None:
    """Minus infinity: the end is all that the model allows, and it may not end yet. JSON can say neither."""
    table, end = load(model_path), torch.tensor([END_ID])
    head = table.model.model.get_output_embeddings()
    head.register_forward_hook(lambda _, __, out: torch.full_like(out, float(number)).index_fill(-1, end, 0.0))
    broken = job([5], 20)

    run(table, [broken])

    assert broken.finish_reason is not None
    assert broken.finish_reason["type"] == "error"
    assert broken.finish_reason["message"] == f"version 0 of the weights computes {number}"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_decode_on_a_gpu_equals_transformers_forward(model_path: Path) -> None:
    model = reference_model(model_path)
    slots = load_model(EmbeddedEngineConfig(slots=8), ServeSpec(str(model_path), device="cuda"))
    table = SlotTable(slots, 8, 512, lambda: 0)
    jobs = [job([5, 9, 30 + i // 2], 40, seed=i) for i in range(12)]

    run(table, jobs, stagger=2)

    for each in jobs:
        assert each.logprobs == pytest.approx(reference_logprobs(model, each.prompt, each.output_ids), abs=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2"])
def test_step_long_prompts_are_read_in_parts_beside_the_answers(family: str, tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model", family, **FAMILIES[family])
    table, model = load(path, slots=6, prefill_tokens=50), reference_model(path)
    answering = job([5, 9], 60)
    table.admit(deque([answering]))
    table.step()
    passes = fed(table)
    jobs = [job([3 + (i * k) % 90 for k in range(30 + 70 * i)], 8, seed=i) for i in range(1, 4)]

    run(table, jobs)

    assert max(passes) <= 50 + 6
    assert passes[0] == 1 + 50
    for each in [answering, *jobs]:
        assert each.logprobs == pytest.approx(reference_logprobs(model, each.prompt, each.output_ids), abs=1e-5)


@pytest.mark.slow
def test_take_all_and_admit_again_goes_on_where_it_was(model_path: Path) -> None:
    table = load(model_path)
    whole, broken = job([5, 9, 30], 30, seed=3), job([5, 9, 30], 30, seed=3)
    run(table, [whole])

    waiting = deque([broken])
    table.admit(waiting)
    for _ in range(11):
        table.step()
    run(table, table.take_all())

    assert broken.output_ids == whole.output_ids


def test_sample_end_token_blocked_until_minimum_then_allowed(model_path: Path) -> None:
    table = load(model_path)
    head = table.model.model.get_output_embeddings()
    head.register_forward_hook(lambda _, __, logits: logits.index_fill(-1, torch.tensor([END_ID]), 50.0))
    short, long = job([5], 20, min_new_tokens=0), job([6], 20, min_new_tokens=9)

    run(table, [short, long])

    assert short.output_ids == [END_ID]
    assert len(long.output_ids) == 10
    assert long.output_ids[-1] == END_ID
    assert END_ID not in long.output_ids[:-1]
    # what was sampled instead has its log-prob under the full distribution, where the end token is certain
    assert max(long.logprobs[:-1]) < -30
