"""Peak memory and model FLOPs utilization."""

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

from rl_contracts.models import cpu_matmul, usage
from rl_contracts.models.attention_windows import layer_windows
from rl_contracts.models.usage import attended_pairs, peak_flops
from rl_engines_fsdp.config import LoRAConfig
from rl_engines_fsdp.usage import matrix_parameters, step_flops


def work_of(batch):
    """Return the tokens of a batch, and its attended pairs in a model of two layers."""
    sizes = batch["attention_mask"].sum(-1)
    return int(sizes.sum()), int(2 * sizes.square().sum())


@pytest.fixture
def counted_products(monkeypatch):
    """Disable oneDNN products, which are faster on some processors but not counted by torch."""
    monkeypatch.setattr(cpu_matmul, "_mkl_wastes_speed", lambda: False)
    cpu_matmul.prefers_onednn.cache_clear()
    yield
    cpu_matmul.prefers_onednn.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
def test_step_flops_match_torch_flop_counter(family, tmp_path, counted_products):
    # tied and untied head; the head is not recomputed, because all logits fit in one block
    engine, batch = make_engine(make_model(tmp_path, family), micro_batch=10_000), make_batch(longest=40)
    tokens, pairs = work_of(batch)

    with FlopCounterMode(display=False) as counter:
        engine.train_batch(batch, loss_fn, loss_weight_fn)

    # torch counts neither attention on a CPU nor products that are added in place (gradients of the head)
    width, head = 32, 61 * 32
    counted = 6 * matrix_parameters(engine._model) * tokens - 4 * head * tokens
    assert counter.get_total_flops() == pytest.approx(counted, rel=2e-3)
    assert step_flops(engine._model, tokens, pairs) == 6 * (matrix_parameters(engine._model) * tokens + width * pairs)


@pytest.mark.slow
def test_step_flops_with_lora_match_torch_flop_counter(tmp_path, counted_products):
    engine = make_engine(make_model(tmp_path, "Llama"), micro_batch=10_000, lora=LoRAConfig(rank=4))
    model, batch = engine._model, make_batch(longest=40)
    tokens, pairs = work_of(batch)

    with FlopCounterMode(display=False) as counter:
        engine.train_batch(batch, loss_fn, loss_weight_fn)

    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = matrix_parameters(model) - trained
    assert matrix_parameters(model, frozen=False) == trained < frozen
    # no gradient is needed below the query, key and value projections of the first layer; torch does not count the
    # input gradient of the head, which is added in place
    attention = model.model.model.layers[0].self_attn
    first = [getattr(attention, f"{name}_proj") for name in "qkv"]
    unneeded = sum(layer.base_layer.weight.numel() + layer.lora_A["default"].weight.numel() for layer in first)
    width, head = 32, 61 * 32
    counted = (4 * frozen + 6 * trained - 2 * unneeded - 2 * head) * tokens
    assert counter.get_total_flops() == pytest.approx(counted, rel=2e-3)
    assert step_flops(model, tokens, pairs) == (4 * frozen + 6 * trained) * tokens + 6 * width * pairs


def test_matrix_parameters_of_critic_exclude_embedding(tmp_path):
    engine = make_engine(make_classifier(tmp_path), head="value")

    table = engine._model.model.get_input_embeddings().weight

    assert matrix_parameters(engine._model) == sum(
        p.numel() for p in engine._model.parameters() if p.ndim == 2 and p is not table
    )


def test_matrix_parameters_of_moe_count_active_experts(tmp_path):
    model = make_engine(make_model(tmp_path, "Qwen3Moe"))._model
    config, sizes = model.model.config, {name: p.numel() for name, p in model.named_parameters() if p.ndim > 1}
    experts = sum(size for name, size in sizes.items() if "experts" in name)
    table = 0 if config.tie_word_embeddings else model.model.get_input_embeddings().weight.numel()

    actual = matrix_parameters(model)

    active = experts * config.num_experts_per_tok // config.num_experts
    assert 0 < active < experts
    assert actual == sum(sizes.values()) - table - experts + active


def test_attended_pairs_with_window_match_mask():
    lengths, window = torch.tensor([1, 3, 400]), 100
    visible = [sum(min(token + 1, window) for token in range(int(length))) for length in lengths]

    assert attended_pairs(lengths, [None, window]) == pytest.approx(1 + 9 + 400**2 + 2 * sum(visible), rel=0.02)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Gemma3TextConfig(num_hidden_layers=6, sliding_window=4), [4, 4, 4, 4, 4, None]),
        (MistralConfig(num_hidden_layers=2, sliding_window=8), [8, 8]),
        (Qwen3Config(num_hidden_layers=2), [None, None]),
    ],
)
def test_layer_windows_match_the_configuration(config, expected):
    assert layer_windows(config) == expected


def test_stats_on_cpu_have_peak_memory_and_no_utilization(tmp_path):
    engine = make_engine(make_classifier(tmp_path), head="value")
    engine.train_batch(make_batch(), value_loss_fn, loss_weight_fn)

    stats = engine.stats()

    assert stats["throughput/mfu"] is None
    assert 0.05 < stats["memory/peak_gib"] < 64


@pytest.mark.slow
def test_peak_memory_on_cpu_grows_with_allocations():
    before = usage.peak_gib(torch.device("cpu"))

    tensor = torch.ones(int(before * 2**30 / 4) + 2**26)

    assert usage.peak_gib(torch.device("cpu")) - before > 0.2
    del tensor


def test_stats_of_known_device_have_mfu_and_are_reset(tmp_path, monkeypatch):
    engine, batch = make_engine(make_model(tmp_path)), make_batch()
    monkeypatch.setattr(usage, "peak_flops", lambda device, dtype: 1e12)
    start = time.perf_counter()
    for _ in range(2):
        engine.train_batch(batch, loss_fn, loss_weight_fn)
    seconds = time.perf_counter() - start

    metrics = engine.stats()

    mfu = metrics["throughput/mfu"]
    assert 0 < metrics["time/train_batch"] < seconds
    tokens, pairs = work_of(batch)
    assert mfu == pytest.approx(2 * step_flops(engine._model, tokens, pairs) / seconds / 1e12, rel=0.2)
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
def test_peak_flops_by_device_name(name, dtype, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)

    assert peak_flops(torch.device("cuda"), dtype) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="requires a CUDA device")
def test_offload_on_cuda_gives_the_same_losses(tmp_path):
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
