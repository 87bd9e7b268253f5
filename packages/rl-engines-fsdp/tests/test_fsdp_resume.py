"""Training that is interrupted at any step and resumed from a saved state is bitwise equal on a CPU."""

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
    """Return a loss with noise from torch's generator, like dropout; it is infinite in the second to last step."""
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


def training_state(engine):
    """Return all state that the next step depends on."""
    moments = {
        f"{name}.{key}": value.clone()
        for name, parameter in engine._model.own_parameters()
        for key, value in engine._optimizer.state[parameter].items()
    }
    counters = torch.tensor([engine.version, engine._steps, engine._skipped])
    return weights_of(engine) | moments | {"random": torch.get_rng_state(), "counters": counters}


@pytest.fixture(scope="module")
def uninterrupted(model_path, tmp_path_factory):
    """Return the results of each step, the final training state, and the directory of states saved before each step."""
    states = tmp_path_factory.mktemp("states")
    engine = make_engine(model_path, micro_batch=40, total_steps=STEPS, optimizer=SETTINGS)
    results = []
    for step in range(STEPS):
        engine.save(SaveLoadMeta(str(states / str(step)), kind="state"))
        results += train(engine, [step])
    return results, training_state(engine), states


@pytest.mark.slow
@pytest.mark.parametrize("interrupted", [0, 2, STEPS - 1])  # the last follows the skipped step
def test_run_resumed_before_any_step_ends_bitwise_equal(interrupted, model_path, uninterrupted):
    results, expected_state, states = uninterrupted
    torch.manual_seed(1234 + interrupted)  # as in a new process
    engine = FSDPEngine(FSDPEngineConfig())
    engine.initialize(FinetuneSpec(model_path, STEPS, 77, SETTINGS, MicroBatchConfig(40), device="cpu"))

    engine.load(SaveLoadMeta(str(states / str(interrupted)), kind="state"))
    actual = train(engine, range(interrupted, STEPS))

    assert repr(actual) == repr(results[interrupted:])  # the gradient norm of the skipped step is nan
    assert [result["applied"] for result in results] == [1.0] * (STEPS - 2) + [0.0, 1.0]
    final_state = training_state(engine)
    assert final_state.keys() == expected_state.keys()
    assert [name for name, value in expected_state.items() if not torch.equal(final_state[name], value)] == []


@pytest.mark.slow
def test_resumed_run_with_other_random_state_differs(model_path, uninterrupted):
    results, _, states = uninterrupted
    engine = make_engine(model_path, micro_batch=40, total_steps=STEPS, optimizer=SETTINGS)
    engine.load(SaveLoadMeta(str(states / "1"), kind="state"))
    torch.manual_seed(5)

    assert repr(train(engine, range(1, STEPS))) != repr(results[1:])


def test_limit_of_skipped_steps_applies_across_a_resume(model_path, tmp_path, monkeypatch):
    monkeypatch.setattr("rl_engines_fsdp.engine.MAX_SKIPPED_STEPS", 2)
    engine = make_engine(model_path)
    exploding = batch_of(STEPS - 2)
    for _ in range(2):
        assert engine.train_batch(exploding, noisy_loss, loss_weight_fn)["applied"] == 0.0
    engine.save(SaveLoadMeta(str(tmp_path / "state"), kind="state"))

    other = make_engine(model_path)
    other.load(SaveLoadMeta(str(tmp_path / "state"), kind="state"))

    with pytest.raises(EngineError, match="3 consecutive steps"):
        other.train_batch(exploding, noisy_loss, loss_weight_fn)


# ---- steps that cannot be applied


def test_non_finite_loss_with_finite_gradients_skips_the_step(model_path):
    engine = make_engine(model_path)
    before = weights_of(engine)

    for value in (torch.inf, torch.nan):
        result = engine.train_batch(
            make_batch(), lambda outputs, packed, value=value: (outputs.logprobs.sum() + value, {}), loss_weight_fn
        )

        assert result["applied"] == 0.0, value
        assert all(torch.equal(weight, before[name]) for name, weight in weights_of(engine).items()), value


# ---- forward passes without gradient


@pytest.mark.parametrize("reshard", [True, False])
def test_save_state_after_forward_has_moments_and_weights_of_all_layers(reshard, model_path, tmp_path):
    settings = {"dtype": "bfloat16", "reshard_after_forward": reshard, "optimizer": SETTINGS}
    engine, batch, state = make_engine(model_path, **settings), make_batch(), SaveLoadMeta(str(tmp_path / "s"), "state")
    engine.train_batch(batch, loss_fn, loss_weight_fn)
    expected = training_state(engine)
    engine.forward(batch, logprobs_of)
    engine.save(state)

    other = make_engine(model_path, **settings)
    other.load(state)

    actual = training_state(other)
    assert [name for name, value in expected.items() if not torch.equal(actual[name], value)] == []
    assert all(actual[name].any() for name in actual if name.endswith("exp_avg_sq"))
    results = [trained.train_batch(make_batch(seed=1), loss_fn, loss_weight_fn) for trained in (engine, other)]
    assert results[0] == results[1]
