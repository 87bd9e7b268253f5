"""Equality across layouts of scalar heads, entropy gradients and the auxiliary loss of experts."""

import json
from pathlib import Path

import pytest
import torch
from megatron_step_ranks import step
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.batch.trajectory import lengths
from rl_contracts.testing import make_batch, make_tiny_model
from rl_contracts.testing.processes import run_ranks

RANKS = Path(__file__).parent / "megatron_step_ranks.py"
TENSOR = ({"tensor": 2}, {"sequence_parallel": True})
EXPERTS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    """Return the path of a model with a scalar head."""
    directory = tmp_path_factory.mktemp("scorer")
    path = make_tiny_model(directory / "language", hidden=128)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
    model.save_pretrained(directory / "scorer")
    return str(directory / "scorer")


def check_gradients(actual, expected):
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (actual[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


def check_layout(model, out, layout, settings, losses, second_model=""):
    """Check that each loss gives the gradients of one process, and without data parallelism also the same outputs."""
    arguments = [model, *map(json.dumps, (layout, settings, losses)), str(out), second_model]
    run_ranks(RANKS, arguments, ParallelStrategy(**layout).world_size)

    for loss in losses:
        expected, values = step(model, {}, {}, loss)
        ranks = [load_file(file) for file in sorted(out.glob(f"{loss}-*.safetensors"))]
        for tensors in ranks:
            if "data" not in layout:
                torch.testing.assert_close(tensors["values"], values, atol=1e-4, rtol=0)
            del tensors["values"]
        check_gradients({name: value for tensors in ranks for name, value in tensors.items()}, expected)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["value", "score"])
def test_scalar_head_matches_transformers_outputs_and_gradients(scorer, tmp_path, head):
    model, batch = AutoModelForSequenceClassification.from_pretrained(scorer), make_batch(8, seed=3)
    expected, loss = torch.zeros(batch["input_ids"].shape), torch.zeros(())
    for row, length in enumerate(lengths(batch).tolist()):
        scores = model.score(model.model(batch["input_ids"][row, None, :length]).last_hidden_state)[0, :, 0]
        values = scores if head == "score" else torch.nn.functional.pad(scores[:-1], (1, 0))
        expected[row, :length] = values.detach()
        loss = loss + (values - 1.0)[batch["loss_mask"][row, :length]].square().sum()
    (loss / batch["loss_mask"].sum()).backward()

    gradients, actual = step(scorer, {}, {}, head, str(tmp_path / "state"))

    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)
    del gradients["loss/aux"]
    check_gradients(gradients, {name: parameter.grad for name, parameter in model.named_parameters()})


@pytest.mark.nightly
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("layout", "settings"),
    [TENSOR, ({"pipeline": 2}, {}), ({"context": 2}, {})],
    ids=["t2", "p2", "c2"],
)
def test_scalar_head_and_its_loaded_state_match_in_each_layout(scorer, tmp_path, layout, settings):
    check_layout(scorer, tmp_path, layout, settings, ["value", "score"])


@pytest.mark.nightly
@pytest.mark.usefixtures("device")
def test_critic_and_moe_model_share_processes_of_context_ranks(scorer, tmp_path):
    moe = make_tiny_model(tmp_path / "moe", "qwen3_moe", hidden=128)

    check_layout(scorer, tmp_path, {"context": 2}, {}, ["value"], str(moe))


@pytest.mark.nightly
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("max_logits", [60, 1000])  # blocks of tokens and of the vocabulary, and of the vocabulary only
def test_entropy_gradient_of_split_vocabulary_in_blocks(tmp_path, max_logits):
    model = make_tiny_model(tmp_path / "model", hidden=128)

    check_layout(str(model), tmp_path, {"tensor": 2}, {"max_logits": max_logits}, ["entropy"])


@pytest.mark.nightly
@pytest.mark.usefixtures("device")
def test_auxiliary_loss_with_expert_parallelism_matches_one_process(tmp_path):
    model = make_tiny_model(tmp_path / "model", "qwen3_moe", hidden=128, **EXPERTS)

    check_layout(str(model), tmp_path, {"data": 2, "expert": 2}, {}, ["balance"])
