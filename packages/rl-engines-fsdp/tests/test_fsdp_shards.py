"""Saving and loading of tensors with inner tensors, such as 8-bit moments, with equal and different shards."""

import pytest
import torch
from torchao.optim.subclass_8bit import OptimState8bit

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.errors import ModelError
from rl_engines_fsdp.checkpoint.shards import HostCopies, Shard, ShardReader, shards_of, write_shards

SHAPE = (8, 512)


def eight_bits(num_rows=SHAPE[0], seed=0):
    state = OptimState8bit.zeros((num_rows, SHAPE[1]))
    return state.copy_(torch.randn(num_rows, SHAPE[1], generator=torch.Generator().manual_seed(seed)))


@pytest.fixture
def halves(tmp_path):
    """Return the shards of two ranks, and the directory that they were written to."""
    halves_of_ranks = [eight_bits(4, seed) for seed in (1, 2)]
    for rank, half in enumerate(halves_of_ranks):
        unplaced = shards_of({"m": half}, ParallelContext())
        placed = {name: Shard(shard.tensor, (4 * rank, 0), SHAPE) for name, shard in unplaced.items()}
        write_shards(HostCopies().of(placed), tmp_path, rank)
    return halves_of_ranks, tmp_path


def test_fill_with_equal_shards_is_bitwise_equal(tmp_path):
    state = eight_bits()
    write_shards(shards_of({"m": state}, ParallelContext()), tmp_path, 0)
    actual = OptimState8bit.zeros(SHAPE)

    reader = ShardReader(tmp_path)
    assert reader.names == {"m"}
    reader.fill({"m": actual})

    assert torch.equal(actual.codes, state.codes)
    assert torch.equal(actual.scale, state.scale)


def test_fill_plain_tensor_from_8_bit_shards_dequantizes_exactly(halves):
    saved, path = halves
    actual = torch.full(SHAPE, torch.nan)

    ShardReader(path).fill({"m": actual})

    assert torch.equal(actual, torch.cat([half.dequantize() for half in saved]))


def test_fill_8_bit_tensor_from_two_shards_requantizes(halves):
    saved, path = halves
    actual, expected = OptimState8bit.zeros(SHAPE), torch.cat([half.dequantize() for half in saved])

    ShardReader(path).fill({"m": actual})

    assert (actual.dequantize() - expected).abs().max() < 0.02 * expected.abs().max()


def test_fill_8_bit_tensor_from_plain_shard_quantizes(tmp_path):
    saved = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    write_shards(shards_of({"m": saved}, ParallelContext()), tmp_path, 0)
    actual, expected = OptimState8bit.zeros(SHAPE), OptimState8bit.zeros(SHAPE).copy_(saved)

    ShardReader(tmp_path).fill({"m": actual})

    assert torch.equal(actual.codes, expected.codes)
    assert torch.equal(actual.scale, expected.scale)


def test_fill_from_unknown_inner_tensors_is_rejected(tmp_path):
    # 4-bit format: two elements per code
    inner_tensors = {"m#codes": torch.zeros(4, 256, dtype=torch.uint8), "m#scale": torch.ones(4)}
    write_shards({name: Shard(tensor, (0, 0), SHAPE) for name, tensor in inner_tensors.items()}, tmp_path, 0)

    with pytest.raises(ValueError, match=r"cannot reshard .*#codes.*#scale"):
        ShardReader(tmp_path).fill({"m": torch.zeros(SHAPE)})


def test_reader_of_directory_without_state_is_rejected(tmp_path):
    (tmp_path / ".metadata").touch()
    with pytest.raises(ModelError, match=r"expected a saved state .* found \['.metadata'\]"):
        ShardReader(tmp_path)
