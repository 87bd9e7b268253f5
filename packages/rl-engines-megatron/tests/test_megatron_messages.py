"""What ranks say to each other about a checkpoint comes back equal, and nothing else is read."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.distributed.checkpoint.api import _wrap_exception
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo

from rl_contracts.errors import EngineError
from rl_contracts.testing.processes import run_ranks
from rl_engines_megatron.messages import decode, encode

RANKS = Path(__file__).parent / "megatron_pickle_ranks.py"
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.integers() | st.text() | st.tuples(st.integers(), st.text())
NESTED = st.recursive(
    PLAIN | st.builds(slice, st.integers(), st.integers()),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner),
)


@given(NESTED)
def test_nested_values_come_back_equal_and_of_the_same_types(value):
    found = decode(encode(value))
    assert (found, repr(found)) == (value, repr(value))


def test_plans_and_metadata_of_checkpoints_come_back_equal():
    weights = {"a.weight": torch.ones(3, 4, dtype=torch.bfloat16), "step": 3}
    plan = create_default_local_save_plan(weights, is_coordinator=True)
    stored = _StorageInfo("__0_0.distcp", 12, 34)
    sharded = ShardedTensor.from_rank_offsets("w", torch.ones(4, 2), (0, 1, 2), replica_id=(0, 0, 1)).without_data()
    value = [plan, stored, sharded, torch.Size([2, 3]), torch.float8_e4m3fn, torch.strided, {1, 2}]

    assert decode(encode(value)) == value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_tensors_come_back_equal(dtype, shape):
    value = torch.rand(shape).to(dtype)
    found = decode(encode(value))
    assert found.dtype == dtype
    assert torch.equal(found, value)


def test_error_comes_with_its_name_text_and_place():
    try:
        raise OSError("no space left")
    except OSError as error:
        found, stack = decode(encode(_wrap_exception(error)))

    assert str(found) == "OSError: no space left"
    assert stack[0].filename == __file__


@pytest.mark.parametrize("value", [print, object(), EngineError, lambda: 0, Path("/"), torch.nn.Linear(1, 1)])
def test_what_is_no_data_of_a_checkpoint_is_not_told(value):
    with pytest.raises(EngineError, match="would tell the others"):
        encode([value])


@pytest.mark.parametrize(
    "told",
    [
        ["object", "subprocess:Popen", ["args", "id"]],
        ["object", "torch.distributed.checkpoint.filesystem:os"],
        ["object", "torch.distributed.checkpoint.filesystem:FileSystemWriter"],
        ["object", "megatron.core.dist_checkpointing.mapping:no_such"],
        ["object", "megatron.core.dist_checkpointing.never_imported:ShardedTensor"],
        ["enum", "enum:Enum", "A"],
        ["torch", "load"],
        ["call", "print"],
        ["tensor", ["torch", "float32"], [2], "AAAA"],
        [],
    ],
)
def test_what_no_checkpoint_has_is_not_read(told):
    with pytest.raises(EngineError, match="cannot be read"):
        decode(json.dumps(told).encode())


@pytest.mark.parametrize("content", [b"", b"\x80\x04K\x01.", b"[", b"[" * 100_000])
def test_malformed_message_is_not_read(content):
    with pytest.raises(EngineError, match="cannot be read"):
        decode(content)


def test_a_pickle_of_another_rank_is_refused_and_not_run(tmp_path):
    run_ranks(RANKS, [str(tmp_path)], 2)

    assert not (tmp_path / "run").exists()
    assert "cannot be read" in (tmp_path / "refused-0").read_text()
