"""Loss, gradients and SGD-updated weights do not depend on how a batch is split."""

import itertools
import json
from pathlib import Path

import pytest
from fsdp_toys import (
    ATTENTION_FAMILIES,
    distance,
    loss_fn,
    loss_weight_fn,
    make_batch,
    make_engine,
    make_model,
    record_gradients,
    weights_of,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from rl_contracts.batch.trajectory import lengths, pad_to, select
from rl_contracts.config import OptimizerConfig
from rl_contracts.testing.processes import run_ranks

TOLERANCE = 1e-5
"""Tolerance of gradients and weights relative to the gradient norm, and relative tolerance of losses."""
RATE = 0.1
NO_CLIPPING = OptimizerConfig(lr=RATE, max_grad_norm=0.0)
NUM_SEQUENCES = 10


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "Gemma2")


def sgd_step(path, batch, **more):
    """Take one step of SGD and return results, gradients and updated weights."""
    engine = make_engine(path, optimizer=NO_CLIPPING, **more)
    gradients = record_gradients(engine)
    result = engine.train_batch(batch, loss_fn, loss_weight_fn)
    return result, gradients, weights_of(engine)


@pytest.fixture(scope="module")
def reference_step(model_path):
    """Return the step over the batch in a single micro-batch."""
    return sgd_step(model_path, make_batch(NUM_SEQUENCES), micro_batch=10_000)


def assert_same_step(actual, expected):
    result, gradients, weights = expected
    norm = result["grad_norm"]
    assert actual[0] == pytest.approx(result, rel=TOLERANCE)
    assert distance(actual[1], gradients, norm) < TOLERANCE
    assert distance(actual[2], weights, RATE * norm) < TOLERANCE


@pytest.mark.guarantee(
    "Loss, gradients and statistics of an FSDP step do not depend on sequence order, micro-batch size or padding.",
    area="layout",
)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    order=st.permutations(range(NUM_SEQUENCES)),
    micro_batch=st.integers(19, 120),
    padding=st.integers(0, 30),
    max_logits=st.sampled_from([61, 61 * 7, 200, 0]),
)
def test_step_does_not_depend_on_order_micro_batches_padding_or_blocks(
    order, micro_batch, padding, max_logits, model_path, reference_step
):
    batch = select(make_batch(NUM_SEQUENCES), order)
    batch = pad_to(batch, batch["input_ids"].shape[1] + padding)

    actual = sgd_step(model_path, batch, micro_batch=micro_batch, max_logits=max_logits)

    assert_same_step(actual, reference_step)


@pytest.mark.slow
def test_assert_same_step_detects_duplicated_sequence(model_path, reference_step):
    batch = make_batch(NUM_SEQUENCES)

    actual = sgd_step(model_path, select(batch, [*range(NUM_SEQUENCES), int(lengths(batch).argmin())]), micro_batch=40)

    with pytest.raises(AssertionError):
        assert_same_step(actual, reference_step)


@pytest.mark.parametrize("family", ATTENTION_FAMILIES)
def test_gradients_equal_transformers_per_sequence(family, tmp_path):
    from transformers import AutoModelForCausalLM

    path, batch = make_model(tmp_path, family), make_batch()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    for index in range(len(batch)):
        length = int(batch["attention_mask"][index].sum())
        ids = batch["input_ids"][index, :length]
        logits = model(ids[None], use_cache=False).logits[0, :-1] / batch["temperature"][index]
        logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        weight = batch["advantages"][index, 1:length] * batch["loss_mask"][index, 1:length]
        (-(logprobs * weight).sum() / batch["loss_mask"].sum()).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    norm = sum(float(gradient.square().sum()) for gradient in expected.values()) ** 0.5

    _, gradients, _ = sgd_step(path, batch, micro_batch=10_000)

    assert distance(gradients, expected, norm) < TOLERANCE


# ---- two ranks

SPLITS = {
    "alternating": [list(range(0, NUM_SEQUENCES, 2)), list(range(1, NUM_SEQUENCES, 2))],
    "halves": [list(range(5)), list(range(5, NUM_SEQUENCES))],
    "one short sequence on rank 0": [[1], [0, *range(2, NUM_SEQUENCES)]],
    "all on rank 1": [[], list(range(NUM_SEQUENCES))],
    "backwards": [[9, 7, 5], [8, 6, 4, 3, 2, 1, 0]],
}
"""Sequence indices of each rank. Groups consist of two consecutive sequences, and most splits separate them."""


@pytest.fixture(scope="module")
def two_ranks(device, model_path, tmp_path_factory):
    out = tmp_path_factory.mktemp("splits")
    run_ranks(Path(__file__).with_name("fsdp_split_ranks.py"), [model_path, str(out), json.dumps(SPLITS)], 2)
    return out


@pytest.mark.guarantee(
    "A step on two data-parallel ranks equals a step on one rank, for every split of the batch.", area="layout"
)
@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_step_on_two_ranks_with_any_split_equals_one_rank(split, two_ranks, reference_step):
    for rank, micro_batch in itertools.product(range(2), (19, 45)):
        stem = f"{split}-{micro_batch}-{rank}"
        result = json.loads((two_ranks / f"{stem}.json").read_text())
        gradients = load_file(two_ranks / f"{stem}-gradients.safetensors")
        weights = load_file(two_ranks / f"{stem}-weights.safetensors")
        assert_same_step((result, gradients, weights), reference_step)


@pytest.mark.slow
def test_step_on_two_ranks_with_masked_rank_equals_one_rank(model_path, two_ranks):
    batch = make_batch(NUM_SEQUENCES)
    batch["loss_mask"][: NUM_SEQUENCES // 2] = False
    expected = sgd_step(model_path, batch, micro_batch=10_000)

    for rank in range(2):
        result = json.loads((two_ranks / f"masked-{rank}.json").read_text())
        gradients = load_file(two_ranks / f"masked-{rank}-gradients.safetensors")
        weights = load_file(two_ranks / f"masked-{rank}-weights.safetensors")
        assert_same_step((result, gradients, weights), expected)
