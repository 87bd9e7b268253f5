"""Mixture of experts (MoE): weights, router statistics, and rejected layouts."""

import json
import math

import pytest
import torch
from megatron_toys import toy_config, toy_state
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.batch.trajectory import lengths
from rl_contracts.config import MicroBatchConfig, OptimizerConfig
from rl_contracts.conformance.train_engine import policy_loss, trained_tokens
from rl_contracts.data import FinetuneSpec
from rl_contracts.errors import ConfigError, ModelError
from rl_contracts.testing import make_batch, make_tiny_model
from rl_engines_megatron import MegatronEngine, MegatronEngineConfig, from_megatron, to_megatron, transformer_kwargs

SPLITS = [  # tp, pp, ep, etp
    (1, 1, 1, 1),
    (1, 1, 2, 1),
    (1, 2, 4, 1),
    (2, 1, 1, 2),
    (2, 2, 2, 1),
    (2, 1, 2, 2),
    (4, 1, 2, 1),
]


def shards_of(state, config, tp, pp, ep, etp):
    sizes = {"tp_size": tp, "pp_size": pp, "ep_size": ep, "etp_size": etp}
    ranks = [(stage, rank) for stage in range(pp) for rank in range(math.lcm(tp, ep * etp))]
    return [
        to_megatron(state, config, pp_rank=s, tp_rank=r % tp, etp_rank=r % etp, ep_rank=r // etp % ep, **sizes)
        for s, r in ranks
    ]


@pytest.mark.parametrize(
    ("split", "family", "dense"),
    [(split, *(("qwen3_moe", (1, 2)), ("mixtral", ()))[number % 2]) for number, split in enumerate(SPLITS)],
    ids=str,
)
def test_conversion_round_trip_of_experts_is_bitwise_exact(split, family, dense):
    config = toy_config(family, mlp_only_layers=list(dense))
    state, (tp, pp, ep, etp) = toy_state(config), split

    shards = shards_of(state, config, *split)
    back = from_megatron(shards, config, tp_size=tp, pp_size=pp, ep_size=ep, etp_size=etp)

    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_to_megatron_expert_rank_holds_its_experts_and_whole_router():
    config = toy_config("qwen3_moe")
    state = toy_state(config)

    second = shards_of(state, config, 1, 1, 2, 1)[1]

    megatron_prefix, hf_prefix = "decoder.layers.3.mlp", "model.layers.3.mlp"
    assert torch.equal(second[f"{megatron_prefix}.router.weight"], state[f"{hf_prefix}.gate.weight"])
    down = f"{megatron_prefix}.experts.local_experts.1.linear_fc2.weight"
    assert torch.equal(second[down], state[f"{hf_prefix}.experts.3.down_proj.weight"])
    assert f"{megatron_prefix}.experts.local_experts.2.linear_fc2.weight" not in second


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("router.weight", "tensor rank 2, pipeline stage 0"),
        ("experts.local_experts.1.linear_fc2.weight", "tensor rank 2, pipeline stage 0"),
    ],
)
def test_from_megatron_rejects_differing_copies_and_names_rank(name, place):
    config = toy_config("qwen3_moe")
    shards = shards_of(toy_state(config), config, 4, 1, 2, 1)
    shards[2][f"decoder.layers.1.mlp.{name}"].add_(1)

    with pytest.raises(ModelError, match=f"{name} \\({place}\\) differs"):
        from_megatron(shards, config, tp_size=4, ep_size=2)


def test_transformer_kwargs_contain_router_settings():
    config = toy_config("qwen3_moe", norm_topk_prob=False, decoder_sparse_step=2)

    kwargs = transformer_kwargs(config, ParallelStrategy(data=2, expert=2))

    assert kwargs["moe_router_pre_softmax"]
    assert kwargs["moe_layer_freq"] == [0, 1, 0, 1]
    assert (kwargs["expert_model_parallel_size"], kwargs["num_moe_experts"]) == (2, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 8}, "sliding_window=8"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_transformer_kwargs_reject_unsupported_moe(changes, message):
    with pytest.raises(ModelError, match=message):
        transformer_kwargs(toy_config("mixtral", **changes), ParallelStrategy())


AUXILIARY_LOSS = {"output_router_logits": True}


@pytest.mark.parametrize(
    ("family", "changes", "layout", "message"),
    [
        ("qwen3", {}, {"data": 2, "expert": 2}, r"qwen3 models have no experts"),
        ("deepseek_v3", {}, {"data": 2, "expert": 2}, r"model_type 'deepseek_v3' is not supported"),
        ("qwen3_moe", {}, {"data": 3, "expert": 3}, r"num_experts=4 .*e=3"),
        (
            "qwen3_moe",
            {"moe_intermediate_size": 9},
            {"data": 4, "expert": 2, "expert_tensor": 2},
            r"moe_intermediate_size=9 .*2 ranks per expert",
        ),
        ("mixtral", {}, {"data": 2, "expert_tensor": 2}, r"2 ranks per expert .*sequence_parallel=true"),
        ("mixtral", {}, {"tensor": 2}, r"t=2 .*sequence_parallel=true"),
        ("qwen3_moe", {}, {"data": 2, "pipeline": 2, "expert": 2}, r"p=2, e=2 "),
        ("qwen3_moe", AUXILIARY_LOSS | {"router_aux_loss_coef": 0.1}, {"pipeline": 2}, r"p=2 .*output_router_logits"),
    ],
)
def test_check_rejects_layout_that_does_not_fit_experts(tmp_path, family, changes, layout, message):
    (tmp_path / "config.json").write_text(json.dumps(vars(toy_config(family, **changes))))

    with pytest.raises(ConfigError, match=message):
        MegatronEngineConfig().check(ParallelStrategy(**layout), FinetuneSpec(str(tmp_path), 1, device="cpu"))


def step_of(path, tokens, loss_fn=policy_loss):
    """Return the gradients of a plain SGD step by name, and its metrics."""
    optimizer = OptimizerConfig(name="sgd", lr=64.0, weight_decay=0.0, max_grad_norm=0.0)
    engine = MegatronEngine()
    engine.initialize(
        FinetuneSpec(str(path), 1, optimizer=optimizer, device="cpu", micro_batch=MicroBatchConfig(tokens))
    )
    before = {name: tensor.clone() for name, tensor in engine.full_parameters()}
    metrics = engine.train_batch(make_batch(6, seed=3), loss_fn, trained_tokens)
    gradients = {name: (before[name] - tensor) / 64.0 for name, tensor in engine.full_parameters()}
    metrics |= engine.stats()
    assert "experts/entropy" not in engine.stats()  # no steps since the last call
    engine.destroy()
    return gradients, metrics


def no_loss(outputs, packed):
    return outputs.logprobs.sum() * 0.0, {}


@pytest.mark.slow
def test_auxiliary_loss_by_sequence_matches_transformers(tmp_path):
    path = make_tiny_model(tmp_path, "qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.5)
    batch = make_batch(6, seed=3)
    model = AutoModelForCausalLM.from_pretrained(path)
    auxiliary = torch.zeros(())
    for ids, length in zip(batch["input_ids"], lengths(batch).tolist(), strict=True):
        logits = model(ids[None, :length], output_router_logits=True).router_logits
        auxiliary = auxiliary + load_balancing_loss_func(logits, 4, 2) * length
    auxiliary = auxiliary / lengths(batch).sum()
    (0.5 * auxiliary).backward()

    gradients, metrics = step_of(path, 64, no_loss)

    assert metrics["loss/aux"] == pytest.approx(auxiliary.item(), rel=1e-5)
    for layer in range(2):
        expected = model.get_submodule(f"model.layers.{layer}.mlp.gate").weight.grad
        torch.testing.assert_close(gradients[f"model.layers.{layer}.mlp.gate.weight"], expected, atol=2e-6, rtol=0)


@pytest.mark.slow
def test_expert_metrics_match_router_choices(tmp_path):
    path = make_tiny_model(tmp_path, "qwen3_moe")
    batch = make_batch(6, seed=3)
    model = AutoModelForCausalLM.from_pretrained(path)
    load = torch.zeros(2, 4)
    for ids, length in zip(batch["input_ids"], lengths(batch).tolist(), strict=True):
        for layer, logits in enumerate(model(ids[None, :length], output_router_logits=True).router_logits):
            load[layer] += torch.zeros_like(logits).scatter_(1, logits.topk(2).indices, 1.0).sum(0)
    shares = (load / load.sum(-1, keepdim=True)).double()

    _, metrics = step_of(path, 64)

    assert metrics["experts/share/max"] == pytest.approx(float(shares.max()), abs=1e-6)
    assert metrics["experts/share/min"] == pytest.approx(float(shares.min()), abs=1e-6)
    entropy = torch.special.entr(shares).sum(-1).mean() / math.log(4)
    assert metrics["experts/entropy"] == pytest.approx(float(entropy), abs=1e-6)
    assert metrics["experts/dropped"] == pytest.approx(0.0, abs=1e-9)
    assert "loss/aux" not in metrics
