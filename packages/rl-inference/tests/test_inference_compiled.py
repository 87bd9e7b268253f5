"""Compiled forward pass: the log-probs of transformers in one graph, and errors that name the missing compiler."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from rl_contracts.config import GenerationConfig
from rl_contracts.data import ServeSpec
from rl_contracts.errors import ConfigError, ModelError
from rl_inference import EmbeddedEngineConfig
from rl_inference.embedded_server.job import GenerationJob
from rl_inference.embedded_server.model.loading import load_model
from rl_inference.embedded_server.slots import SlotTable
from rl_inference.testing import reference_logprobs, reference_model, tiny_model

SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", {}),
        pytest.param("gemma2", {**SLIDING, "attn_logit_softcapping": 5.0}, marks=pytest.mark.nightly),
    ],
)
def test_compiled_passes_of_any_size_equal_transformers_in_one_graph(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    path = tiny_model(tmp_path / "model", family, **settings)
    torch._dynamo.reset()
    counters["stats"].clear()
    table = SlotTable(
        load_model(EmbeddedEngineConfig(max_sequences=4, compile=True), ServeSpec(str(path), device="cpu")),
        4,
        16,
        lambda: 0,
    )
    generation = [GenerationConfig(max_new_tokens=5 + 4 * i, ignore_eos=True) for i in range(6)]
    jobs = [
        GenerationJob("job", [5, 9, 30 + i, *range(40, 40 + 7 * i)], settings, i, frozenset())
        for i, settings in enumerate(generation)
    ]
    waiting = deque(jobs)

    while waiting or table.running:
        table.admit(waiting)
        table.step()

    model = reference_model(path)
    for job in jobs:
        expected = reference_logprobs(model, job.prompt, job.output_ids)
        assert job.logprobs == pytest.approx(expected, abs=1e-5)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_compiled_model_uses_changed_weights(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model", "qwen3")
    model = load_model(EmbeddedEngineConfig(max_sequences=1, compile=True), ServeSpec(str(path), device="cpu"))
    ids = [5, 9, 30, 77, 12]
    before = model.score(ids, 1.0)

    for parameter in model.model.parameters():
        parameter.data.mul_(1.5)

    reference = reference_model(path)
    for parameter in reference.parameters():
        parameter.data.mul_(1.5)
    logprobs, expected = model.score(ids, 1.0)[1:], reference_logprobs(reference, ids[:1], ids[1:])
    assert logprobs == pytest.approx(expected, abs=1e-5)
    assert logprobs != pytest.approx(before[1:], abs=1e-3)


def test_compile_without_cpp_compiler_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_model(tmp_path / "model", "qwen3")
    import torch._inductor.config as inductor

    monkeypatch.setattr(inductor.cpp, "cxx", ("no-such-compiler",))

    with pytest.raises(ModelError, match="Install g"):
        load_model(EmbeddedEngineConfig(max_sequences=1, compile=True), ServeSpec(str(path), device="cpu"))


def test_compile_with_deterministic_is_rejected() -> None:
    with pytest.raises(ConfigError, match="compile"):
        EmbeddedEngineConfig(compile=True).check(ServeSpec("m", deterministic=True))
