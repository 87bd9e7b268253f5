"""Ranks of a train engine, and the few collectives that code outside the engine needs.

All of them run on the host (gloo) and carry raw tensors or JSON, never a pickle. With one rank they return at once and
need no process group.
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
    """Which rank this is, of how many, and where its model lives."""

    rank: int = 0
    """Global rank."""
    world_size: int = 1
    """Ranks of this engine."""
    dp_rank: int = 0
    """Which data-parallel replica this rank belongs to."""
    dp_size: int = 1
    """Data-parallel replicas; each sees other rows."""
    is_dp_leader: bool = True
    """Whether this rank speaks for its replica (its other ranks hold shards of the same rows)."""
    device: str = "cpu"
    """Torch device of the model on this rank."""
    host_group: dist.ProcessGroup | None = None
    """gloo group of all ranks; None with one rank."""
    dp_host_group: dist.ProcessGroup | None = None
    """gloo group of the ranks that hold the same shard of each replica; None with one replica."""
    store: dist.Store | None = None
    """Keys and values of all ranks, for threads beside the one that takes part in collectives; None with one rank."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0: it writes files and talks to servers for all."""
        return self.rank == 0

    def release_groups(self) -> None:
        """Let go of the groups, so that their threads end; a further collective raises an `EngineError`."""
        gone: Any = _Left()
        self.host_group = self.host_group and gone
        self.dp_host_group = self.dp_host_group and gone

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather_json(None)

    def sum_over_replicas(self, values: torch.Tensor) -> torch.Tensor:
        """Element-wise sum of a CPU tensor over data-parallel replicas; a new tensor."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max_over_replicas(self, values: torch.Tensor) -> torch.Tensor:
        """Element-wise maximum of a CPU tensor over data-parallel replicas; a new tensor."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        values = values.clone()
        if self.dp_host_group is not None:
            dist.all_reduce(values, op=op, group=self.dp_host_group)
        return values

    def gather_tensors(
        self, tensors: dict[str, torch.Tensor], all_ranks: bool = False
    ) -> list[dict[str, torch.Tensor]]:
        """Named CPU tensors of every data-parallel replica, in order of dp_rank; shapes may differ.

        Args:
            tensors: this rank's.
            all_ranks: gather from every rank instead, in order of rank.
        """
        group = self.host_group if all_ranks else self.dp_host_group
        if group is None:
            return [tensors]
        # copies, because safetensors refuses tensors that share memory
        own = {k: v.clone(memory_format=torch.contiguous_format) for k, v in tensors.items()}
        return [load(part) for part in _gather_bytes(save(own), group)]

    def gather_json(self, value: Any, replicas: bool = False) -> list[Any]:
        """Every rank's JSON value, in order of rank.

        Args:
            value: this rank's.
            replicas: gather from every data-parallel replica instead, in order of dp_rank.
        """
        group = self.dp_host_group if replicas else self.host_group
        if group is None:
            return [value]
        return [json.loads(part) for part in _gather_bytes(json.dumps(value).encode(), group)]

    def gather_bytes(self, local: bytes) -> list[bytes]:
        """Every rank's bytes, in order of rank; the lengths may differ."""
        return [local] if self.host_group is None else _gather_bytes(local, self.host_group)

    def exchange(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Send each rank its part of the rows of a CPU tensor [n, ...], and get the parts that the others send.

        Args:
            sent: rows for each rank, in order of rank; n in all.
            received: rows that come from each rank; m in all.

        Returns:
            [m, ...], in order of the ranks from which they come.
        """
        if self.host_group is None:
            return rows
        out = rows.new_empty(sum(received), *rows.shape[1:])
        with rank_lost_error(self.host_group):
            dist.all_to_all_single(out, rows.contiguous(), received, sent, group=self.host_group)
        return out

    def broadcast_json(self, value: Any) -> Any:
        """Rank 0's JSON value, on every rank."""
        if self.host_group is None:
            return value
        payload = json.dumps(value).encode() if self.is_main else b""
        return json.loads(_gather_bytes(payload, self.host_group)[0])

    def agree(self, error: BaseException | None, doing: str) -> None:
        """Meet after something that may fail on one rank only, so that no other waits in a collective for it.

        Raises:
            EngineError: on every rank, if `error` is given on any: names the ranks and their errors, and says whether
                they are the user's fault. Where this rank's own failed, it is the cause.
        """
        if self.host_group is None and error is not None:
            raise error
        note = None if error is None else (f"{type(error).__name__}: {error}", is_user_error(error))
        failed = [(f"rank {rank}: {each[0]}", each[1]) for rank, each in enumerate(self.gather_json(note)) if each]
        if failed:
            texts = "; ".join(text for text, _ in failed)
            raised = EngineError(f"{doing} failed on {len(failed)} of {self.world_size} ranks. {texts}")
            raised.user_error = any(users for _, users in failed)
            raise raised from error

    @contextmanager
    def agree_on_errors(self, doing: str) -> Iterator[None]:
        """A block whose error, on whichever rank it arises, is raised on all of them at its end; see `agree`."""
        error: Exception | None = None
        try:
            yield
        except Exception as failure:  # noqa: BLE001 - handed to every rank by agree, which raises it
            error = failure
        self.agree(error, doing)


class _Left:
    """Stands where a group was."""

    def __getattr__(self, name: str) -> Any:
        raise EngineError("the ranks' process group is gone: their engine was destroyed.")


def _gather_bytes(local: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Every rank's bytes, in order of group rank.

    Raises:
        EngineError: a rank is lost.
    """
    with rank_lost_error(group):
        return _exchange(local, group)


@contextmanager
def rank_lost_error(group: dist.ProcessGroup) -> Iterator[None]:
    """A collective, whose failure becomes an `EngineError`."""
    try:
        yield
    except RuntimeError as error:
        cause = str(error).splitlines()[0]
        raise EngineError(
            f"an exchange between {dist.get_world_size(group)} ranks failed: another rank ended, or did not come before"
            f" the group's timeout ({cause}). The log of that rank has the reason."
        ) from error


def _exchange(local: bytes, group: dist.ProcessGroup) -> list[bytes]:
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    size = torch.tensor([len(local)], dtype=torch.int64)
    found = [torch.zeros_like(size) for _ in range(world)]
    dist.all_gather(found, size, group=group)
    sizes = [int(n) for n in found]
    longest = max(sizes)
    if longest == 0:
        return [b""] * world
    spread = 2 * sum(sizes) > longest * world
    # where a few ranks have nearly all, the others' parts would be padded to that length on every rank
    parts = [torch.zeros(longest if spread else n, dtype=torch.uint8) for n in sizes]
    own = parts[rank].clone()
    own[: len(local)] = torch.frombuffer(bytearray(local), dtype=torch.uint8) if local else own[:0]
    if spread:
        dist.all_gather(parts, own, group=group)
    else:
        parts[rank] = own
        for source in (source for source, n in enumerate(sizes) if n):
            dist.broadcast(parts[source], group=group, group_src=source)
    return [part[:n].numpy().tobytes() for part, n in zip(parts, sizes, strict=True)]
