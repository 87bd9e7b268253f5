"""Loss, gradients and SGD-updated weights do not depend on how one replayed batch is split."""

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
"""Of gradients and weights, relative to the gradient's norm; of losses relative."""
RATE = 0.1
PLAIN = OptimizerConfig(lr=RATE, max_grad_norm=0.0)
ROWS = 10


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "Gemma2")


def sgd_step(path, batch, **more):
    """Results, gradients, and weights after one step of SGD."""
    engine = make_engine(path, optimizer=PLAIN, **more)
    gradients = record_gradients(engine)
    result = engine.train_batch(batch, loss_fn, loss_weight_fn)
    return result, gradients, weights_of(engine)


@pytest.fixture(scope="module")
def replayed(model_path):
    """One step over the batch in a single micro-batch."""
    return sgd_step(model_path, make_batch(ROWS), micro_batch=10_000)


def assert_same_step(found, expected):
    result, gradients, weights = expected
    norm = result["grad_norm"]
    assert found[0] == pytest.approx(result, rel=TOLERANCE)
    assert distance(found[1], gradients, norm) < TOLERANCE
    assert distance(found[2], weights, RATE * norm) < TOLERANCE


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    order=st.permutations(range(ROWS)),
    micro_batch=st.integers(19, 120),
    padding=st.integers(0, 30),
    max_logits=st.sampled_from([61, 61 * 7, 200, 0]),
)
def test_step_does_not_depend_on_order_micro_batches_padding_or_blocks(
    order, micro_batch, padding, max_logits, model_path, replayed
):
    batch = select(make_batch(ROWS), order)
    batch = pad_to(batch, batch["input_ids"].shape[1] + padding)

    found = sgd_step(model_path, batch, micro_batch=micro_batch, max_logits=max_logits)

    assert_same_step(found, replayed)


@pytest.mark.slow
def test_step_that_counts_a_micro_batch_twice_is_noticed(model_path, replayed):
    batch = make_batch(ROWS)

    found = sgd_step(model_path, select(batch, [*range(ROWS), int(lengths(batch).argmin())]), micro_batch=40)

    with pytest.raises(AssertionError):
        assert_same_step(found, replayed)


@pytest.mark.parametrize("family", ATTENTION_FAMILIES)
def test_gradients_of_packed_rows_are_those_of_transformers_one_row_at_a_time(family, tmp_path):
    from transformers import AutoModelForCausalLM

    path, batch = make_model(tmp_path, family), make_batch()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    for row in range(len(batch)):
        length = int(batch["attention_mask"][row].sum())
        ids = batch["input_ids"][row, :length]
        logits = model(ids[None], use_cache=False).logits[0, :-1] / batch["temperature"][row]
        logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        weight = batch["advantages"][row, 1:length] * batch["loss_mask"][row, 1:length]
        (-(logprobs * weight).sum() / batch["loss_mask"].sum()).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    norm = sum(float(gradient.square().sum()) for gradient in expected.values()) ** 0.5

    _, gradients, _ = sgd_step(path, batch, micro_batch=10_000)

    assert distance(gradients, expected, norm) < TOLERANCE


# ---- two ranks

SPLITS = {
    "every other row": [list(range(0, ROWS, 2)), list(range(1, ROWS, 2))],
    "halves": [list(range(5)), list(range(5, ROWS))],
    "one short row on rank 0": [[1], [0, *range(2, ROWS)]],
    "all rows on rank 1": [[], list(range(ROWS))],
    "backwards": [[9, 7, 5], [8, 6, 4, 3, 2, 1, 0]],
}
"""Rows of each rank. Rows are in groups of two by id, which most of these part."""


@pytest.fixture(scope="module")
def two_ranks(model_path, tmp_path_factory):
    out = tmp_path_factory.mktemp("splits")
    run_ranks(Path(__file__).with_name("fsdp_split_ranks.py"), [model_path, str(out), json.dumps(SPLITS)], 2)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch", [19, 45])
@pytest.mark.parametrize("split", SPLITS)
def test_step_on_two_ranks_is_that_of_one_however_rows_lie(split, micro_batch, two_ranks, replayed):
    for rank in range(2):
        stem = f"{split}-{micro_batch}-{rank}"
        result = json.loads((two_ranks / f"{stem}.json").read_text())
        gradients = load_file(two_ranks / f"{stem}-gradients.safetensors")
        weights = load_file(two_ranks / f"{stem}-weights.safetensors")
        assert_same_step((result, gradients, weights), replayed)


@pytest.mark.slow
def test_step_on_two_ranks_with_nothing_to_learn_on_one_is_that_of_one(model_path, two_ranks):
    batch = make_batch(ROWS)
    batch["loss_mask"][: ROWS // 2] = False
    expected = sgd_step(model_path, batch, micro_batch=10_000)

    for rank in range(2):
        result = json.loads((two_ranks / f"masked-{rank}.json").read_text())
        gradients = load_file(two_ranks / f"masked-{rank}-gradients.safetensors")
        weights = load_file(two_ranks / f"masked-{rank}-weights.safetensors")
        assert_same_step((result, gradients, weights), expected)


def test_splits_cover_every_row_once():
    for shares in SPLITS.values():
        assert sorted(row for share in shares for row in share) == list(range(ROWS))
