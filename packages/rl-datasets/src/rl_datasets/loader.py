"""Data loaders that can be saved at any example and resume exactly there.

Nothing is prefetched. The saved position is therefore the position of the last returned example.
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
    """Order of the examples of one shard in each epoch, as a pure function.

    The examples of an epoch are permuted by (seed, epoch) and distributed in turn: shard s of S takes places s, s + S,
    ... of the permutation. All shards together yield every example exactly once per epoch. If the number of examples is
    not divisible by S, the first shards have one example more; none is dropped or repeated.
    """

    rows: int
    """Number of examples in the data set, at least 1 per shard."""
    seed: int = 0
    """Seed of the permutations, together with the epoch."""
    shuffle: bool = True
    """Permute the examples; otherwise every epoch has the order of the data set."""
    num_shards: int = 1
    """Number of readers that share the examples."""
    shard: int = 0
    """Index of this shard, from 0."""

    def __post_init__(self) -> None:
        require(self.num_shards >= 1, "num_shards", "at least 1", self.num_shards)
        require(0 <= self.shard < self.num_shards, "shard", f"0 to {self.num_shards - 1}", self.shard)
        require(
            self.rows >= self.num_shards,
            "data set",
            f"at least one example for each of {self.num_shards} shards",
            self.rows,
        )

    @property
    def positions(self) -> range:
        """Places of this shard in the permutation of an epoch."""
        return range(self.shard, self.rows, self.num_shards)

    @property
    def size(self) -> int:
        """Number of examples of this shard in one epoch."""
        return len(self.positions)

    def indices(self, epoch: int) -> list[int]:
        """Return the example indices of this shard in `epoch`, in order."""
        return self.permutation(epoch)[self.shard :: self.num_shards]

    def permutation(self, epoch: int) -> list[int]:
        """Return the example indices of all shards in `epoch`, by place."""
        places = list(range(self.rows))
        if self.shuffle:
            # Sort by random keys: only `random.random()` guarantees the same sequence in every Python version, and a
            # run must resume in the same order after an upgrade.
            stream = random.Random(f"{self.seed}/{epoch}")
            keys = [stream.random() for _ in places]
            places.sort(key=keys.__getitem__)
        return places


class Positions(Iterator[tuple[int, int]]):
    """Iterator over pairs (epoch, place), endless or for `epochs` epochs.

    Args:
        places: places of this shard in every epoch, in order.
        epochs: number of epochs; None for no end.
    """

    def __init__(self, places: range, epochs: int | None) -> None:
        require(epochs is None or epochs >= 0, "epochs", "0 or more, or None for no end", epochs)
        self.places, self.epochs = places, epochs
        self.epoch = self.position = 0
        self.remaining: list[tuple[int, range]] = []
        """Epochs and places to yield first: this shard's part of the unfinished epochs of all former shards."""

    def __next__(self) -> tuple[int, int]:
        if self.remaining and self._is_due(self.remaining[0][0]):
            epoch, places = self.remaining[0]
            self.remaining[:1] = [(epoch, places[1:])] if len(places) > 1 else []
            return epoch, places[0]
        if not self._is_due(self.epoch):
            raise StopIteration
        current = self.epoch, self.places[self.position]
        self.position += 1
        if self.position == len(self.places):
            self.epoch, self.position = self.epoch + 1, 0
        return current

    def _is_due(self, epoch: int) -> bool:
        return self.epochs is None or epoch < self.epochs

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch of the next item, its position in `places`, and the epochs and places to yield before it."""
        remaining = [[epoch, places.start, places.stop, places.step] for epoch, places in self.remaining]
        return {"epoch": self.epoch, "position": self.position} | ({"left": remaining} if remaining else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at a saved position."""
        self.epoch, self.position = state["epoch"], state["position"]
        self.remaining = [(epoch, range(*places)) for epoch, *places in state.get("left", ())]


class ResumableLoader[T](Iterator[T]):
    """Base of the loaders: iteration, saved state, and rejection of a state of other data or another layout."""

    def __init__(self, places: range, epochs: int | None, identity: dict[str, Any]) -> None:
        self._identity = identity
        self._positions = Positions(places, epochs)

    def __next__(self) -> T:
        """Return the next item, or raise StopIteration after the last epoch, also on later calls."""
        return self._item(*next(self._positions))

    def __len__(self) -> int:
        """Return the number of items in one epoch."""
        return len(self._positions.places)

    @property
    def epoch(self) -> int:
        """Epoch of the next item, from 0."""
        return self._positions.remaining[0][0] if self._positions.remaining else self._positions.epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last item returned, as JSON values."""
        return {"identity": dict(self._identity), **self._positions.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at the position of `state`.

        Raises:
            ConfigError: the state has other data, another seed or another number of shards, and so another order.
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
        """Return the item at `place` of `epoch`."""


class PromptLoader(ResumableLoader[Row]):
    """Loader of single examples, endless or for `epochs` epochs: the prompts of one data-parallel leader.

    Each example is a copy with its `epoch`, and with its index as `prompt_id` if it has none. `EpochOrder` distributes
    the examples over the shards: once per epoch over all shards, none dropped. Shards may end an epoch at different
    times, because the first shards have one example more if the number is not divisible.
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
        """Start at the first example of epoch 0.

        Args:
            rows: the data set.
            seed: seed of the order, equal on all shards.
            epochs: number of passes over the data; None for no end.
            shuffle: whether to shuffle; False keeps the order of the data set.
            num_shards: number of readers that share the examples.
            shard: index of this shard.

        Raises:
            ConfigError: a setting is out of range, or there are fewer examples than shards.
        """
        self._rows = rows
        self._order = EpochOrder(len(rows), seed, shuffle, num_shards, shard)
        self._permutation = lru_cache(maxsize=1)(self._order.permutation)
        identity = _identity(rows, seed, shuffle) | {"num_shards": num_shards, "shard": shard}
        super().__init__(self._order.positions, epochs, identity)

    def load_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Resume from the states of all former shards, for any number of them and at any positions.

        With the same number of shards, this loads the state of this shard. With another number, the remaining places of
        all epochs that any shard had begun are distributed again, in order; whole epochs follow.

        Raises:
            ConfigError: as for `load_state_dict`, or there is not exactly one state per shard.
        """
        order, count = self._order, len(states)
        by_shard = sorted(states, key=lambda state: int(state["identity"]["shard"]))
        for shard, state in enumerate(by_shard):
            self._check(state, self._identity | {"num_shards": count, "shard": shard})
        if count == order.num_shards:
            self.load_state_dict(by_shard[order.shard])
            return
        positions = [_position(state) for state in by_shard]
        whole, remaining = _remaining_places(positions, order.rows)
        local_places: dict[int, list[int]] = defaultdict(list)
        for epoch, place in remaining[order.shard :: order.num_shards]:
            local_places[epoch].append(place)
        runs = [
            (epoch, places) for epoch, shard_places in local_places.items() for places in _progressions(shard_places)
        ]
        self._positions.epoch, self._positions.position, self._positions.remaining = whole, 0, runs

    def _item(self, epoch: int, place: int) -> Row:
        index = self._permutation(epoch)[place]
        return {"prompt_id": index, **self._rows[index], "epoch": epoch}


class BatchLoader(ResumableLoader[list[Row]]):
    """Loader of batches of examples for supervised training: the same batches for every number of shards.

    The permutation of an epoch is cut into batches of `batch_size`; a shard takes examples shard, shard + num_shards,
    ... of each batch. So the batches, and therefore the gradients, do not depend on the number of processes. A state
    can be resumed with another number of processes. The remaining examples at the end of an epoch are dropped
    (different examples in each epoch), or form a short batch with `drop_last=False`.
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
            batch_size: number of examples in one batch over all shards; a multiple of `num_shards`.
            seed: seed of the order, equal on all shards.
            epochs: number of passes over the data; None for no end.
            shuffle: whether to shuffle; False keeps the order of the data set.
            drop_last: whether to drop the remaining examples of an epoch; False yields them as a short batch, which
                must have an example for every shard.
            num_shards: number of processes that share each batch.
            shard: index of this shard.

        Raises:
            ConfigError: a setting is out of range, or there are too few examples for a batch.
        """
        require(num_shards >= 1, "num_shards", "at least 1", num_shards)
        require(0 <= shard < num_shards, "shard", f"0 to {num_shards - 1}", shard)
        require(
            batch_size >= 1 and batch_size % num_shards == 0,
            "batch_size",
            f"a positive multiple of the {num_shards} shards",
            batch_size,
        )
        full, remaining = divmod(len(rows), batch_size)
        short = remaining > 0 and not drop_last
        require(full > 0 or short, "data set", f"at least one batch of {batch_size} examples", len(rows))
        require(
            not short or remaining >= num_shards,
            "drop_last=False",
            f"a last batch with an example for each of {num_shards} shards",
            remaining,
        )
        self._rows = rows
        self._indices = lru_cache(maxsize=1)(EpochOrder(len(rows), seed, shuffle).indices)
        self._batch_size = batch_size
        self._shard_slice = slice(shard, None, num_shards)
        identity = _identity(rows, seed, shuffle) | {"batch_size": batch_size, "drop_last": drop_last}
        super().__init__(range(full + short), epochs, identity)

    def _item(self, epoch: int, place: int) -> list[Row]:
        start = place * self._batch_size
        batch = self._indices(epoch)[start : start + self._batch_size]
        return [{"prompt_id": i, **self._rows[i], "epoch": epoch} for i in batch[self._shard_slice]]


def _remaining_places(positions: Sequence[dict[str, Any]], rows: int) -> tuple[int, list[tuple[int, int]]]:
    """Return the first epoch that no shard has begun, and the remaining pairs (epoch, place) before it, in order.

    Args:
        positions: positions of all shards.
        rows: number of examples in an epoch.
    """
    whole = max(state["epoch"] + (state["position"] > 0) for state in positions)
    remaining: list[tuple[int, int]] = []
    for shard, state in enumerate(positions):
        remaining += [(epoch, place) for epoch, *places in state.get("left", ()) for place in range(*places)]
        places, skipped = range(shard, rows, len(positions)), state["position"]
        for epoch in range(state["epoch"], whole):
            remaining += [(epoch, place) for place in places[skipped:]]
            skipped = 0
    return whole, sorted(remaining)


def _progressions(numbers: Iterable[int]) -> list[range]:
    """Return ascending numbers as ranges, one for each run of equally spaced numbers."""
    ranges: list[range] = []
    for number in numbers:
        last = ranges[-1] if ranges else range(0)
        if len(last) == 1 or (last and number - last[-1] == last.step):
            ranges[-1] = range(last[0], number + 1, number - last[-1])
        else:
            ranges.append(range(number, number + 1))
    return ranges


def _position(state: dict[str, Any]) -> dict[str, Any]:
    """Return the position in the state of a loader; earlier versions stored the state of torchdata's loader."""
    return state["loader"]["_index_sampler_state"] if "loader" in state else state


def _identity(rows: Sequence[Row], seed: int, shuffle: bool) -> dict[str, Any]:
    """Return values that identify the data set and its order.

    The fingerprint covers only the first, middle and last example, because different data rarely agrees in all three.
    """
    samples = [rows[i] for i in sorted({0, len(rows) // 2, len(rows) - 1})] if len(rows) else []
    text = json.dumps(samples, sort_keys=True, default=lambda value: type(value).__name__)
    fingerprint = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return {"rows": len(rows), "fingerprint": fingerprint, "seed": seed, "shuffle": shuffle}
