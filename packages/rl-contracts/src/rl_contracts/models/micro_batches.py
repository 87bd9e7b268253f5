"""Split a minibatch into packed micro-batches, the same number on every rank."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from rl_contracts.batch.packing import expand, pack_first_fit
from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.batch.trajectory import PackedBatch, lengths, pack, select, units
from rl_contracts.data import FinetuneSpec
from rl_contracts.errors import DataError, EngineError
from rl_contracts.models.step_gate import STEP

if TYPE_CHECKING:
    from tensordict import TensorDict


def plan(batch: TensorDict, spec: FinetuneSpec, parallel: ParallelContext, multiple: int = 1) -> list[list[int]]:
    """Return the sequence indices of each micro-batch (collective).

    A rank with fewer sequences may get empty micro-batches. The sequences of a unit stay together. The limit of tokens
    also limits images, whose placeholders are tokens.

    Args:
        multiple: the number of micro-batches is rounded up to a multiple of this.

    Raises:
        EngineError: a sequence is longer than a micro-batch on any rank, or the ranks of a replica have different
            sequences.
    """
    check_same_rows(batch, parallel)
    tokens, max_tokens, unit_sequences = lengths(batch).tolist(), spec.micro_batch.max_tokens, units(batch)
    sizes = [sum(tokens[index] for index in unit) for unit in unit_sequences]
    with parallel.agree_on_errors("splitting a batch into micro-batches"):
        try:
            bins = pack_first_fit(sizes, max_tokens)
        except DataError as error:
            raise EngineError(str(error)) from error
    if spec.deterministic:
        # the results of a sequence must not depend on its neighbors, and kernels round differently for other shapes
        bins = [[unit] for unit in range(len(sizes))] or [[]]
    count = int(parallel.max_over_replicas(torch.tensor([len(bins)]))[0])
    count = -(-count // multiple) * multiple
    if spec.deterministic:
        bins = bins + [[] for _ in range(count - len(bins))]
    elif count != len(bins):
        bins = pack_first_fit(sizes, max_tokens, at_least=count)
    return expand(bins, unit_sequences)


def packed(batch: TensorDict, bins: list[list[int]]) -> Iterator[tuple[list[int], PackedBatch]]:
    """Yield the sequence indices of each micro-batch and its packed form, on the CPU.

    Raises:
        StopRequestedError: the step was abandoned before one of the micro-batches, see `StepGate`.
    """
    all_indices = list(range(batch.batch_size[0]))
    for indices in bins:
        STEP.begin_micro_batch()
        yield indices, pack(batch if indices == all_indices else select(batch, indices))


def check_same_rows(batch: TensorDict, parallel: ParallelContext) -> None:
    """Check that all ranks of a replica have the same sequences (collective).

    Raises:
        EngineError: on every rank, if the sequences differ.
    """
    if parallel.dp_size == parallel.world_size:
        return
    tokens = batch["input_ids"][batch["attention_mask"]]
    fingerprints = parallel.gather_json([len(batch), zlib.crc32(tokens.numpy().tobytes())])
    size = parallel.world_size // parallel.dp_size
    for first in range(0, parallel.world_size, size):
        mismatch = next((r for r in range(first, first + size) if fingerprints[r] != fingerprints[first]), None)
        if mismatch is not None:
            raise EngineError(
                f"batch: ranks {first} to {first + size - 1} hold one replica and need the same sequences, but ranks "
                f"{first} and {mismatch} have different ones ({fingerprints[first][0]} and "
                f"{fingerprints[mismatch][0]} sequences). Select sequences by parallel.dp_rank, not by rank."
            )
