"""Utilization statistics of a step."""

from math import prod

import pytest
import torch
from megatron_toys import toy_config, toy_shapes

from rl_contracts.conformance.train_engine import OPTIMIZER, policy_loss, trained_tokens
from rl_contracts.data import FinetuneSpec
from rl_contracts.models import usage
from rl_contracts.testing import make_batch, make_tiny_model
from rl_engines_megatron import MegatronEngine
from rl_engines_megatron.model.architecture import Architecture


@pytest.mark.parametrize(("family", "tied"), [("qwen2", True), ("gemma3_text", False)])
def test_matrix_parameters_exclude_embedding_used_only_for_lookup(family, tied):
    config = toy_config(family, tie_word_embeddings=tied)
    shapes = toy_shapes(config)
    looked_up = {} if tied else {"model.embed_tokens.weight"}
    matrices = sum(prod(shape) for name, shape in shapes.items() if len(shape) == 2 and name not in looked_up)

    architecture = Architecture.from_hugging_face(config)

    assert architecture.matrix_parameters("lm") == matrices
    assert architecture.matrix_parameters("value") == matrices - config.vocab_size * config.hidden_size + 16
    width = config.num_attention_heads * config.head_dim
    assert architecture.step_flops("lm", 100, 2500) == 6 * (matrices * 100 + width * 2500)


def test_matrix_parameters_of_moe_count_only_active_experts():
    config = toy_config("qwen3_moe")
    shapes = toy_shapes(config)
    experts = {name: prod(shape) for name, shape in shapes.items() if ".experts." in name}
    looked_up = set() if config.tie_word_embeddings else {"model.embed_tokens.weight"}
    dense = sum(prod(s) for name, s in shapes.items() if len(s) == 2 and name not in experts and name not in looked_up)
    active = sum(experts.values()) * config.num_experts_per_tok // config.num_experts

    assert Architecture.from_hugging_face(config).matrix_parameters("lm") == dense + active


@pytest.mark.slow
def test_stats_report_utilization_of_known_device_and_reset(tmp_path, monkeypatch):
    engine = MegatronEngine()
    engine.initialize(FinetuneSpec(str(make_tiny_model(tmp_path)), 2, optimizer=OPTIMIZER, device="cpu"))
    monkeypatch.setattr(usage, "peak_flops", lambda device, dtype: 1e12)
    batches = [make_batch(4, seed=seed) for seed in range(2)]
    for batch in batches:
        engine.train_batch(batch, policy_loss, trained_tokens)

    metrics, next_metrics = engine.stats(), engine.stats()
    architecture = engine._parts[0].partition.architecture
    engine.destroy()

    sizes = torch.cat([batch["attention_mask"].sum(-1) for batch in batches])
    flops = architecture.step_flops("lm", int(sizes.sum()), int(2 * sizes.square().sum()))
    assert metrics["throughput/mfu"] == pytest.approx(flops / metrics["time/train_batch"] / 1e12)
    assert metrics["memory/peak_gib"] > 0.05
    assert next_metrics["throughput/mfu"] is None
    assert next_metrics["time/train_batch"] == 0
