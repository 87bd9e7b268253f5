"""Sending and receiving end of a route. A publisher sends weights, and a server receives them.

Routes differ in the versions that they store. `shm` and `disk` store the last two versions for later readers. `ipc`
stores the last version while the trainer lives. `broadcast` stores nothing, so both ends must take part at the same
time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from rl_contracts.data import RENDEZVOUS_ROUTES, ROUTES, ParamSpec, WeightUpdateMeta
from rl_contracts.errors import WeightUpdateError
from rl_contracts.weights.broadcast import BroadcastReceiver, BroadcastSender
from rl_contracts.weights.checksums import Checksum, copy_summed
from rl_contracts.weights.ipc import IpcReader, IpcSender
from rl_contracts.weights.stored import Mappings, StoredSender, open_weights


class WeightSender(Protocol):
    """Sending end of a route on one trainer rank. All sending ranks call `begin` and `send` in step.

    On the routes in `RENDEZVOUS_ROUTES`, `send` waits until the receivers join. Meanwhile, the caller must give them
    the result of `begin`.
    """

    @property
    def location(self) -> str:
        """Location that the trainer's other ranks pass to `open_sender`."""

    def begin(self, version: int, specs: tuple[ParamSpec, ...]) -> WeightUpdateMeta:
        """Prepare a version, reserve its space, and return the location of this rank's part.

        Raises:
            WeightUpdateError: there is not enough space; the message has the required size.
            OSError: the location cannot be written.
        """

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
        """Send the named tensors of that version, cast to the served dtypes.

        Args:
            tensors: whole tensors in the order of the specs; a stream, so that only one exists at a time.

        Returns:
            the checksum of each sent parameter, by name.

        Raises:
            WeightUpdateError: names, order or shapes differ from the specs, or a receiver was lost or rejected the
                version.
            OSError: the tensors cannot be written.
        """

    def cancel(self, reason: str) -> None:
        """Cancel the version for the waiting receivers and all sending ranks. May be called from any thread."""

    def close(self) -> None:
        """Free the resources of the route. May be called twice."""


def open_sender(route: str, location: str, rank: int = 0, device: str = "cpu") -> WeightSender:
    """Open the sending end of a route.

    Args:
        location: the directory for the files of `shm` and `disk`; the address of `broadcast`
            (`tcp://host:port?timeout=seconds`; port 0 picks a free port), on which rank 0 listens; unused for `ipc`.
            Ranks other than 0 pass the `location` of rank 0's sender.
        rank: this rank of the trainer.
        device: device of the parameters.

    Raises:
        WeightUpdateError: the route does not exist, or this process cannot use it.
    """
    if route == "broadcast":
        return BroadcastSender(location, rank, device)
    if route == "ipc":
        return IpcSender(device)
    if route not in ROUTES:
        raise WeightUpdateError(f"weight route: expected one of {', '.join(ROUTES)}, found {route!r}.")
    return StoredSender(route, location, rank)


class WeightReceiver:
    """Receiving end of all routes; keeps mappings, connections and groups for the next update."""

    def __init__(self) -> None:
        self._broadcasts = defaultdict[int, BroadcastReceiver](BroadcastReceiver)
        self._ipc = IpcReader()
        self._mappings = Mappings(write=False)

    def receive(self, meta: WeightUpdateMeta, targets: dict[str, torch.Tensor]) -> dict[str, int]:
        """Copy all parts of a version into the server's contiguous tensors, one for each parameter.

        Returns:
            the checksum of each tensor after the copy, by name.

        Raises:
            WeightUpdateError: the weights cannot be read, are not finite, or the trainer was lost.
        """
        sums = self._receive(meta, targets)
        bad = [name for name, each in sums.items() if not each.finite]
        if bad:
            raise WeightUpdateError(
                f"version {meta.version}: expected finite numbers, found nan or infinity in {len(bad)} parameters, the "
                f"first {bad[:3]}. The trainer's step produced them; lower the learning rate, or check its gradients."
            )
        return {name: each.value for name, each in sums.items()}

    def _receive(self, meta: WeightUpdateMeta, targets: dict[str, torch.Tensor]) -> dict[str, Checksum]:
        if meta.route in RENDEZVOUS_ROUTES:
            # in parallel, so that no sender waits for another
            with ThreadPoolExecutor(max(len(meta.parts), 1)) as pool:
                parts = [
                    pool.submit(self._broadcasts[index].receive, part, [targets[spec.name] for spec in part.params])
                    for index, part in enumerate(meta.parts)
                ]
            return {name: value for part in parts for name, value in part.result().items()}
        source = self._ipc.read(meta) if meta.route == "ipc" else open_weights(meta, self._mappings)
        return {name: copy_summed(targets[name], tensor) for name, tensor in source}

    def reject(self, meta: WeightUpdateMeta, reason: str) -> None:
        """If the trainer waits for this receiver, notify it that the receiver cannot load the version, and why."""
        if meta.route in RENDEZVOUS_ROUTES and meta.parts:
            self._broadcasts[0].reject(meta.parts[0], reason)

    def close(self) -> None:
        """Leave groups, close connections, and drop mappings."""
        for receiver in self._broadcasts.values():
            receiver.close()
        self._ipc, self._mappings = IpcReader(), Mappings(write=False)
