"""Layers of a model, with and without TransformerEngine."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe import moe_utils

from rl_contracts.config import OptimizerConfig
from rl_contracts.conformance.train_engine import logprobs_of, policy_loss, trained_tokens
from rl_contracts.data import FinetuneSpec
from rl_contracts.testing import make_batch, make_tiny_model
from rl_engines_megatron import MegatronEngine, MegatronEngineConfig
from rl_engines_megatron.model import layers

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("installed", "device", "dtype", "expected"),
    [
        (True, GPU, torch.bfloat16, "transformer_engine"),
        (True, GPU, torch.float32, "local"),  # TransformerEngine multiplies float32 as TF32
        (True, CPU, torch.bfloat16, "local"),
        (False, GPU, torch.bfloat16, "local"),
    ],
)
def test_implementation_is_transformer_engine_on_gpu_in_16_bits(monkeypatch, installed, device, dtype, expected):
    monkeypatch.setattr(layers, "HAVE_TE", installed)
    assert layers.implementation(device, dtype) == expected


@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
def test_matrices_of_layers_and_experts_use_the_same_implementation(implementation):
    local = implementation == "local"
    column, row = (ColumnParallelLinear, RowParallelLinear) if local else (TEColumnParallelLinear, TERowParallelLinear)

    matrices = layers.Matrices(SimpleNamespace(transformer_impl=implementation))
    experts = matrices.experts().keywords["submodules"]

    assert (matrices.column_parallel_linear(), matrices.row_parallel_linear()) == (column, row)
    assert (experts.linear_fc1, experts.linear_fc2) == (column, row)


def test_router_uses_torch_even_with_transformer_engine_installed(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("TransformerEngine was called")

    monkeypatch.setattr(moe_utils, "te_general_gemm", fail)
    engine = MegatronEngine(MegatronEngineConfig())
    engine.initialize(FinetuneSpec(str(make_tiny_model(tmp_path, "qwen3_moe")), 10, optimizer=OptimizerConfig()))
    assert engine.train_batch(make_batch(3), policy_loss, trained_tokens)["applied"] == 1.0
    engine.destroy()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs transformer-engine[pytorch]")
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen3_moe"])
def test_transformer_engine_matches_torch_in_logprobs_and_losses(tmp_path, family):
    path, results = str(make_tiny_model(tmp_path, family)), []
    for use_te in (False, True):
        engine = MegatronEngine(MegatronEngineConfig(transformer_engine=use_te))
        engine.initialize(FinetuneSpec(path, 10, optimizer=OptimizerConfig(lr=1e-3), device="cuda", dtype="bfloat16"))
        kinds = {type(module) for part in engine._parts for module in part.modules()}
        assert any(issubclass(kind, TERowParallelLinear) for kind in kinds) == use_te
        logprobs = logprobs_of(engine, make_batch(3))
        losses = [engine.train_batch(make_batch(3), policy_loss, trained_tokens)["loss"] for _ in range(5)]
        results.append((logprobs, losses))
        engine.destroy()

    torch.testing.assert_close(results[1][0], results[0][0], atol=0.05, rtol=0)
    assert results[1][1] == pytest.approx(results[0][1], abs=0.02)
