"""The `broadcast` route: a trainer rank sends parameters to all servers at once, directly into the serving buffers.

The sender and the servers form a process group: gloo between host memories, nccl between GPUs. Large parameters are
sent in pieces directly from their memory; small ones share a bucket. Nothing is stored on the way, so both ends must
take part at the same time; `rl_contracts.weights.rendezvous` defines how they meet. If several ranks send, each has a
group with all servers, and all groups transfer at the same time.
"""

from __future__ import annotations

import contextlib
import secrets
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from rl_contracts.data import ParamSpec, WeightPart, WeightUpdateMeta
from rl_contracts.errors import WeightUpdateError
from rl_contracts.weights.checksums import Checksum, checksum_of, combine
from rl_contracts.weights.flat_layout import ALIGNMENT, check_specs, dtype_of, size_of
from rl_contracts.weights.rendezvous import Address, Rendezvous, connect, delete, first_line, host, own_address

PIECE = 8 * 2**20
"""Bytes per broadcast and per bucket; gloo is fastest at this size."""
LARGE = 2**20
"""Minimum size in bytes of a parameter that is sent separately instead of in a bucket."""
_AHEAD = 3
"""Number of broadcasts in flight while an earlier one is awaited and summed."""


class BroadcastSender:
    """Sending end of the route; see `rl_contracts.weights.WeightSender`.

    Args:
        location: `tcp://host:port?timeout=seconds`. Rank 0 listens there (port 0 picks a free port); the other ranks
            connect to its `location`.
        rank: this rank of the trainer.
        device: device of the parameters.
    """

    def __init__(self, location: str, rank: int, device: str) -> None:
        address = Address.parse(location)
        self._rank, self._device, self._updates = rank, device, 0
        if rank == 0:
            self._store, address = host(replace(address, update=secrets.token_hex(8)))
        else:
            self._store = connect(address)
        self.location = address.location
        """Location that the trainer's other ranks connect to."""
        self._session = address
        self._group: _Group | None = None

    def begin(self, version: int, specs: tuple[ParamSpec, ...]) -> WeightUpdateMeta:
        self._updates += 1  # equal on all ranks of the trainer, so that an update has one name
        update = f"{self._session.update}-{self._updates}"
        self._address, self._specs = replace(self._session, update=update, sender=str(self._rank)), specs
        self._rendezvous = Rendezvous(self._store, self._address)
        if self._rank == 0:  # no process still reads the keys of the update before the previous one
            delete(self._store, f"{self._session.update}-{self._updates - 2}/")
        return WeightUpdateMeta("broadcast", version, (WeightPart(self._address.location, specs),))

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
        try:
            transfer = _Transfer(self._meet(), self._device, sends=True)
            for spec, tensor in check_specs(self._specs, tensors):
                transfer.add(spec, tensor.detach().reshape(-1))
            return {name: each.value for name, each in transfer.finish().items()}
        except BaseException as error:
            self.cancel(first_line(error))
            self._leave()
            if isinstance(error, RuntimeError):
                raise WeightUpdateError(
                    f"route broadcast: this trainer rank could not send the weights: {first_line(error)}"
                ) from error
            raise

    def cancel(self, reason: str) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone, and waiting processes have noticed it
            self._rendezvous.cancel(reason)

    def close(self) -> None:
        self._leave()
        self._store = None

    def _meet(self) -> _Group:
        members = self._rendezvous.wait_for_all()
        world, old = len(members) + 1, self._group
        if old is not None and old.world == world and all(member["group"] == old.name for member in members):
            self._rendezvous.start(old.name, old.backend)
            return old
        self._leave()
        devices = [_device_id(self._device), *(member["device"] for member in members)]
        # nccl requires a separate GPU for each member
        backend = "nccl" if "cpu" not in devices and len(set(devices)) == world else "gloo"
        name = f"{self._address.update}/{self._rank}/group"
        self._rendezvous.start(name, backend)
        self._group = _Group(self._store, replace(self._address, world=world), name, backend)
        return self._group

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


class BroadcastReceiver:
    """Receiving end for one sender; keeps the connection to the trainer and the group between updates."""

    def __init__(self) -> None:
        self._store: Any = None
        self._group: _Group | None = None

    def receive(self, part: WeightPart, targets: list[torch.Tensor]) -> dict[str, Checksum]:
        """Receive into contiguous tensors, one per parameter, and return the checksums of their contents.

        Raises:
            WeightUpdateError: the trainer or another server did not join or was lost, or the update was canceled.
        """
        address = Address.parse(part.location)
        if not 0 < address.rank < address.world:
            raise WeightUpdateError(
                f"route broadcast: expected the rank of this server in the location, found {part.location!r}."
            )
        device = str(targets[0].device) if targets else "cpu"
        try:
            transfer = _Transfer(self._meet(address, device), device, sends=False)
            for spec, target in zip(part.params, targets, strict=True):
                transfer.add(spec, target.view(-1))
            return transfer.finish()
        except (RuntimeError, WeightUpdateError) as error:
            self.close()
            if isinstance(error, WeightUpdateError):
                raise
            raise WeightUpdateError(f"receiver {address.rank} of {address.world - 1}: {first_line(error)}") from error

    def reject(self, part: WeightPart, reason: str) -> None:
        """Notify the trainer that this server cannot take part, with the reason."""
        with contextlib.suppress(WeightUpdateError, RuntimeError):  # no trainer listens any more
            address = Address.parse(part.location)
            Rendezvous(self._connected(address), address).cancel(
                f"receiver {address.rank} rejected the update: {reason}"
            )

    def close(self) -> None:
        """Leave the group and the store."""
        if self._group is not None:
            self._group.close()
        self._group, self._store = None, None

    def _connected(self, address: Address) -> Any:
        if self._store is None or (self._store.host, self._store.port) != (address.host, address.port):
            self.close()
            self._store = connect(address)
        return self._store

    def _meet(self, address: Address, device: str) -> _Group:
        store, old = self._connected(address), self._group
        old_name = old.name if old is not None and (old.rank, old.world) == (address.rank, address.world) else ""
        name, backend = Rendezvous(store, address).join(old_name, _device_id(device))
        if old is not None and name == old.name:
            return old
        if old is not None:
            old.close()
        self._group = _Group(store, address, name, backend)
        return self._group


class _Group:
    """Process group of a sender and all receivers. It broadcasts in order, with a few broadcasts in flight.

    No other object may hold the group or its broadcasts in flight: waiting members notice that this one left only when
    the last reference is dropped.

    Args:
        store: store in which the members find each other.
        address: this member's rank, the size of the group, and the timeout of a step.
        name: prefix of the group's keys in the store. The sender deletes them with the keys of the update that formed
            the group.
        backend: gloo or nccl.
    """

    def __init__(self, store: Any, address: Address, name: str, backend: str) -> None:
        self.name, self.rank, self.world, self.backend = name, address.rank, address.world, backend
        self._wait = timedelta(seconds=address.timeout)
        self._running: deque[tuple[Any, torch.Tensor, list[_Landing]]] = deque()
        self._group = _process_group(backend, distributed.PrefixStore(name, store), address)

    def put(self, piece: torch.Tensor, landings: list[_Landing]) -> list[_Landing]:
        """Start one broadcast. If too many are in flight, wait for the oldest and return its landings, else none."""
        try:
            work = self._group.broadcast(piece.view(torch.uint8), 0)
        except RuntimeError as error:
            raise _broken(landings, error) from error
        self._running.append((work, piece, landings))
        return self.wait() if len(self._running) > _AHEAD else []

    def wait(self) -> list[_Landing]:
        """Wait for the oldest broadcast and return its landings; none if nothing is in flight."""
        if not self._running:
            return []
        landings = self._running[0][2]
        try:
            self._running[0][0].wait(self._wait)
        except RuntimeError as error:
            raise _broken(landings, error) from error
        self._running.popleft()
        return landings

    def close(self) -> None:
        """Leave the group; members that still wait in it get an error."""
        if self._group is not None and self.backend == "nccl":
            self._group.abort()
        self._group = None
        self._running.clear()


class _Transfer:
    """Transfer of one version through a group. Both ends split the parameters into the same pieces.

    Args:
        device: device of the parameters at this end; a gloo group always transfers between host memories.
        sends: whether this end sends.
    """

    def __init__(self, group: _Group, device: str, sends: bool) -> None:
        self._group, self._sends = group, sends
        self._transfer_device = device if group.backend == "nccl" else "cpu"
        self._sums: dict[str, Checksum] = {}
        self._new_bucket()

    def add(self, spec: ParamSpec, flat: torch.Tensor) -> None:
        """Send or receive the next parameter.

        Args:
            spec: name, shape and served dtype of the parameter.
            flat: the values to send, or the memory of the served dtype to fill.

        Raises:
            WeightUpdateError: a member of the group was lost. `finish` raises it too.
        """
        dtype, size = dtype_of(spec), size_of(spec)
        self._sums[spec.name] = Checksum(0, True)
        if size < LARGE:
            if self._used + size > PIECE:
                self._put_bucket()
            piece = self._bucket[self._used :][:size].view(dtype)
            self._used += -(-size // ALIGNMENT) * ALIGNMENT
            if self._sends:
                piece.copy_(flat)
            self._landings.append((spec.name, piece if self._sends else flat, piece, 0))
            return
        for start in range(0, flat.numel(), PIECE // dtype.itemsize):
            part = flat[start : start + PIECE // dtype.itemsize]
            if self._sends:
                piece = part.to(self._transfer_device, dtype)
            else:
                piece = (
                    part
                    if part.device == torch.device(self._transfer_device)
                    else torch.empty_like(part, device=self._transfer_device)
                )
            target = piece if self._sends else part
            self._land(self._group.put(piece, [(spec.name, target, piece, start * dtype.itemsize)]))

    def finish(self) -> dict[str, Checksum]:
        """Wait for all broadcasts and return the checksums by parameter name."""
        self._put_bucket()
        while landings := self._group.wait():
            self._land(landings)
        if self._transfer_device != "cpu":
            torch.cuda.synchronize(self._transfer_device)
        return self._sums

    def _new_bucket(self) -> None:
        self._bucket, self._used = torch.empty(PIECE, dtype=torch.uint8, device=self._transfer_device), 0
        self._landings: list[_Landing] = []

    def _put_bucket(self) -> None:
        if self._used:
            self._land(self._group.put(self._bucket[: self._used], self._landings))
            self._new_bucket()

    def _land(self, landings: list[_Landing]) -> None:
        for name, target, piece, offset in landings:
            if piece is not target:
                target.copy_(piece)
            self._sums[name] = combine(self._sums[name], checksum_of(target, offset))


_Landing = tuple[str, torch.Tensor, torch.Tensor, int]
"""Piece of a parameter in a broadcast: parameter name, target tensor, transfer tensor, and byte offset.

The checksum is computed from the target. The transfer tensor is the target itself, or a buffer to copy from.
"""


def _broken(landings: list[_Landing], error: RuntimeError) -> WeightUpdateError:
    return WeightUpdateError(
        f"the broadcast failed at parameter {landings[0][0]!r}: {first_line(error)} (a member of the group died, or "
        "made no progress within the timeout)"
    )


def _process_group(backend: str, store: Any, address: Address) -> Any:
    kind: Any = distributed.ProcessGroupNCCL if backend == "nccl" else distributed.ProcessGroupGloo
    options = kind.Options() if backend == "nccl" else kind._Options()
    options._timeout = timedelta(seconds=address.timeout)
    if backend == "gloo":
        options._devices = [kind.create_device(hostname=own_address(address))]
        options._threads = 2
    return kind(store, address.rank, address.world, options)


def _device_id(device: str) -> str:
    kind = torch.device(device)
    return "cpu" if kind.type != "cuda" else str(torch.cuda.get_device_properties(kind).uuid)
