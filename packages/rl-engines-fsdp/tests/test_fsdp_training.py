import math

import pytest
import torch
from fsdp_toys import (
    EPS,
    loss_fn,
    loss_weight_fn,
    make_batch,
    make_engine,
    make_model,
    weights_of,
)

from rl_contracts.config import OptimizerConfig
from rl_contracts.errors import EngineError


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def one_step(path, batch, **settings):
    engine = make_engine(path, **settings)
    return engine.train_batch(batch, loss_fn, loss_weight_fn), weights_of(engine)


def test_train_batch_equals_one_step_of_plain_torch(model_path):
    from transformers import AutoModelForCausalLM

    batch = make_batch()
    model = AutoModelForCausalLM.from_pretrained(model_path)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.01},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.9, 0.95),
        eps=EPS,
    )
    loss = torch.zeros(())
    for index in range(len(batch)):
        length = int(batch["attention_mask"][index].sum())
        ids = batch["input_ids"][index, :length]
        logits = model(ids[None], use_cache=False).logits[0, :-1] / batch["temperature"][index]
        logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        loss = loss - (logprobs * batch["advantages"][index, 1:length] * batch["loss_mask"][index, 1:length]).sum()
    loss = loss / batch["loss_mask"].sum()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()

    result, weights = one_step(model_path, batch)

    assert result["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert result["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    assert (result["applied"], result["lr"]) == (1.0, 1e-2)
    assert result["tokens"] == batch["attention_mask"].sum()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), atol=1e-5, rtol=1e-5)


def test_train_batch_with_recomputed_activations_equals_plain_step(model_path):
    expected, expected_weights = one_step(model_path, make_batch())

    actual, weights = one_step(model_path, make_batch(), gradient_checkpointing=True)

    assert actual == pytest.approx(expected, rel=1e-5)
    for name, value in expected_weights.items():
        torch.testing.assert_close(weights[name], value, atol=2e-6, rtol=1e-5)


def test_train_batch_in_bfloat16_has_float32_master_weights(model_path):
    expected, _ = one_step(model_path, make_batch())

    actual, weights = one_step(model_path, make_batch(), dtype="bfloat16")

    assert {value.dtype for value in weights.values()} == {torch.float32}
    assert actual["loss"] == pytest.approx(expected["loss"], rel=0.05, abs=0.02)
    assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)


def test_train_batch_decays_matrices_but_neither_norms_nor_biases(tmp_path):
    path = make_model(tmp_path, "Phi")
    engine = make_engine(path, optimizer=OptimizerConfig(lr=0.1, weight_decay=0.5))
    before = weights_of(engine)

    def no_gradient(outputs, packed):
        return outputs.logprobs.sum() * 0.0, {}

    engine.train_batch(make_batch(), no_gradient, loss_weight_fn)

    for name, value in weights_of(engine).items():
        factor = 0.95 if value.ndim > 1 else 1.0
        torch.testing.assert_close(value, before[name] * factor, atol=1e-6, rtol=1e-5)


def test_train_batch_with_constant_loss_has_zero_gradient(model_path):
    engine = make_engine(model_path)

    result = engine.train_batch(make_batch(), lambda outputs, packed: (torch.tensor(3.0), {}), loss_weight_fn)

    assert result["grad_norm"] == 0.0
    assert result["applied"] == 1.0


def test_train_batch_entropy_has_gradient_only_with_entropy_grad(model_path):
    def entropy_only(outputs, packed):
        return -(outputs.entropy * packed["loss_mask"]).sum(), {}

    without_grad = make_engine(model_path).train_batch(make_batch(), entropy_only, loss_weight_fn)
    with_grad = make_engine(model_path, entropy_grad=True).train_batch(make_batch(), entropy_only, loss_weight_fn)

    assert without_grad["grad_norm"] == 0.0
    assert with_grad["grad_norm"] > 0.0
    assert with_grad["loss"] == pytest.approx(without_grad["loss"])


# ---- steps that must not be applied


def exploding(outputs, packed):
    return (outputs.logprobs * math.inf).sum(), {}


def test_train_batch_with_non_finite_gradients_skips_the_step(model_path):
    settings = OptimizerConfig(lr=1e-2, warmup_steps=4)
    engine = make_engine(model_path, optimizer=settings)
    before = weights_of(engine)

    skipped = engine.train_batch(make_batch(), exploding, loss_weight_fn)

    assert skipped["applied"] == 0.0
    assert all(torch.equal(value, before[name]) for name, value in weights_of(engine).items())
    after = engine.train_batch(make_batch(), loss_fn, loss_weight_fn)
    assert (after["applied"], after["lr"]) == (1.0, 1e-2 / 4)


def test_train_batch_without_optimizer_raises_but_forward_works(model_path):
    engine = make_engine(model_path, optimizer=None)

    assert engine.forward(make_batch(), lambda outputs, packed: outputs.logprobs).isfinite().all()
    with pytest.raises(EngineError, match="optimizer is None"):
        engine.train_batch(make_batch(), loss_fn, loss_weight_fn)


def test_train_batch_with_statistic_named_like_a_result_raises(model_path):
    def shadowing(outputs, packed):
        return outputs.logprobs.sum(), {"lr": (torch.ones(()), torch.ones(()))}

    with pytest.raises(EngineError, match="'lr'"):
        make_engine(model_path).train_batch(make_batch(), shadowing, loss_weight_fn)


# ---- evaluation, statistics, schedule


def test_eval_batch_statistic_with_zero_denominator_is_nan(model_path):
    def empty(outputs, packed):
        return outputs.logprobs.sum(), {"empty": (torch.zeros(()), torch.zeros(()))}

    assert math.isnan(make_engine(model_path).eval_batch(make_batch(), empty, loss_weight_fn)["empty"])


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, *(1 - 0.9 * k / 6 for k in range(6))]),
        ("cosine", [0.25, 0.5, 0.75, 1.0, *(0.1 + 0.45 * (1 + math.cos(math.pi * k / 6)) for k in range(6))]),
    ],
)
def test_learning_rate_warms_up_then_follows_its_schedule_to_the_last_step(schedule, expected):
    least = 0.0 if schedule == "constant" else 0.1
    config = OptimizerConfig(lr=1.0, schedule=schedule, warmup_steps=4, min_lr_ratio=least)

    rates = [config.rate(step, 10) for step in range(10)]

    assert rates == pytest.approx(expected)
    assert config.rate(50, 10) == pytest.approx(least or 1.0)


def test_learning_rate_without_warmup_starts_at_the_peak():
    for schedule in ("linear", "cosine"):
        config = OptimizerConfig(lr=2.0, schedule=schedule)

        assert config.rate(0, 5) == config.rate(0, 1) == 2.0


@pytest.mark.parametrize(
    ("warmup", "steps", "expected"),
    [
        (2, 10, [0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]),
        (0.2, 10, [0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]),
        (10, 5, [0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 2, [1.0, 0.5]),
    ],
)
def test_linear_learning_rate_equals_torchtitan_values(warmup, steps, expected):
    config = OptimizerConfig(lr=1.0, schedule="linear", warmup_steps=warmup)

    assert [config.rate(step, steps) for step in range(steps)] == pytest.approx(expected)
