"""The order in which rows come: a permutation for each epoch, dealt out over shards."""

from __future__ import annotations

import random
from dataclasses import dataclass

from rl_contracts.config import require


@dataclass(frozen=True)
class EpochOrder:
    """Which rows a shard sees in which epoch, as a pure function.

    The rows of an epoch are permuted by (seed, epoch) and dealt like cards: shard s of S takes places s, s + S, ... So
    every row comes exactly once per epoch over all shards. Where the number of rows does not divide, the first
    shards have one row more; nothing is dropped or repeated to even that out.
    """

    rows: int
    """Rows in the data set, at least 1 per shard."""
    seed: int = 0
    """Together with the epoch, seeds the permutation."""
    shuffle: bool = True
    """False: rows come in the order of the data set in every epoch."""
    num_shards: int = 1
    """Readers that share the rows."""
    shard: int = 0
    """Which of them this is, from 0."""

    def __post_init__(self) -> None:
        require(self.num_shards >= 1, "num_shards", "at least 1", self.num_shards)
        require(0 <= self.shard < self.num_shards, "shard", f"0 to {self.num_shards - 1}", self.shard)
        require(
            self.rows >= self.num_shards,
            "data set",
            f"at least one row for each of {self.num_shards} shards",
            self.rows,
        )

    @property
    def size(self) -> int:
        """Rows of this shard in one epoch."""
        return len(range(self.shard, self.rows, self.num_shards))

    def indices(self, epoch: int) -> list[int]:
        """Row indices of this shard in `epoch`, in order."""
        places = list(range(self.rows))
        if self.shuffle:
            # Sorted by random keys, because of `random` only `random()` promises the same stream in every Python
            # version: a run must resume in its own order after an upgrade.
            stream = random.Random(f"{self.seed}/{epoch}")
            keys = [stream.random() for _ in places]
            places.sort(key=keys.__getitem__)
        return places[self.shard :: self.num_shards]
