"""Interrupted at any step and resumed from a saved state, training on fixed data continues bit for bit on a CPU."""

import pytest
import torch
from fsdp_toys import EPS, logprobs_of, loss_fn, loss_weight_fn, make_batch, make_engine, make_model, weights_of

from rl_contracts.config import MicroBatchConfig, OptimizerConfig
from rl_contracts.data import FinetuneSpec, SaveLoadMeta
from rl_contracts.errors import EngineError
from rl_engines_fsdp import FSDPEngine, FSDPEngineConfig

STEPS = 6
SETTINGS = OptimizerConfig(lr=1e-2, eps=EPS, schedule="cosine", warmup_steps=2, min_lr_ratio=0.1, max_grad_norm=0.5)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def noisy_loss(outputs, packed):
    """Draws from torch's generator, as dropout or sampled rows would; explodes in the step before the last."""
    loss, stats = loss_fn(outputs, packed)
    noise = 1 + 0.1 * torch.randn(outputs.logprobs.shape)
    exploding = torch.inf if bool(packed["exploding"].any()) else 1.0
    return loss + (outputs.logprobs * noise * packed["loss_mask"]).sum() * exploding, stats


def batch_of(step):
    batch = make_batch(seed=step)
    batch["exploding"] = torch.full((len(batch),), step == STEPS - 2)
    return batch


def train(engine, steps):
    results = []
    for step in steps:
        results.append(engine.train_batch(batch_of(step), noisy_loss, loss_weight_fn))
        engine.version += int(results[-1]["applied"])
    return results


def everything(engine):
    """All that the next step depends on."""
    moments = {
        f"{name}.{key}": value.clone()
        for name, parameter in engine._model.own_parameters()
        for key, value in engine._optimizer.state[parameter].items()
    }
    counters = torch.tensor([engine.version, engine._steps, engine._skipped])
    return weights_of(engine) | moments | {"random": torch.get_rng_state(), "counters": counters}


@pytest.fixture(scope="module")
def uninterrupted(model_path, tmp_path_factory):
    """Results of each step, all that is there at the end, and a state saved before each step."""
    states = tmp_path_factory.mktemp("states")
    engine = make_engine(model_path, micro_batch=40, total_steps=STEPS, optimizer=SETTINGS)
    results = []
    for step in range(STEPS):
        engine.save(SaveLoadMeta(str(states / str(step)), kind="state"))
        results += train(engine, [step])
    return results, everything(engine), states


@pytest.mark.slow
@pytest.mark.parametrize("interrupted", range(STEPS))
def test_run_resumed_before_any_step_ends_with_the_same_bits(interrupted, model_path, uninterrupted):
    results, end, states = uninterrupted
    torch.manual_seed(1234 + interrupted)  # another process has another random state
    engine = FSDPEngine(FSDPEngineConfig())
    engine.initialize(FinetuneSpec(model_path, STEPS, 77, SETTINGS, MicroBatchConfig(40), device="cpu"))

    engine.load(SaveLoadMeta(str(states / str(interrupted)), kind="state"))
    found = train(engine, range(interrupted, STEPS))

    assert repr(found) == repr(results[interrupted:])  # the skipped step's norm is not a number
    assert [result["applied"] for result in results] == [1.0] * (STEPS - 2) + [0.0, 1.0]
    there = everything(engine)
    assert there.keys() == end.keys()
    assert [name for name, value in end.items() if not torch.equal(there[name], value)] == []


@pytest.mark.slow
def test_resumed_run_without_its_random_state_is_noticed(model_path, uninterrupted):
    results, _, states = uninterrupted
    engine = make_engine(model_path, micro_batch=40, total_steps=STEPS, optimizer=SETTINGS)
    engine.load(SaveLoadMeta(str(states / "1"), kind="state"))
    torch.manual_seed(5)

    assert repr(train(engine, range(1, STEPS))) != repr(results[1:])


def test_limit_of_skipped_steps_counts_on_after_a_resume(model_path, tmp_path):
    settings = OptimizerConfig(max_skipped_steps=2)
    engine = make_engine(model_path, optimizer=settings)
    exploding = batch_of(STEPS - 2)
    for _ in range(2):
        assert engine.train_batch(exploding, noisy_loss, loss_weight_fn)["applied"] == 0.0
    engine.save(SaveLoadMeta(str(tmp_path / "state"), kind="state"))

    other = make_engine(model_path, optimizer=settings)
    other.load(SaveLoadMeta(str(tmp_path / "state"), kind="state"))

    with pytest.raises(EngineError, match="3 consecutive steps"):
        other.train_batch(exploding, noisy_loss, loss_weight_fn)


# ---- steps that cannot be applied


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_loss_that_is_not_finite_with_finite_gradients_skips_the_step(value, model_path):
    engine = make_engine(model_path)
    before = weights_of(engine)

    result = engine.train_batch(
        make_batch(), lambda outputs, packed: (outputs.logprobs.sum() + value, {}), loss_weight_fn
    )

    assert result["applied"] == 0.0
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(engine).items())


# ---- what a forward without gradient leaves behind


@pytest.mark.parametrize("reshard", [True, False])
def test_state_saved_after_a_forward_holds_the_moments_and_weights_of_every_layer(reshard, model_path, tmp_path):
    settings = {"dtype": "bfloat16", "reshard_after_forward": reshard, "optimizer": SETTINGS}
    engine, batch, state = make_engine(model_path, **settings), make_batch(), SaveLoadMeta(str(tmp_path / "s"), "state")
    engine.train_batch(batch, loss_fn, loss_weight_fn)
    expected = everything(engine)
    engine.forward(batch, logprobs_of)
    engine.save(state)

    other = make_engine(model_path, **settings)
    other.load(state)

    found = everything(other)
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []
    assert all(found[name].any() for name in found if name.endswith("exp_avg_sq"))
    results = [each.train_batch(make_batch(seed=1), loss_fn, loss_weight_fn) for each in (engine, other)]
    assert results[0] == results[1]
