"""Trajectory batches: splitting and joining keep all sequences, and each fault raises an error that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rl_contracts.batch.image_entries import images_of
from rl_contracts.batch.trajectory import (
    SEQUENCE_KEYS,
    TOKEN_KEYS,
    Trajectory,
    concatenate,
    empty,
    from_response,
    lengths,
    load_batch,
    pack,
    pad_to,
    save_batch,
    select,
    stack,
    trim,
    unpack,
    validate,
)
from rl_contracts.data import ModelResponse, StopReason
from rl_contracts.errors import DataError
from rl_contracts.images import Image
from rl_contracts.testing import make_batch

SEQUENCE_FIELDS = {
    "rewards": "reward",
    "prompt_ids": "prompt_id",
    "group_ids": "group_id",
    "episode_ids": "episode_id",
    "temperature": "temperature",
    "truncated": "truncated",
}


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    length = draw(st.integers(1, 12))
    prompt = draw(st.integers(0, length))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    generated = np.arange(length) >= prompt
    return Trajectory(
        input_ids=rng.integers(0, 1000, length),
        loss_mask=generated & (rng.random(length) < 0.7),
        logprobs=np.where(generated, -rng.random(length), 0).astype(np.float32),
        versions=np.where(generated, rng.integers(0, 5, length), -1).astype(np.int32),
        reward=float(np.float32(rng.normal())),
        temperature=float(np.float32(rng.uniform(0.1, 2))),
        truncated=bool(rng.random() < 0.5),
        token_rewards=rng.normal(size=length).astype(np.float32) if draw(st.booleans()) else None,
        prompt_id=int(rng.integers(0, 9)),
        group_id=int(rng.integers(0, 2**40)),
        episode_id=int(rng.integers(0, 9)),
    )


batches = st.lists(trajectories(), min_size=1, max_size=6).map(stack)


def assert_equal(actual: TensorDict, expected: TensorDict) -> None:
    assert set(actual.keys()) == set(expected.keys())
    assert actual.batch_size == expected.batch_size
    for key in list(expected.keys()):
        torch.testing.assert_close(actual[key], expected[key], atol=0, rtol=0, msg=str(key))


# ---- sequences and batches


@given(st.lists(trajectories(), min_size=1, max_size=6))
def test_stack_right_pads_each_trajectory(rows: list[Trajectory]) -> None:
    batch = stack(rows)

    validate(batch)
    assert lengths(batch).tolist() == [len(row) for row in rows]
    assert batch["input_ids"].shape[1] == max(map(len, rows))
    for i, row in enumerate(rows):
        mask = batch["attention_mask"][i]
        for name in ("input_ids", "loss_mask", "logprobs", "versions"):
            assert batch[name][i][mask].tolist() == getattr(row, name).tolist()
            assert set(batch[name][i][~mask].tolist()) <= {-1 if name == "versions" else 0}
        for key, name in SEQUENCE_FIELDS.items():
            assert batch[key][i].item() == getattr(row, name)
        if "token_rewards" in batch:
            expected = np.zeros(len(row)) if row.token_rewards is None else row.token_rewards
            assert batch["token_rewards"][i][mask].tolist() == expected.tolist()
    assert ("token_rewards" in batch) == any(row.token_rewards is not None for row in rows)


def test_stack_and_empty_have_the_declared_keys_and_dtypes() -> None:
    for batch in (stack([]), empty(3), make_batch(2).exclude("advantages")):
        declared = {**TOKEN_KEYS, **SEQUENCE_KEYS}
        assert set(batch.keys()) == set(declared)
        assert {k: str(batch[k].dtype) for k in declared} == {k: f"torch.{d}" for k, d in declared.items()}
        validate(batch)


@given(batches, st.integers(0, 7))
def test_pad_to_then_trim_returns_the_batch(batch: TensorDict, extra: int) -> None:
    width = batch["input_ids"].shape[1]

    wide = pad_to(batch, width + extra)

    validate(wide)
    assert wide["versions"].shape[1] == width + extra
    assert (wide["versions"][:, width:] == -1).all()
    assert_equal(trim(wide), batch)


@given(batches, st.randoms(use_true_random=False))
def test_select_shuffled_and_back_returns_the_batch(batch: TensorDict, random: Any) -> None:
    order = list(range(len(batch)))
    random.shuffle(order)
    back = [order.index(i) for i in range(len(order))]

    shuffled = select(batch, order)

    validate(shuffled)
    assert shuffled["group_ids"].tolist() == batch["group_ids"][order].tolist()
    assert_equal(select(shuffled, torch.tensor(back)), batch)


@given(batches, st.data())
def test_select_parts_then_concatenate_returns_the_batch(batch: TensorDict, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(batch)))
    parts = [select(batch, range(cut)), select(batch, range(cut, len(batch)))]

    assert_equal(trim(concatenate(parts)), batch)


def test_select_no_sequences_keeps_all_keys() -> None:
    batch = make_batch(3)

    for empty_batch in (select(batch, []), batch[:0]):
        assert empty_batch.batch_size == torch.Size([0])
        assert set(empty_batch.keys()) == set(batch.keys())


def test_stack_different_reward_components_raise_data_error() -> None:
    rows = [Trajectory(np.arange(2), np.ones(2, bool), np.zeros(2), np.zeros(2)) for _ in range(2)]
    rows[0].reward_components, rows[1].reward_components = {"right": 1.0}, {"right": 1.0, "form": 0.0}

    with pytest.raises(DataError, match="form"):
        stack(rows)


def test_images_stay_with_their_sequences(tmp_path: Path) -> None:
    def row(length: int, *images: Image) -> Trajectory:
        zeros = np.zeros(length)
        return Trajectory(zeros.astype(int), zeros < 1, zeros.astype("f4"), zeros.astype("i4"), images=images)

    red, blue = Image(b"red", 4, 5), Image(b"blue", 6, 7)
    rows = [(red, blue), (), (blue,)]
    batch = stack([row(3, *rows[0]), row(5), row(2, *rows[2])])
    without = select(batch, [1]).exclude("images")

    validate(batch)
    assert images_of(select(batch, [2, 0])) == [(blue,), (red, blue)]
    assert images_of(pad_to(batch, 9)) == rows
    assert images_of(concatenate([select(batch, [2]), batch[:0], without, batch])) == [(blue,), (), *rows]
    assert pack(select(batch, [2, 1])).images == [(blue,), ()]
    save_batch(batch, tmp_path / "batch.safetensors")
    saved = images_of(load_batch(tmp_path / "batch.safetensors"))
    assert saved == rows
    assert [(image.data, image.width, image.height) for image in saved[2]] == [(b"blue", 6, 7)]
    assert saved[0][1] is saved[2][0]


# ---- packing


@given(batches)
def test_pack_then_unpack_returns_each_entry(batch: TensorDict) -> None:
    packed = pack(batch)

    sizes = lengths(batch)
    assert packed.num_tokens == int(sizes.sum())
    assert packed.num_sequences == len(batch)
    assert packed.max_seqlen == int(sizes.max())
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.cu_seqlens.diff().tolist() == sizes.tolist()
    assert packed.position_ids.tolist() == [t for size in sizes.tolist() for t in range(size)]
    assert packed.sequence_of_token.tolist() == [row for row, size in enumerate(sizes.tolist()) for _ in range(size)]
    mask = batch["attention_mask"]
    for name in packed.tokens:
        assert torch.equal(unpack(packed[name], batch), torch.where(mask, batch[name], 0))
    assert "attention_mask" not in packed
    for name in SEQUENCE_KEYS:
        assert torch.equal(packed[name], batch[name])
        assert torch.equal(unpack(packed.per_token(name), batch)[:, 0], batch[name])
    sums = packed.sequence_sums(packed["logprobs"].double())
    torch.testing.assert_close(sums, batch["logprobs"].double().sum(1))


@given(batches, st.integers(1, 9))
def test_pack_does_not_depend_on_padding(batch: TensorDict, extra: int) -> None:
    narrow, wide = pack(batch), pack(pad_to(batch, batch["input_ids"].shape[1] + extra))

    assert narrow.tokens.keys() == wide.tokens.keys()
    for name in narrow.tokens:
        assert torch.equal(narrow[name], wide[name])
    assert torch.equal(narrow.cu_seqlens, wide.cu_seqlens)


def test_pack_no_sequences_has_no_tokens() -> None:
    packed = pack(empty(4))

    assert (packed.num_tokens, packed.num_sequences, packed.max_seqlen) == (0, 0, 0)
    assert packed.cu_seqlens.tolist() == [0]


def test_packed_unknown_entry_raises_data_error_with_known_entries() -> None:
    with pytest.raises(DataError, match=r"'prox_logprobs'.* \['advantages'"):
        pack(make_batch(2))["prox_logprobs"]


# ---- injected faults


def with_fault(**changes: Any) -> TensorDict:
    """Return a batch of 4 sequences of 6 tokens, with the given changes in sequence 2."""
    batch = make_batch(4, lengths=(6, 6))
    for name, (index, value) in changes.items():
        batch[name][2, index] = value
    return batch


def without(name: str) -> TensorDict:
    return make_batch(4).exclude(name)


def replaced(name: str, value: torch.Tensor) -> TensorDict:
    batch = make_batch(4, lengths=(6, 6))
    batch[name] = value
    return batch


EVERYTHING = slice(None)


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        (without("versions"), r"'versions' is missing.* \['advantages'"),
        (without("input_ids"), "'input_ids' is missing"),
        (without("temperature"), "'temperature' is missing"),
        (replaced("logprobs", torch.zeros(4, 6, dtype=torch.float64)), r"'logprobs'\]: expected float32 \[4, 6\]"),
        (replaced("versions", torch.zeros(4, 7, dtype=torch.int32)), r"expected int32 \[4, 6\], found int32 \[4, 7\]"),
        (replaced("rewards", torch.zeros(4, 6)), r"'rewards'\]: expected float32 \[4\], found float32 \[4, 6\]"),
        (
            with_fault(attention_mask=(EVERYTHING, False), loss_mask=(EVERYTHING, False)),
            r"sequence 2 \(prompt 0, group 0\) is empty",
        ),
        (with_fault(attention_mask=(1, False), loss_mask=(1, False)), "sequence 2 .* right-padded"),
        (with_fault(attention_mask=(0, False), loss_mask=(0, False)), "sequence 2 .* right-padded"),
        (with_fault(attention_mask=(5, False), loss_mask=(5, True)), "sequence 2 .* loss_mask .* padding"),
        (with_fault(loss_mask=(3, True), versions=(3, -1)), r"sequence 2 .*\(versions is -1\)"),
        (with_fault(logprobs=(3, float("nan"))), "sequence 2 .* log-probs .* not finite"),
        (with_fault(logprobs=(0, float("-inf"))), "sequence 2 .* log-probs .* not finite"),
        (
            replaced("temperature", torch.tensor([1.0, 1.0, 0.0, -1.0])),
            r"sequence 2 .* temperature .* not positive and finite; .*: 2\.",
        ),
        (replaced("temperature", torch.tensor([1.0, 1.0, float("nan"), 1.0])), "sequence 2 .* temperature"),
        (replaced("rewards", torch.tensor([0, 0, float("inf"), 0])), "sequence 2 .* reward .* not finite"),
    ],
)
def test_validate_injected_fault_raises_data_error(batch: TensorDict, match: str) -> None:
    with pytest.raises(DataError, match=match):
        validate(batch)


def test_validate_supervised_sequences_need_no_version() -> None:
    batch = with_fault(loss_mask=(3, True), versions=(EVERYTHING, -1))

    validate(batch, generated=False)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: concatenate([]), "at least one batch"),
        (lambda: concatenate([make_batch(2), without("versions")]), r"keys: \['versions'\]"),
        (lambda: pad_to(make_batch(2, lengths=(6, 6)), 5), "width 6.* 5"),
    ],
)
def test_concatenate_and_pad_to_mismatch_raises_data_error(call: Any, match: str) -> None:
    with pytest.raises(DataError, match=match):
        call()


# ---- responses


def response(**changes: Any) -> ModelResponse:
    fields: dict[str, Any] = {
        "input_ids": [5, 6, 7],
        "output_ids": [8, 2],
        "logprobs": [-0.5, -0.25],
        "versions": [3, 4],
        "stop_reason": StopReason.STOP,
    }
    return ModelResponse(**{**fields, **changes})


def test_from_response_trains_on_each_generated_token() -> None:
    row = from_response(response(), reward=1, temperature=0.7, info={"a": 1})

    assert row.input_ids.tolist() == [5, 6, 7, 8, 2]
    assert row.loss_mask.tolist() == [False, False, False, True, True]
    assert row.logprobs.tolist() == [0, 0, 0, -0.5, -0.25]
    assert row.versions.tolist() == [-1, -1, -1, 3, 4]
    assert (row.reward, row.temperature, row.truncated, row.info) == (1.0, 0.7, False, {"a": 1})
    validate(stack([row]))


def test_from_response_greedy_has_temperature_1_and_length_truncates() -> None:
    row = from_response(response(stop_reason=StopReason.LENGTH), reward=0.0, temperature=0.0)

    assert (row.temperature, row.truncated) == (1.0, True)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"logprobs": [-0.5]}, "2 tokens, 1 log-probs, 2 versions"),
        ({"versions": [3, 3, 3]}, "2 tokens, 2 log-probs, 3 versions"),
        ({"output_ids": [], "logprobs": [], "versions": []}, "the response has no generated token"),
    ],
)
def test_from_response_misaligned_or_empty_raises_data_error(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(DataError, match=match):
        from_response(response(**changes), reward=0.0, temperature=1.0)


# ---- files


@given(batch=batches)
@settings(max_examples=20)
def test_save_then_load_returns_the_batch(tmp_path_factory: pytest.TempPathFactory, batch: TensorDict) -> None:
    path = tmp_path_factory.mktemp("saved") / "batch.safetensors"

    save_batch(batch, path)

    assert_equal(load_batch(path), batch)


def test_save_batch_shared_memory_and_views_are_saved(tmp_path: Path) -> None:
    batch = pad_to(make_batch(3), 40)
    batch["prox_logprobs"] = batch["logprobs"]
    batch["advantages"] = torch.zeros(3, 80)[:, ::2]

    save_batch(batch, tmp_path / "b")

    assert_equal(load_batch(tmp_path / "b"), batch)


def test_save_non_tensors_and_load_invalid_files_raise_data_error(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    batch = make_batch(2)
    batch.set_non_tensor("notes", "text")
    with pytest.raises(DataError, match=r"\['notes'\] are not tensors"):
        save_batch(batch, tmp_path / "b")

    (tmp_path / "text").write_text("no tensors here")
    save_file({"weight": torch.zeros(2, 2)}, tmp_path / "model")
    save_file({**make_batch(3), "rewards": torch.zeros(2)}, tmp_path / "uneven")
    save_file({}, tmp_path / "nothing")
    for name, match in [
        ("missing", "cannot be read"),
        ("text", "cannot be read"),
        ("model", "key 'input_ids' is missing"),
        ("uneven", "'rewards': 2"),
        ("nothing", "expected a saved batch"),
    ]:
        with pytest.raises(DataError, match=match):
            load_batch(tmp_path / name)
