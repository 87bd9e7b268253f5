"""Data loaders that can be saved at any row and continue exactly there.

The rows are in memory and nothing is read ahead, so the saved position is that of the rows handed out.
"""

from __future__ import annotations

import hashlib
import json
import random
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rl_contracts.config import require
from rl_contracts.errors import ConfigError

Row = dict[str, Any]


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
    def places(self) -> range:
        """Places of this shard in the permutation of an epoch."""
        return range(self.shard, self.rows, self.num_shards)

    @property
    def size(self) -> int:
        """Rows of this shard in one epoch."""
        return len(self.places)

    def indices(self, epoch: int) -> list[int]:
        """Row indices of this shard in `epoch`, in order."""
        return self.permutation(epoch)[self.shard :: self.num_shards]

    def permutation(self, epoch: int) -> list[int]:
        """Row indices of all shards in `epoch`, by place."""
        places = list(range(self.rows))
        if self.shuffle:
            # Sorted by random keys, because of `random` only `random()` promises the same stream in every Python
            # version: a run must resume in its own order after an upgrade.
            stream = random.Random(f"{self.seed}/{epoch}")
            keys = [stream.random() for _ in places]
            places.sort(key=keys.__getitem__)
        return places


class Positions(Iterator[tuple[int, int]]):
    """(epoch, place) without end, or for `epochs`.

    Args:
        places: of every epoch, in order.
        epochs: how many; None for no end.
    """

    def __init__(self, places: range, epochs: int | None) -> None:
        require(epochs is None or epochs >= 0, "epochs", "0 or more, or None for no end", epochs)
        self.places, self.epochs = places, epochs
        self.epoch = self.position = 0
        self.left: list[tuple[int, range]] = []
        """Epochs and places that come before all others: this shard's part of what other shards had left of them."""

    def __next__(self) -> tuple[int, int]:
        if self.left and self._is_due(self.left[0][0]):
            epoch, places = self.left[0]
            self.left[:1] = [(epoch, places[1:])] if len(places) > 1 else []
            return epoch, places[0]
        if not self._is_due(self.epoch):
            raise StopIteration
        here = self.epoch, self.places[self.position]
        self.position += 1
        if self.position == len(self.places):
            self.epoch, self.position = self.epoch + 1, 0
        return here

    def _is_due(self, epoch: int) -> bool:
        return self.epochs is None or epoch < self.epochs

    def state_dict(self) -> dict[str, Any]:
        """The next item's epoch and its position in `places`, and what is left before it, if anything is."""
        left = [[epoch, places.start, places.stop, places.step] for epoch, places in self.left]
        return {"epoch": self.epoch, "position": self.position} | ({"left": left} if left else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position."""
        self.epoch, self.position = state["epoch"], state["position"]
        self.left = [(epoch, range(*places)) for epoch, *places in state.get("left", ())]


class ResumableLoader[T](Iterator[T]):
    """What the loaders share: iteration, state, and refusing a state of other data or another layout."""

    def __init__(self, places: range, epochs: int | None, identity: dict[str, Any]) -> None:
        self._identity = identity
        self._positions = Positions(places, epochs)

    def __next__(self) -> T:
        """The next item; at the end of the last epoch StopIteration, however often it is asked."""
        return self._item(*next(self._positions))

    def __len__(self) -> int:
        """Items in one epoch."""
        return len(self._positions.places)

    @property
    def epoch(self) -> int:
        """Epoch of the next item, from 0."""
        return self._positions.left[0][0] if self._positions.left else self._positions.epoch

    def state_dict(self) -> dict[str, Any]:
        """The position after the last item that was handed out, as JSON values."""
        return {"identity": dict(self._identity), **self._positions.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            ConfigError: the state is of other rows, another seed or another number of shards, whose order is not this
                one's.
        """
        self._check(state, self._identity)
        self._positions.load_state_dict(_position(state))

    def _check(self, state: dict[str, Any], expected: dict[str, Any]) -> None:
        saved = state["identity"]
        for key, value in expected.items():
            if saved.get(key) != value:
                raise ConfigError(
                    f"data loader: expected a state with {key}={value!r}, found {key}={saved.get(key)!r}; resume with "
                    f"the data and settings of the saved run, or start a new one"
                )

    @abstractmethod
    def _item(self, epoch: int, place: int) -> T:
        """The item at `place` of `epoch`."""


class PromptLoader(ResumableLoader[Row]):
    """Single rows for ever, or for `epochs`: the prompts of one data-parallel head.

    Each row is a copy of the data set's with its `epoch`, and with its index as `prompt_id` where it has none.
    Shards share the rows as `EpochOrder` says: once per epoch over all shards, none dropped. Their epochs need not end
    together: where the rows do not divide, a shard with a row more takes longer for each.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        seed: int = 0,
        epochs: int | None = None,
        shuffle: bool = True,
        num_shards: int = 1,
        shard: int = 0,
    ) -> None:
        """Start at the first row of epoch 0.

        Args:
            rows: the data set.
            seed: of the order; the same on all shards.
            epochs: passes over the data; None for no end.
            shuffle: False for the data set's own order.
            num_shards: readers that share the rows.
            shard: which of them this is.

        Raises:
            ConfigError: a setting that cannot work, or fewer rows than shards.
        """
        self._rows = rows
        self._order = EpochOrder(len(rows), seed, shuffle, num_shards, shard)
        self._permutation = lru_cache(maxsize=1)(self._order.permutation)
        identity = _identity(rows, seed, shuffle) | {"num_shards": num_shards, "shard": shard}
        super().__init__(self._order.places, epochs, identity)

    def load_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Continue from the states of all shards, whatever their number was and however far each had come.

        With the same number this is `load_state_dict` of this shard's. With another one the places that are left of the
        epochs that any shard had begun are dealt anew, in order; after them come whole epochs again.

        Raises:
            ConfigError: as `load_state_dict`; or they are not one state of each shard.
        """
        order, count = self._order, len(states)
        by_shard = sorted(states, key=lambda state: int(state["identity"]["shard"]))
        for shard, state in enumerate(by_shard):
            self._check(state, self._identity | {"num_shards": count, "shard": shard})
        if count == order.num_shards:
            self.load_state_dict(by_shard[order.shard])
            return
        positions = [_position(state) for state in by_shard]
        whole, left = _left_over(positions, order.rows)
        mine: dict[int, list[int]] = defaultdict(list)
        for epoch, place in left[order.shard :: order.num_shards]:
            mine[epoch].append(place)
        runs = [(epoch, places) for epoch, some in mine.items() for places in _progressions(some)]
        self._positions.epoch, self._positions.position, self._positions.left = whole, 0, runs

    def _item(self, epoch: int, place: int) -> Row:
        index = self._permutation(epoch)[place]
        return {"prompt_id": index, **self._rows[index], "epoch": epoch}


class BatchLoader(ResumableLoader[list[Row]]):
    """Batches of rows for supervised training: the same batches for every number of shards.

    An epoch's permutation is cut into batches of `batch_size`; a shard takes rows shard, shard + num_shards, ... of
    each. So the batches, and with them the gradients, do not depend on how many processes share the work, and a state
    may be resumed with another number of them. The rows left over at the end of an epoch are dropped (another epoch
    leaves out others), or come as a short batch with `drop_last=False`.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        batch_size: int,
        *,
        seed: int = 0,
        epochs: int | None = None,
        shuffle: bool = True,
        drop_last: bool = True,
        num_shards: int = 1,
        shard: int = 0,
    ) -> None:
        """Start at the first batch of epoch 0.

        Args:
            rows: the data set.
            batch_size: rows in one batch over all shards; a multiple of `num_shards`.
            seed: of the order; the same on all shards.
            epochs: passes over the data; None for no end.
            shuffle: False for the data set's own order.
            drop_last: False for a short batch at the end of an epoch. It must hold a row for every shard.
            num_shards: processes that share each batch.
            shard: which of them this is.

        Raises:
            ConfigError: a setting that cannot work, or too few rows for a batch.
        """
        require(num_shards >= 1, "num_shards", "at least 1", num_shards)
        require(0 <= shard < num_shards, "shard", f"0 to {num_shards - 1}", shard)
        require(
            batch_size >= 1 and batch_size % num_shards == 0,
            "batch_size",
            f"a positive multiple of the {num_shards} shards",
            batch_size,
        )
        full, left = divmod(len(rows), batch_size)
        short = left > 0 and not drop_last
        require(full > 0 or short, "data set", f"at least one batch of {batch_size} rows", len(rows))
        require(
            not short or left >= num_shards,
            "drop_last=False",
            f"a last batch with a row for each of {num_shards} shards",
            left,
        )
        self._rows = rows
        self._indices = lru_cache(maxsize=1)(EpochOrder(len(rows), seed, shuffle).indices)
        self._batch_size = batch_size
        self._share = slice(shard, None, num_shards)
        identity = _identity(rows, seed, shuffle) | {"batch_size": batch_size, "drop_last": drop_last}
        super().__init__(range(full + short), epochs, identity)

    def _item(self, epoch: int, place: int) -> list[Row]:
        start = place * self._batch_size
        batch = self._indices(epoch)[start : start + self._batch_size]
        return [{"prompt_id": i, **self._rows[i], "epoch": epoch} for i in batch[self._share]]


def _left_over(positions: Sequence[dict[str, Any]], rows: int) -> tuple[int, list[tuple[int, int]]]:
    """The first epoch that no shard has begun, and (epoch, place) of all that is left before it, in order.

    Args:
        positions: states of the samplers of all shards.
        rows: of an epoch.
    """
    whole = max(at["epoch"] + (at["position"] > 0) for at in positions)
    left: list[tuple[int, int]] = []
    for shard, at in enumerate(positions):
        left += [(epoch, place) for epoch, *places in at.get("left", ()) for place in range(*places)]
        places, skipped = range(shard, rows, len(positions)), at["position"]
        for epoch in range(at["epoch"], whole):
            left += [(epoch, place) for place in places[skipped:]]
            skipped = 0
    return whole, sorted(left)


def _progressions(numbers: Iterable[int]) -> list[range]:
    """Ascending numbers as ranges, which are few where most numbers are equally far apart."""
    found: list[range] = []
    for number in numbers:
        last = found[-1] if found else range(0)
        if len(last) == 1 or (last and number - last[-1] == last.step):
            found[-1] = range(last[0], number + 1, number - last[-1])
        else:
            found.append(range(number, number + 1))
    return found


def _position(state: dict[str, Any]) -> dict[str, Any]:
    """Return the position in a state of a loader; earlier versions kept the state of torchdata's loader."""
    return state["loader"]["_index_sampler_state"] if "loader" in state else state


def _identity(rows: Sequence[Row], seed: int, shuffle: bool) -> dict[str, Any]:
    """What fixes the order and the rows in it. A few rows stand for all: other data rarely agrees on them."""
    samples = [rows[i] for i in sorted({0, len(rows) // 2, len(rows) - 1})] if len(rows) else []
    text = json.dumps(samples, sort_keys=True, default=lambda value: type(value).__name__)
    fingerprint = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return {"rows": len(rows), "fingerprint": fingerprint, "seed": seed, "shuffle": shuffle}
