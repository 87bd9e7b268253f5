"""The router auxiliary loss equals the loss of transformers per sequence, for every split of the batch."""

import json
from pathlib import Path

import pytest
import torch
from fsdp_toys import distance, make_batch, make_classifier, make_engine, record_gradients, value_loss_fn
from safetensors.torch import load_file

from rl_contracts.batch.trajectory import select
from rl_contracts.config import OptimizerConfig
from rl_contracts.errors import ConfigError, ModelError
from rl_contracts.testing.families import make_family
from rl_contracts.testing.processes import run_ranks

ENABLED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
FAMILIES = [
    ("qwen3_moe", False),
    pytest.param("mixtral", True, marks=pytest.mark.slow),
    pytest.param("olmoe", False, marks=pytest.mark.slow),
    pytest.param("granitemoe", True, marks=pytest.mark.slow),
]
"""Families, and whether activations are recomputed."""


def likelihood(outputs, packed):
    return -(outputs.logprobs * packed["loss_mask"]).sum(), {}


def count(batch):
    return batch["loss_mask"].sum()


def step_of(path, micro_batch=64, **settings):
    """Run a step on this replica's part of the batch; return results, gradients and engine."""
    optimizer = OptimizerConfig(lr=0.1, max_grad_norm=0.0)
    engine = make_engine(str(path), micro_batch=micro_batch, optimizer=optimizer, **settings)
    gradients, batch = record_gradients(engine), make_batch(6)
    indices = list(range(len(batch)))[engine.parallel.dp_rank :: engine.parallel.dp_size]
    loss_fn = likelihood if settings.get("head", "lm") == "lm" else value_loss_fn
    result = engine.train_batch(select(batch, indices), loss_fn, count)
    return result, gradients, engine


def expected_step(path):
    """Compute auxiliary loss and gradients of the same step with transformers, one sequence at a time."""
    import sys

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    balance = sys.modules[type(model).__module__].load_balancing_loss_func
    batch = make_batch(6)
    loss, auxiliary, tokens = 0.0, 0.0, int(batch["attention_mask"].sum())
    for index, mask in enumerate(batch["attention_mask"]):
        ids, learn = batch["input_ids"][index][mask], batch["loss_mask"][index][mask]
        out = model(ids[None], output_router_logits=True)
        logits = out.logits[0, :-1] / batch["temperature"][index]
        logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        loss = loss - (logprobs * learn[1:]).sum()
        aux = balance(out.router_logits, model.num_experts, model.num_experts_per_tok)
        auxiliary = auxiliary + aux * len(ids) / tokens
    (loss / batch["loss_mask"].sum() + ENABLED["router_aux_loss_coef"] * auxiliary).backward()
    return auxiliary.item(), {name: p.grad for name, p in model.named_parameters()}


def expected_critic_step(path):
    """Compute auxiliary loss and gradients of a critic with transformers.

    The value of a token comes from the hidden state of the token before it.
    """
    from transformers import AutoModelForSequenceClassification
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    batch, config = make_batch(6), model.config
    loss, auxiliary, tokens = 0.0, 0.0, int(batch["attention_mask"].sum())
    for index, mask in enumerate(batch["attention_mask"]):
        ids, learn = batch["input_ids"][index][mask], batch["loss_mask"][index][mask]
        out = model.model(ids[None], output_router_logits=True)
        values = model.score(out.last_hidden_state)[0, :-1, 0]
        loss = loss + ((values - batch["advantages"][index][mask][1:]).square() * learn[1:]).sum()
        aux = load_balancing_loss_func(out.router_logits, config.num_experts, config.num_experts_per_tok)
        auxiliary = auxiliary + aux * len(ids) / tokens
    (loss / batch["loss_mask"].sum() + ENABLED["router_aux_loss_coef"] * auxiliary).backward()
    return auxiliary.item(), {name: p.grad for name, p in model.named_parameters()}


def norm_of(gradients):
    return sum(float(g.double().square().sum()) for g in gradients.values()) ** 0.5


@pytest.mark.parametrize(("family", "checkpointing"), FAMILIES)
def test_auxiliary_loss_matches_transformers_per_sequence(family, checkpointing, tmp_path):
    path = make_family(tmp_path, family, **ENABLED)
    auxiliary, expected = expected_step(path)

    result, gradients, _ = step_of(path, gradient_checkpointing=checkpointing)

    assert result["loss/aux"] == pytest.approx(auxiliary, rel=1e-5)
    assert distance(gradients, expected, norm_of(expected)) < 1e-5


def test_auxiliary_loss_of_critic_matches_transformers_per_sequence(tmp_path):
    path = make_classifier(tmp_path, "Qwen3Moe", **ENABLED)
    auxiliary, expected = expected_critic_step(path)

    result, gradients, engine = step_of(path, head="value")

    assert result["loss/aux"] == pytest.approx(auxiliary, rel=1e-5)
    assert distance(gradients, expected, norm_of(expected)) < 1e-5
    evaluated = engine.eval_batch(make_batch(6), value_loss_fn, count)
    assert "loss/aux" not in evaluated


def test_auxiliary_loss_does_not_depend_on_micro_batch_size(tmp_path):
    path = make_family(tmp_path, "qwen3_moe", **ENABLED)
    expected, actual = step_of(path, 10_000), step_of(path, 24)

    assert actual[0]["loss/aux"] == pytest.approx(expected[0]["loss/aux"], rel=1e-6)
    assert actual[0]["loss"] == pytest.approx(expected[0]["loss"], rel=1e-6)
    assert distance(actual[1], expected[1], norm_of(expected[1])) < 1e-6


@pytest.mark.slow
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("layout", [{"data": 2}, {"context": 2}])
def test_auxiliary_loss_on_two_ranks_equals_one_rank(layout, tmp_path):
    path = make_family(tmp_path / "model", "qwen3_moe", **ENABLED)
    result, gradients, _ = step_of(path)

    run_ranks(Path(__file__).with_name("fsdp_balance_ranks.py"), [str(path), str(tmp_path), json.dumps(layout)], 2)

    actual = json.loads((tmp_path / "result.json").read_text())
    assert actual["loss/aux"] == pytest.approx(result["loss/aux"], rel=1e-5)
    assert actual["grad_norm"] == pytest.approx(result["grad_norm"], rel=1e-5)
    assert distance(load_file(tmp_path / "gradients.safetensors"), gradients, norm_of(gradients)) < 1e-5


def test_auxiliary_loss_disabled_in_config_is_not_reported(tmp_path):
    for settings in ({}, {"output_router_logits": True, "router_aux_loss_coef": 0.0}):
        result, _, _ = step_of(make_family(tmp_path / str(len(settings)), "qwen3_moe", **settings))
        assert "loss/aux" not in result


def test_auxiliary_loss_without_router_logits_is_rejected(tmp_path, monkeypatch):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeModel

    path = str(make_family(tmp_path, "qwen3_moe", **ENABLED))
    with pytest.raises(ConfigError, match=r"compile=true.*output_router_logits"):
        make_engine(path, compile=True)
    monkeypatch.setattr(Qwen3MoeModel, "_can_record_outputs", {})
    with pytest.raises(ModelError, match="output_router_logits to false"):
        make_engine(path)
