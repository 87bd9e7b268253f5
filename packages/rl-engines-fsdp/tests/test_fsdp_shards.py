"""Tensors that are several, such as moments in 8 bits, on disk and back, with the same pieces and with others."""

import pytest
import torch
from torchao.optim.subclass_8bit import OptimState8bit

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.errors import ModelError
from rl_engines_fsdp.checkpoint.shards import HostCopies, Shard, ShardReader, shards_of, write_shards

SHAPE = (8, 512)


def eight_bits(rows=SHAPE[0], seed=0):
    state = OptimState8bit.zeros((rows, SHAPE[1]))
    return state.copy_(torch.randn(rows, SHAPE[1], generator=torch.Generator().manual_seed(seed)))


@pytest.fixture
def halves(tmp_path):
    """What two ranks keep of a tensor, and the directory to which they wrote it."""
    kept = [eight_bits(4, seed) for seed in (1, 2)]
    for rank, half in enumerate(kept):
        alone = shards_of({"m": half}, ParallelContext())
        placed = {name: Shard(shard.tensor, (4 * rank, 0), SHAPE) for name, shard in alone.items()}
        write_shards(HostCopies().of(placed), tmp_path, rank)
    return kept, tmp_path


def test_same_pieces_come_back_bit_for_bit(tmp_path):
    state = eight_bits()
    write_shards(shards_of({"m": state}, ParallelContext()), tmp_path, 0)
    found = OptimState8bit.zeros(SHAPE)

    reader = ShardReader(tmp_path)
    assert reader.names == {"m"}
    reader.fill({"m": found})

    assert torch.equal(found.codes, state.codes)
    assert torch.equal(found.scale, state.scale)


def test_pieces_of_two_ranks_are_read_as_plain_numbers_without_a_loss(halves):
    kept, path = halves
    found = torch.full(SHAPE, torch.nan)

    ShardReader(path).fill({"m": found})

    assert torch.equal(found, torch.cat([half.dequantize() for half in kept]))


def test_pieces_of_two_ranks_are_read_in_8_bits_nearly_as_they_were(halves):
    kept, path = halves
    found, expected = OptimState8bit.zeros(SHAPE), torch.cat([half.dequantize() for half in kept])

    ShardReader(path).fill({"m": found})

    assert (found.dequantize() - expected).abs().max() < 0.02 * expected.abs().max()


def test_plain_numbers_are_read_in_8_bits(tmp_path):
    saved = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    write_shards(shards_of({"m": saved}, ParallelContext()), tmp_path, 0)
    found, expected = OptimState8bit.zeros(SHAPE), OptimState8bit.zeros(SHAPE).copy_(saved)

    ShardReader(tmp_path).fill({"m": found})

    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.scale, expected.scale)


def test_other_parts_are_read_by_the_same_split_alone(tmp_path):
    parts = {"m#codes": torch.zeros(4, 256, dtype=torch.uint8), "m#scale": torch.ones(4)}  # two numbers in a code
    write_shards({name: Shard(tensor, (0, 0), SHAPE) for name, tensor in parts.items()}, tmp_path, 0)

    with pytest.raises(ValueError, match=r"saved in parts .* only the same split into ranks can read"):
        ShardReader(tmp_path).fill({"m": torch.zeros(SHAPE)})


def test_directory_without_a_state_is_refused(tmp_path):
    (tmp_path / ".metadata").touch()
    with pytest.raises(ModelError, match=r"expected a saved state .* found \['.metadata'\]"):
        ShardReader(tmp_path)
