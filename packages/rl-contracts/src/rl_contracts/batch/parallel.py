"""Ranks of a train engine, and the collectives that code outside the engine needs.

The collectives run on the host (gloo). They send raw tensors or JSON, never pickles. With one rank they return
immediately and need no process group.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save

from rl_contracts.errors import EngineError, is_user_error

__all__ = ["ParallelContext"]


@dataclass
class ParallelContext:
    """Rank, world size and process groups of one rank of a train engine."""

    rank: int = 0
    """Global rank."""
    world_size: int = 1
    """Number of ranks of this engine."""
    dp_rank: int = 0
    """Index of the data-parallel replica that this rank belongs to."""
    dp_size: int = 1
    """Number of data-parallel replicas; each trains on different sequences."""
    is_dp_leader: bool = True
    """True if this is the first rank of its replica. The other ranks of the replica train on the same sequences."""
    device: str = "cpu"
    """Torch device of the model on this rank."""
    host_group: dist.ProcessGroup | None = None
    """gloo process group of all ranks; None with one rank."""
    dp_host_group: dist.ProcessGroup | None = None
    """gloo process group of the ranks that hold the same shard in each replica; None with one replica."""
    store: dist.Store | None = None
    """Key-value store shared by all ranks, for threads that do not run collectives; None with one rank."""

    @property
    def is_main(self) -> bool:
        """True if this is rank 0, which writes files and calls servers for all ranks."""
        return self.rank == 0

    def release_groups(self) -> None:
        """Release the process groups so that their threads end. Later collectives raise an `EngineError`."""
        released: Any = _ReleasedGroup()
        self.host_group = self.host_group and released
        self.dp_host_group = self.dp_host_group and released

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather_json(None)

    def sum_over_replicas(self, values: torch.Tensor) -> torch.Tensor:
        """Return the element-wise sum of a CPU tensor over data-parallel replicas, as a new tensor."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max_over_replicas(self, values: torch.Tensor) -> torch.Tensor:
        """Return the element-wise maximum of a CPU tensor over data-parallel replicas, as a new tensor."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        values = values.clone()
        if self.dp_host_group is not None:
            dist.all_reduce(values, op=op, group=self.dp_host_group)
        return values

    def gather_tensors(
        self, tensors: dict[str, torch.Tensor], all_ranks: bool = False
    ) -> list[dict[str, torch.Tensor]]:
        """Gather the named CPU tensors of all data-parallel replicas, in order of dp_rank. Shapes may differ.

        Args:
            tensors: tensors of this rank.
            all_ranks: gather from all ranks instead, in order of rank.
        """
        group = self.host_group if all_ranks else self.dp_host_group
        if group is None:
            return [tensors]
        # copies, because safetensors rejects tensors that share memory
        local = {k: v.clone(memory_format=torch.contiguous_format) for k, v in tensors.items()}
        return [load(part) for part in _gather_bytes(save(local), group)]

    def gather_json(self, value: Any, replicas: bool = False) -> list[Any]:
        """Gather a JSON value from all ranks, in order of rank.

        Args:
            value: value of this rank.
            replicas: gather from all data-parallel replicas instead, in order of dp_rank.
        """
        group = self.dp_host_group if replicas else self.host_group
        if group is None:
            return [value]
        return [json.loads(part) for part in _gather_bytes(json.dumps(value).encode(), group)]

    def gather_bytes(self, local: bytes) -> list[bytes]:
        """Gather bytes from all ranks, in order of rank. The lengths may differ."""
        return [local] if self.host_group is None else _gather_bytes(local, self.host_group)

    def exchange(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Send each rank its slice of the rows of a CPU tensor [n, ...], and receive the slices of the other ranks.

        Args:
            rows: tensor whose rows are in order of their destination rank.
            sent: number of rows to send to each rank; the sum is n.
            received: number of rows to receive from each rank; the sum is m.

        Returns:
            tensor [m, ...], in order of the source rank.
        """
        if self.host_group is None:
            return rows
        out = rows.new_empty(sum(received), *rows.shape[1:])
        with rank_lost_error(self.host_group):
            dist.all_to_all_single(out, rows.contiguous(), received, sent, group=self.host_group)
        return out

    def broadcast_json(self, value: Any) -> Any:
        """Return the JSON value of rank 0 on all ranks."""
        if self.host_group is None:
            return value
        payload = json.dumps(value).encode() if self.is_main else b""
        return json.loads(_gather_bytes(payload, self.host_group)[0])

    def agree(self, error: BaseException | None, doing: str) -> None:
        """Synchronize after an operation that may fail on one rank, so that no other rank waits for it in a collective.

        Args:
            error: error of this rank, or None.
            doing: name of the operation, which begins the message.

        Raises:
            EngineError: on all ranks, if `error` is not None on any rank. The message lists these ranks and their
                errors. `user_error` is set if any of them is a user error. The local error, if any, is the cause.
        """
        if self.host_group is None and error is not None:
            raise error
        failure = None if error is None else (f"{type(error).__name__}: {error}", is_user_error(error))
        failed = [
            (f"rank {rank}: {entry[0]}", entry[1]) for rank, entry in enumerate(self.gather_json(failure)) if entry
        ]
        if failed:
            descriptions = "; ".join(text for text, _ in failed)
            combined = EngineError(f"{doing} failed on {len(failed)} of {self.world_size} ranks. {descriptions}")
            combined.user_error = any(user_error for _, user_error in failed)
            raise combined from error

    @contextmanager
    def agree_on_errors(self, doing: str) -> Iterator[None]:
        """Run a block and raise its error on all ranks, whichever rank it occurred on; see `agree`."""
        error: Exception | None = None
        try:
            yield
        except Exception as failure:  # noqa: BLE001 - agree raises it on all ranks
            error = failure
        self.agree(error, doing)


class _ReleasedGroup:
    """Placeholder for a released process group."""

    def __getattr__(self, name: str) -> Any:
        raise EngineError("the process group was released because its engine was destroyed; create a new engine.")


def _gather_bytes(local: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Gather bytes from all ranks of a group, in order of group rank.

    Raises:
        EngineError: a rank exited or did not join in time.
    """
    with rank_lost_error(group):
        return _exchange(local, group)


@contextmanager
def rank_lost_error(group: dist.ProcessGroup) -> Iterator[None]:
    """Convert the failure of a collective to an `EngineError`."""
    try:
        yield
    except RuntimeError as error:
        cause = str(error).splitlines()[0]
        raise EngineError(
            f"a collective of {dist.get_world_size(group)} ranks failed: another rank exited, or did not join before"
            f" the process group's timeout ({cause}). Check the log of that rank."
        ) from error


def _exchange(local: bytes, group: dist.ProcessGroup) -> list[bytes]:
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    size = torch.tensor([len(local)], dtype=torch.int64)
    all_sizes = [torch.zeros_like(size) for _ in range(world)]
    dist.all_gather(all_sizes, size, group=group)
    sizes = [int(n) for n in all_sizes]
    longest = max(sizes)
    if longest == 0:
        return [b""] * world
    padded = 2 * sum(sizes) > longest * world
    # all_gather pads all buffers to the longest; broadcast avoids this where a few ranks hold nearly all bytes
    buffers = [torch.zeros(longest if padded else n, dtype=torch.uint8) for n in sizes]
    buffer = buffers[rank].clone()
    buffer[: len(local)] = torch.frombuffer(bytearray(local), dtype=torch.uint8) if local else buffer[:0]
    if padded:
        dist.all_gather(buffers, buffer, group=group)
    else:
        buffers[rank] = buffer
        for source in (source for source, n in enumerate(sizes) if n):
            dist.broadcast(buffers[source], group=group, group_src=source)
    return [buffer_of_rank[:n].numpy().tobytes() for buffer_of_rank, n in zip(buffers, sizes, strict=True)]
