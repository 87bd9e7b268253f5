"""The two ends of a route: what a train engine needs to send weights, and what a server needs to receive them.

Routes differ in what they keep. `shm` and `disk` keep the last two versions for whoever comes to read them; `ipc` keeps
the last one for as long as the trainer lives; `broadcast` keeps nothing, and so needs both ends at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rl_contracts.data import ParamSpec, WeightReceipt, WeightUpdateMeta
from rl_contracts.errors import WeightUpdateError
from rl_contracts.weights.broadcast import BroadcastReceiver, BroadcastSender
from rl_contracts.weights.checksum import copy_with_checksum
from rl_contracts.weights.ipc import IpcMemory, IpcReader, check_device
from rl_contracts.weights.layout import dtype_of, fill, total_size, views
from rl_contracts.weights.mapping import Mappings
from rl_contracts.weights.transport import STORED_ROUTES, open_weights, staged_location, write_weights

if TYPE_CHECKING:
    import torch

    from rl_contracts.engine import Announce

ROUTES = (*STORED_ROUTES, "broadcast", "ipc")
"""Every way for weights to travel."""
MEETING_ROUTES = ("broadcast",)
"""Routes on which sender and receivers must be there at the same time."""

Tensors = Iterable["tuple[str, torch.Tensor]"]


class WeightSender(Protocol):
    """The trainer's end of a route, on the rank that holds whole parameters."""

    def send(
        self, version: int, specs: tuple[ParamSpec, ...], tensors: Tensors, announce: Announce | None = None
    ) -> tuple[WeightUpdateMeta, WeightReceipt]:
        """Put named tensors onto the route, cast to the served dtypes.

        Args:
            tensors: full tensors in the order of `specs`; a generator, so that one at a time exists.
            announce: see `TrainEngine.update_weights`.

        Returns:
            where the receivers find them, and the trainer's receipt.

        Raises:
            WeightUpdateError: names, order or shapes differ from the specs, or a receiver was lost.
            OSError: they cannot be written.
        """
        ...

    def close(self) -> None:
        """Free what the route holds. Safe to call twice."""
        ...


def open_sender(meta: WeightUpdateMeta, device: str = "cpu") -> WeightSender:
    """The trainer's end of `meta.route`.

    Args:
        meta: `location` is the directory in which `shm` and `disk` keep their files, the address to listen on of
            `broadcast` (`tcp://host:port?timeout=seconds`; port 0 takes any), nothing for `ipc`.
        device: where the parameters live.

    Raises:
        WeightUpdateError: no such route, or it cannot work here.
    """
    if meta.route == "broadcast":
        return _BroadcastSender(meta.location, device)
    if meta.route == "ipc":
        return _IpcSender(device)
    if meta.route not in ROUTES:
        raise WeightUpdateError(f"weight route: expected one of {', '.join(ROUTES)}, found {meta.route!r}.")
    return _StoredSender(meta.route, meta.location)


class _StoredSender:
    """`shm` and `disk`."""

    def __init__(self, route: str, directory: str) -> None:
        self._route, self._directory = route, directory
        self._mappings = Mappings(write=True)

    def send(
        self, version: int, specs: tuple[ParamSpec, ...], tensors: Tensors, announce: Announce | None = None
    ) -> tuple[WeightUpdateMeta, WeightReceipt]:
        location = staged_location(self._directory, self._route, version)
        return write_weights(WeightUpdateMeta(self._route, version, location, specs), tensors, self._mappings)

    def close(self) -> None:
        self._mappings = Mappings(write=True)
        if self._route == "shm":
            for version in (0, 1):
                Path(staged_location(self._directory, self._route, version)).unlink(missing_ok=True)


class _BroadcastSender:
    def __init__(self, location: str, device: str) -> None:
        self._sender = BroadcastSender(location, device)

    def send(
        self, version: int, specs: tuple[ParamSpec, ...], tensors: Tensors, announce: Announce | None = None
    ) -> tuple[WeightUpdateMeta, WeightReceipt]:
        if announce is None:
            raise WeightUpdateError(
                "route broadcast: the receivers must be told while the weights are sent; give update_weights an "
                "`announce`, as `rl_trainers.WeightPublisher` does."
            )
        place = self._sender.begin(version)
        meta = WeightUpdateMeta("broadcast", version, place.location, specs)
        sums = self._sender.send(place, specs, tensors, announce(meta))
        return meta, WeightReceipt("trainer", version, sums)

    def close(self) -> None:
        self._sender.close()


class _IpcSender:
    def __init__(self, device: str) -> None:
        check_device(device)
        self._device = device
        self._memory: IpcMemory | None = None

    def send(
        self, version: int, specs: tuple[ParamSpec, ...], tensors: Tensors, announce: Announce | None = None
    ) -> tuple[WeightUpdateMeta, WeightReceipt]:
        import torch

        size = total_size(specs)
        if self._memory is None or self._memory.tensor.numel() < size:
            self._memory = IpcMemory(size, self._device)
        sums = fill(self._memory.tensor, specs, tensors)
        torch.cuda.synchronize(self._device)
        meta = WeightUpdateMeta("ipc", version, self._memory.location, specs)
        return meta, WeightReceipt("trainer", version, sums)

    def close(self) -> None:
        self._memory = None


PlaceFor = Callable[[str, "tuple[int, ...]", "torch.dtype"], "torch.Tensor"]
"""`(name, shape, dtype) -> contiguous tensor` into which the parameter is to be received; raises a WeightUpdateError
where there is none."""


class WeightReceiver:
    """A server's end of every route. It keeps what the next update can use again: mappings, a connection, a group."""

    def __init__(self) -> None:
        self._mappings = Mappings(write=False)
        self._broadcast = BroadcastReceiver()
        self._ipc = IpcReader()

    def receive(
        self, meta: WeightUpdateMeta, place_for: PlaceFor, check: Callable[[], None] = lambda: None
    ) -> dict[str, int]:
        """Copy a version into the reader's own tensors.

        Args:
            check: raises a WeightUpdateError if this version cannot be taken; called before anything moves, so that a
                trainer that waits can be told.

        Returns:
            the checksum of what each holds then, by name.

        Raises:
            WeightUpdateError: the weights cannot be read, `place_for` refused one, or the trainer was lost.
        """
        if meta.route == "broadcast":

            def targets() -> list[torch.Tensor]:
                check()
                return [place_for(spec.name, spec.shape, dtype_of(spec)) for spec in meta.params]

            return self._broadcast.receive(meta.location, meta.params, targets)
        check()
        return {
            name: copy_with_checksum(place_for(name, tuple(tensor.shape), tensor.dtype), tensor)
            for name, tensor in self._read(meta)
        }

    def close(self) -> None:
        """Leave groups and connections, and forget mappings."""
        self._broadcast.close()
        self._mappings, self._ipc = Mappings(write=False), IpcReader()

    def _read(self, meta: WeightUpdateMeta) -> Tensors:
        if meta.route == "ipc":
            return ((spec.name, tensor) for spec, tensor in views(self._ipc.open(meta.location), meta.params))
        return open_weights(meta, self._mappings)
