"""Memory estimates of the engine, compared with the bytes of a real engine."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.config import MicroBatchConfig, OptimizerConfig
from rl_contracts.data import FinetuneSpec
from rl_contracts.errors import ConfigError
from rl_contracts.models.sizes import ModelSizes, layer_of, sizes_of
from rl_contracts.testing import make_batch, make_tiny_model
from rl_engines_fsdp import FSDPEngine, FSDPEngineConfig
from rl_engines_fsdp.config import LoRAConfig


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=2, hidden=48)


def read_sizes(path: Path) -> ModelSizes:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        return sizes_of(AutoModelForCausalLM.from_config(config), config)


def local_bytes(tensors: Any) -> int:
    """Return the bytes of the local shards; scalar counters are ignored."""
    shards = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)
    return sum(t.numel() * t.element_size() for t in shards if t.ndim)


def test_memory_counts_no_gradients_of_frozen_parameters(model: Path) -> None:
    sizes = read_sizes(model)
    name, shape = next(iter(sizes.shapes.items()))

    memory = FSDPEngineConfig().memory(
        ParallelStrategy(), FinetuneSpec(str(model), 1), replace(sizes, frozen=frozenset([name])), 1
    )

    assert memory["parameters"] - memory["gradients"] == 4 * math.prod(shape)
    assert memory["optimizer"] == 2 * memory["gradients"]


@pytest.mark.parametrize(("name", "dtype"), [("adamw", "bfloat16"), ("sgd", "float32")])
def test_memory_of_parameters_and_optimizer_equals_engine(model: Path, name: str, dtype: str) -> None:
    spec = FinetuneSpec(str(model), 1, optimizer=OptimizerConfig(name=name), dtype=dtype, device="cpu")
    estimate = FSDPEngineConfig().memory(ParallelStrategy(), spec, read_sizes(model), micro_batches=1)
    engine = FSDPEngine(FSDPEngineConfig())
    engine.initialize(spec)
    try:
        engine.train_batch(
            make_batch(4), lambda outputs, _: (outputs.logprobs.sum(), {}), lambda batch: batch["loss_mask"].sum()
        )
        assert local_bytes(engine._model.parameters()) == estimate["parameters"]
        state = [
            v
            for state_of_parameter in engine._optimizer.state.values()
            for v in state_of_parameter.values()
            if torch.is_tensor(v)
        ]
        assert local_bytes(state) == estimate["optimizer"]
    finally:
        engine.destroy()


def test_memory_is_divided_by_data_and_tensor_ranks(model: Path) -> None:
    sizes, spec = read_sizes(model), FinetuneSpec(str(model), 1, dtype="bfloat16")
    one_rank = FSDPEngineConfig().memory(ParallelStrategy(), spec, sizes, 1)
    four_ranks = FSDPEngineConfig().memory(ParallelStrategy(4), spec, sizes, 1)
    assert one_rank["parameters"] == 4 * sizes.parameters
    assert one_rank["parameters"] <= 4 * four_ranks["parameters"] <= 1.05 * one_rank["parameters"]
    tensor_ranks = FSDPEngineConfig().memory(ParallelStrategy(tensor=2), spec, sizes, 1)
    matrices = sum(math.prod(s) for n, s in sizes.shapes.items() if layer_of(n) is not None and len(s) > 1)
    vectors = sum(math.prod(s) for n, s in sizes.shapes.items() if layer_of(n) is not None and len(s) == 1)
    assert tensor_ranks["parameters"] == pytest.approx(4 * (matrices / 2 + vectors + sizes.outside / 2), rel=0.01)


def test_memory_reflects_settings_that_save_memory(model: Path) -> None:
    sizes, spec = read_sizes(model), FinetuneSpec(str(model), 1, dtype="bfloat16", micro_batch=MicroBatchConfig(1024))

    def memory(micro_batches: int = 4, **settings: Any) -> dict[str, float]:
        return FSDPEngineConfig(**settings).memory(ParallelStrategy(2), spec, sizes, micro_batches)

    plain = memory()
    assert plain["gradients before their reduction"] == 4 * sizes.parameters
    assert "gradients before their reduction" not in memory(micro_batches=1)
    assert "gradients before their reduction" not in memory(sync_every_micro_batch=True)
    assert memory(gradient_checkpointing=True)["activations"] < plain["activations"]
    assert memory(max_logits=1024)["logits"] == 3 * 4 * 1024
    assert memory(lora=LoRAConfig(rank=2))["optimizer"] < 0.3 * plain["optimizer"]
    assert memory(offload=True)["optimizer"] == 0


def test_check_memory_counts_gradients_before_reduction(model: Path) -> None:
    sizes, ranks = read_sizes(model), ParallelStrategy(4)
    spec = FinetuneSpec(str(model), 1, 0, OptimizerConfig(), MicroBatchConfig(1), dtype="bfloat16")
    sufficient = sum(FSDPEngineConfig(sync_every_micro_batch=True).memory(ranks, spec, sizes, 4).values())

    FSDPEngineConfig(sync_every_micro_batch=True).check_memory(ranks, spec, sizes, 4, sufficient)
    with pytest.raises(ConfigError, match="set sync_every_micro_batch=true"):
        FSDPEngineConfig().check_memory(ranks, spec, sizes, 4, sufficient)


def test_initialize_with_optimizer_above_gpu_memory_rejects(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_engines_fsdp.engine.device_memory", lambda _: 8.0 * read_sizes(model).parameters)

    with pytest.raises(ConfigError, match="offload=true"):
        FSDPEngine(FSDPEngineConfig()).initialize(
            FinetuneSpec(str(model), 1, optimizer=OptimizerConfig(), device="cpu")
        )


@pytest.mark.parametrize("name", ["adamw", "custom:Optimizer"])
def test_check_memory_rejects_exact_excess_and_warns_on_estimates(
    model: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    config, optimizer = FSDPEngineConfig(), OptimizerConfig(name=name)
    sizes, spec = read_sizes(model), FinetuneSpec(str(model), 1, optimizer=optimizer)
    bytes_by_use = config.memory(ParallelStrategy(2), spec, sizes, 1)
    estimated = ["activations", "logits", "gathered parameters", *(["optimizer"] if name != "adamw" else [])]
    exact = sum(size for use, size in bytes_by_use.items() if use not in estimated)

    config.check_memory(ParallelStrategy(2), spec, sizes, 1, sum(bytes_by_use.values()))
    assert not caplog.records
    config.check_memory(ParallelStrategy(2), spec, sizes, 1, exact)
    assert "but the GPU has" in caplog.text
    with pytest.raises(ConfigError):
        config.check_memory(ParallelStrategy(2), spec, sizes, 1, exact - 1)
