"""Peak memory and model FLOP utilisation."""

import time

import pytest
import torch
from fsdp_toys import (
    loss_fn,
    loss_weight_fn,
    make_batch,
    make_classifier,
    make_engine,
    make_model,
    value_loss_fn,
)
from torch.utils.flop_counter import FlopCounterMode
from transformers import Gemma3TextConfig, MistralConfig, Qwen3Config

from rl_contracts.errors import ConfigError
from rl_contracts.models import cpu_matmul, usage
from rl_contracts.models.attention_windows import layer_windows
from rl_contracts.models.usage import attended_pairs, peak_flops
from rl_engines_fsdp.config import LoRAConfig
from rl_engines_fsdp.usage import matrix_parameters, step_flops


def work_of(batch):
    """Tokens, and the pairs of the two layers of a toy."""
    sizes = batch["attention_mask"].sum(-1)
    return int(sizes.sum()), int(2 * sizes.square().sum())


@pytest.fixture
def counted_products(monkeypatch):
    """torch's own products everywhere: it cannot count those of oneDNN, which some processors multiply by."""
    monkeypatch.setattr(cpu_matmul, "_mkl_wastes_speed", lambda: False)
    cpu_matmul.prefers_onednn.cache_clear()
    yield
    cpu_matmul.prefers_onednn.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
def test_step_flops_are_what_torch_counts_but_for_what_runs_twice(family, tmp_path, counted_products):
    # tied and untied; the head runs once here because all its probabilities are kept
    engine, batch = make_engine(make_model(tmp_path, family), micro_batch=10_000), make_batch(longest=40)
    tokens, pairs = work_of(batch)

    with FlopCounterMode(display=False) as counter:
        engine.train_batch(batch, loss_fn, loss_weight_fn)

    # torch does not count its attention on a CPU, nor products that are added in place: the head's gradients
    width, head = 32, 61 * 32
    counted = 6 * matrix_parameters(engine._model) * tokens - 4 * head * tokens
    assert counter.get_total_flops() == pytest.approx(counted, rel=2e-3)
    assert step_flops(engine._model, tokens, pairs) == 6 * (matrix_parameters(engine._model) * tokens + width * pairs)


@pytest.mark.slow
def test_step_flops_of_adapters_count_two_of_three_passes_of_frozen_weights(tmp_path, counted_products):
    engine = make_engine(make_model(tmp_path, "Llama"), micro_batch=10_000, lora=LoRAConfig(rank=4))
    model, batch = engine._model, make_batch(longest=40)
    tokens, pairs = work_of(batch)

    with FlopCounterMode(display=False) as counter:
        engine.train_batch(batch, loss_fn, loss_weight_fn)

    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = matrix_parameters(model) - trained
    assert matrix_parameters(model, frozen=False) == trained < frozen
    # nothing below the first layer's projections of queries, keys and values needs a gradient; what flows back through
    # the head is added in place, which torch does not count
    attention = model.model.model.layers[0].self_attn
    first = [getattr(attention, f"{name}_proj") for name in "qkv"]
    unneeded = sum(layer.base_layer.weight.numel() + layer.lora_A["default"].weight.numel() for layer in first)
    width, head = 32, 61 * 32
    counted = (4 * frozen + 6 * trained - 2 * unneeded - 2 * head) * tokens
    assert counter.get_total_flops() == pytest.approx(counted, rel=2e-3)
    assert step_flops(model, tokens, pairs) == (4 * frozen + 6 * trained) * tokens + 6 * width * pairs


def test_step_flops_of_a_critic_leave_the_embedding_out(tmp_path):
    engine = make_engine(make_classifier(tmp_path), head="value")

    table = engine._model.model.get_input_embeddings().weight

    assert matrix_parameters(engine._model) == sum(
        p.numel() for p in engine._model.parameters() if p.ndim == 2 and p is not table
    )


def test_matrix_parameters_of_a_mixture_are_those_that_a_token_meets(tmp_path):
    model = make_engine(make_model(tmp_path, "Qwen3Moe"))._model
    config, sizes = model.model.config, {name: p.numel() for name, p in model.named_parameters() if p.ndim > 1}
    experts = sum(size for name, size in sizes.items() if "experts" in name)
    table = 0 if config.tie_word_embeddings else model.model.get_input_embeddings().weight.numel()

    found = matrix_parameters(model)

    active = experts * config.num_experts_per_tok // config.num_experts
    assert 0 < active < experts
    assert found == sum(sizes.values()) - table - experts + active


def test_attended_pairs_of_a_window_are_those_that_its_mask_shows():
    lengths, window = torch.tensor([1, 3, 400]), 100
    shown = [sum(min(token + 1, window) for token in range(int(length))) for length in lengths]

    assert attended_pairs(lengths, [None, window]) == pytest.approx(1 + 9 + 400**2 + 2 * sum(shown), rel=0.02)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Gemma3TextConfig(num_hidden_layers=6, sliding_window=4), [4, 4, 4, 4, 4, None]),
        (MistralConfig(num_hidden_layers=2, sliding_window=8), [8, 8]),
        (Qwen3Config(num_hidden_layers=2), [None, None]),
    ],
)
def test_layer_windows_are_those_of_the_configuration(config, expected):
    assert layer_windows(config) == expected


def test_stats_on_a_cpu_have_peak_memory_and_no_utilisation(tmp_path):
    engine = make_engine(make_classifier(tmp_path), head="value")
    engine.train_batch(make_batch(), value_loss_fn, loss_weight_fn)

    stats = engine.stats()

    assert stats["throughput/mfu"] is None
    assert 0.05 < stats["memory/peak_gib"] < 64


@pytest.mark.slow
def test_peak_memory_on_a_cpu_grows_with_what_is_held():
    before = usage.peak_gib(torch.device("cpu"))

    held = torch.ones(int(before * 2**30 / 4) + 2**26)

    assert usage.peak_gib(torch.device("cpu")) - before > 0.2
    del held


def test_stats_of_a_known_device_are_flops_over_peak_and_time_and_begin_anew(tmp_path, monkeypatch):
    engine, batch = make_engine(make_model(tmp_path)), make_batch()
    monkeypatch.setattr(usage, "peak_flops", lambda device, dtype: 1e12)
    begin = time.perf_counter()
    for _ in range(2):
        engine.train_batch(batch, loss_fn, loss_weight_fn)
    seconds = time.perf_counter() - begin

    figures = engine.stats()

    found = figures["throughput/mfu"]
    assert 0 < figures["time/train_batch"] < seconds
    tokens, pairs = work_of(batch)
    assert found == pytest.approx(2 * step_flops(engine._model, tokens, pairs) / seconds / 1e12, rel=0.2)
    assert engine.stats()["throughput/mfu"] is None


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("NVIDIA H200", "bfloat16", 989e12),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA A100-SXM4-80GB", "float32", 19.5e12),
        ("NVIDIA L40S", "bfloat16", 362e12),
        ("Some GPU", "bfloat16", None),
    ],
)
def test_peak_of_a_device_by_its_name(name, dtype, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)

    assert peak_flops(torch.device("cuda"), dtype) == expected


def test_offload_without_cuda_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="offload=True does not go with device=cpu"):
        make_engine(make_model(tmp_path), offload=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_offloaded_engine_on_cuda_gives_the_step_of_a_resident_one(tmp_path):
    from rl_contracts.config import OptimizerConfig

    path, results = make_model(tmp_path), []
    for offload in (False, True):
        optimizer = OptimizerConfig(lr=1e-2)
        engine = make_engine(path, optimizer=optimizer, device="cuda", dtype="bfloat16", offload=offload)
        results.append([engine.train_batch(make_batch(seed=s), loss_fn, loss_weight_fn)["loss"] for s in range(3)])
        on_host = {parameter.device.type == "cpu" for parameter in engine._model.parameters()}
        engine.destroy()
        assert on_host == {offload}

    assert results[1] == pytest.approx(results[0], rel=1e-2)
