"""GRPO steps on replayed batches: the Megatron engine finds what the FSDP engine finds, in float32."""

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
RATE = 1024.0
"""Of the first step, of plain SGD: what a weight moves by it is its gradient, and rounding of the weight is little."""


def started(engine, model, optimizer):
    engine.initialize(FinetuneSpec(model, STEPS, optimizer=optimizer, device="cpu"))
    return engine


def first_step(engine, model, batches):
    """The gradients of a GRPO step, by name; those of this rank."""
    optimizer = OptimizerConfig(name="sgd", lr=RATE, weight_decay=0.0, max_grad_norm=0.0)
    started(engine, model, optimizer)
    before = {name: tensor.clone() for name, tensor in engine.full_parameters()}
    replay_batch(PolicyActor(engine, AlgorithmConfig()), batches / "0.safetensors", 0)
    moved = {name: (before[name] - tensor) / RATE for name, tensor in engine.full_parameters()}
    engine.destroy()
    return moved


def take_steps(engine, model, batches):
    """Loss and gradient norm of each GRPO step, and the ranks."""
    actor = PolicyActor(started(engine, model, OptimizerConfig(lr=1e-3, eps=1e-4)), AlgorithmConfig())
    found = [replay_batch(actor, batches / f"{step}.safetensors", step) for step in range(STEPS)]
    engine.destroy()
    return [[figures["loss"], figures["grad_norm"]] for figures in found], engine.parallel


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A model, batches, and what the FSDP engine finds."""
    return found_by_fsdp(tmp_path_factory.mktemp("replayed"), "qwen3")


@pytest.fixture(scope="module")
def given_experts(tmp_path_factory):
    """The same of a mixture of experts, whose routers choose clearly."""
    return found_by_fsdp(tmp_path_factory.mktemp("experts"), "qwen3_moe")


def found_by_fsdp(directory, architecture):
    model = str(make_tiny_model(directory / "model", architecture, hidden=128, layers=2))
    for step in range(STEPS):
        save_batch(make_batch(16, seed=step).exclude("advantages"), directory / f"{step}.safetensors")
    moved = first_step(FSDPEngine(FSDPEngineConfig()), model, directory)
    figures, _ = take_steps(FSDPEngine(FSDPEngineConfig()), model, directory)
    return model, directory, moved, figures


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, {"tensor": 2}, {"pipeline": 2}, {"data": 2}, {"context": 2}], ids=str)
def test_grpo_on_replayed_batches_gives_the_gradients_and_losses_of_fsdp(given, tmp_path, layout, record_property):
    compare(given, tmp_path, layout, record_property)


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
def test_grpo_of_experts_gives_the_gradients_and_losses_of_fsdp(given_experts, tmp_path, layout, record_property):
    compare(given_experts, tmp_path, layout, record_property)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "layout", [{}, {"context": 2}, {"data": 2, "context": 2, "expert": 2, "expert_tensor": 2}], ids=str
)
def test_gradients_of_experts_are_as_near_to_those_in_float64_as_those_of_fsdp(
    given_experts, tmp_path, layout, record_property
):
    """Context ranks add up in another order: what they find differs from FSDP's by the rounding of both."""
    model, batches, by_fsdp, figures = given_experts
    exact = gradients_in_float64(model, batches, tmp_path / "exact")

    moved = run(given_experts, tmp_path, layout)

    worst = largest_difference(moved, exact), largest_difference(by_fsdp, exact)
    record_property("largest difference from float64 over the largest entry, megatron and fsdp", worst)
    assert worst[0] < 2 * worst[1] < 1e-4
    compare_figures(tmp_path, figures)


class InFloat64(ReferenceTrainEngine):
    """The reference engine of a model in float64, without rounding its logits."""

    def _row(self, ids, temperature):
        distribution = (self.model(input_ids=ids[None]).logits[0, :-1] / temperature).log_softmax(-1)
        logprobs = distribution.gather(1, ids[1:, None])[:, 0]
        entropy = -(distribution.exp() * distribution).sum(-1).detach()
        return torch.nn.functional.pad(logprobs, (1, 0)), torch.nn.functional.pad(entropy, (1, 0))


def gradients_in_float64(path, batches, out):
    """Of the first step, by their names in a Hugging Face directory."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
    engine = started(InFloat64(model=model), path, OptimizerConfig(lr=0.0, max_grad_norm=0.0))
    replay_batch(PolicyActor(engine, AlgorithmConfig()), batches / "0.safetensors", 0)
    for parameter in model.parameters():
        parameter.data = parameter.grad
    model.save_pretrained(out)
    return load_file(out / "model.safetensors")


def compare(given, tmp_path, layout, record_property):
    *_, expected, figures = given

    worst = largest_difference(run(given, tmp_path, layout), expected)

    record_property("largest difference of a gradient over its largest entry", worst)
    assert worst < 1e-5
    compare_figures(tmp_path, figures)


def run(given, out, layout):
    """The first step's gradients of the Megatron engine in a layout, by name; figures of all steps lie in `out`."""
    model, batches, *_ = given
    run_ranks(RANKS, [model, str(batches), json.dumps(layout), str(out)], ParallelStrategy(**layout).world_size)
    return {k: v for file in sorted(out.glob("moved-*.safetensors")) for k, v in load_file(file).items()}


def largest_difference(found, expected):
    """Of an entry, over the largest of its tensor."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - value).abs().max() / value.abs().max()) for name, value in expected.items())


def compare_figures(out, figures):
    """Losses and gradient norms of all steps."""
    found = torch.tensor(json.loads((out / "figures.json").read_text()))
    torch.testing.assert_close(found[:, 0], torch.tensor(figures)[:, 0], atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(found[:, 1], torch.tensor(figures)[:, 1], atol=0, rtol=1e-3)
