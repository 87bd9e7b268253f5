"""GRPO steps on replayed batches: the Megatron engine matches the FSDP engine in float32."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.batch.trajectory import save_batch
from rl_contracts.config import OptimizerConfig
from rl_contracts.data import FinetuneSpec
from rl_contracts.testing import ReferenceTrainEngine, make_batch, make_tiny_model
from rl_contracts.testing.processes import run_ranks
from rl_engines_fsdp import FSDPEngine, FSDPEngineConfig
from rl_trainers import PolicyActor, replay_batch
from rl_trainers.algorithms.config import AlgorithmConfig

RANKS = Path(__file__).with_name("megatron_replay_ranks.py")
STEPS = 20
LEARNING_RATE = 1024.0
"""Learning rate of the first step, with SGD. A large rate keeps the rounding of weights small next to gradients."""


def initialized(engine, model, optimizer):
    engine.initialize(FinetuneSpec(model, STEPS, optimizer=optimizer, device="cpu"))
    return engine


def first_step(engine, model, batches):
    """Return the gradients of one GRPO step by name, for the parameters of this rank."""
    optimizer = OptimizerConfig(name="sgd", lr=LEARNING_RATE, weight_decay=0.0, max_grad_norm=0.0)
    initialized(engine, model, optimizer)
    before = {name: tensor.clone() for name, tensor in engine.full_parameters()}
    replay_batch(PolicyActor(engine, AlgorithmConfig()), batches / "0.safetensors", 0)
    gradients = {name: (before[name] - tensor) / LEARNING_RATE for name, tensor in engine.full_parameters()}
    engine.destroy()
    return gradients


def take_steps(engine, model, batches):
    """Return the loss and gradient norm of each GRPO step, and the parallel context of the engine."""
    actor = PolicyActor(initialized(engine, model, OptimizerConfig(lr=1e-3, eps=1e-4)), AlgorithmConfig())
    steps = [replay_batch(actor, batches / f"{step}.safetensors", step) for step in range(STEPS)]
    engine.destroy()
    return [[metrics["loss"], metrics["grad_norm"]] for metrics in steps], engine.parallel


@pytest.fixture(scope="module")
def dense_reference(tmp_path_factory):
    """Model, batches, and the results of the FSDP engine."""
    return fsdp_reference(tmp_path_factory.mktemp("replayed"), "qwen3")


@pytest.fixture(scope="module")
def moe_reference(tmp_path_factory):
    """Model, batches and results for a MoE model, whose routing does not depend on rounding."""
    return fsdp_reference(tmp_path_factory.mktemp("experts"), "qwen3_moe")


def fsdp_reference(directory, architecture):
    """Return model, batches, first gradients, and the losses and gradient norms of all steps."""
    model = str(make_tiny_model(directory / "model", architecture, hidden=128, layers=2))
    for step in range(STEPS):
        save_batch(make_batch(16, seed=step).exclude("advantages"), directory / f"{step}.safetensors")
    gradients = first_step(FSDPEngine(FSDPEngineConfig()), model, directory)
    metrics, _ = take_steps(FSDPEngine(FSDPEngineConfig()), model, directory)
    return model, directory, gradients, metrics


@pytest.mark.guarantee(
    "GRPO with Megatron in tensor, pipeline, data or context parallel layout matches FSDP.", area="layout"
)
@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, {"tensor": 2}, {"pipeline": 2}, {"data": 2}, {"context": 2}], ids=str)
def test_grpo_on_replayed_batches_matches_fsdp(dense_reference, tmp_path, layout, record_property):
    compare(dense_reference, tmp_path, layout, record_property)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, marks=pytest.mark.nightly),
        {"data": 2, "expert": 2},
        pytest.param({"data": 4, "expert": 2}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_grpo_of_moe_on_replayed_batches_matches_fsdp(moe_reference, tmp_path, layout, record_property):
    compare(moe_reference, tmp_path, layout, record_property)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", [{}, {"data": 2, "context": 2, "expert": 2, "expert_tensor": 2}], ids=str)
def test_moe_gradients_are_as_close_to_float64_as_those_of_fsdp(moe_reference, tmp_path, layout, record_property):
    """Compare with float64, because context ranks sum in another order and both engines round."""
    model, batches, fsdp_gradients, metrics = moe_reference
    exact = gradients_in_float64(model, batches, tmp_path / "exact")

    gradients = run(moe_reference, tmp_path, layout)

    worst = largest_difference(gradients, exact), largest_difference(fsdp_gradients, exact)
    record_property("largest difference from float64 over the largest entry, megatron and fsdp", worst)
    assert worst[0] < 2 * worst[1] < 1e-4
    compare_metrics(tmp_path, metrics)


class Float64Engine(ReferenceTrainEngine):
    """Reference engine for a float64 model, without rounding of the logits."""

    def _row(self, ids, temperature):
        distribution = (self.model(input_ids=ids[None]).logits[0, :-1] / temperature).log_softmax(-1)
        logprobs = distribution.gather(1, ids[1:, None])[:, 0]
        entropy = -(distribution.exp() * distribution).sum(-1).detach()
        return torch.nn.functional.pad(logprobs, (1, 0)), torch.nn.functional.pad(entropy, (1, 0))


def gradients_in_float64(path, batches, out):
    """Return the gradients of the first step, under their names in a Hugging Face directory."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
    engine = initialized(Float64Engine(model=model), path, OptimizerConfig(lr=0.0, max_grad_norm=0.0))
    replay_batch(PolicyActor(engine, AlgorithmConfig()), batches / "0.safetensors", 0)
    for parameter in model.parameters():
        parameter.data = parameter.grad
    model.save_pretrained(out)
    return load_file(out / "model.safetensors")


def compare(reference, tmp_path, layout, record_property):
    *_, expected, metrics = reference

    worst = largest_difference(run(reference, tmp_path, layout), expected)

    record_property("largest difference of a gradient over its largest entry", worst)
    assert worst < 1e-5
    compare_metrics(tmp_path, metrics)


def run(reference, out, layout):
    """Run the Megatron engine in a layout, write `metrics.json` and return the gradients of the first step by name."""
    model, batches, *_ = reference
    run_ranks(RANKS, [model, str(batches), json.dumps(layout), str(out)], ParallelStrategy(**layout).world_size)
    return {k: v for file in sorted(out.glob("gradients-*.safetensors")) for k, v in load_file(file).items()}


def largest_difference(gradients, expected):
    """Return the largest difference of an entry, relative to the largest entry of its tensor."""
    assert gradients.keys() == expected.keys()
    return max(float((gradients[name] - value).abs().max() / value.abs().max()) for name, value in expected.items())


def compare_metrics(out, expected):
    """Compare the losses and gradient norms of all steps."""
    metrics = torch.tensor(json.loads((out / "metrics.json").read_text()))
    torch.testing.assert_close(metrics[:, 0], torch.tensor(expected)[:, 0], atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(metrics[:, 1], torch.tensor(expected)[:, 1], atol=0, rtol=1e-3)
