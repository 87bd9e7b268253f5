"""The two ends of a route: what a publisher needs to send weights, and what a server needs to receive them.

Routes differ in what they keep. `shm` and `disk` keep the last two versions for whoever comes to read them; `ipc` keeps
the last one for as long as the trainer lives; `broadcast` keeps nothing, and so needs both ends at the same time.
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
    """The trainer's end of a route, on one rank that sends: `begin` and `send` of each version, in step on all of them.

    On routes where both ends meet (`RENDEZVOUS_ROUTES`) it waits in `send` for its receivers, who must be told
    meanwhile what `begin` returned.
    """

    @property
    def location(self) -> str:
        """What the trainer's other ranks give `open_sender`."""

    def begin(self, version: int, specs: tuple[ParamSpec, ...]) -> WeightUpdateMeta:
        """Prepare a version, space for it included; where this rank's part of it will be found.

        Raises:
            WeightUpdateError: there is no space; says how much is needed.
            OSError: it cannot be written there.
        """

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
        """Put the named tensors of that version onto the route, cast to the served dtypes.

        Args:
            tensors: whole tensors in the order of the specs; a stream, so that one at a time exists.

        Returns:
            the checksum of what was sent, by name.

        Raises:
            WeightUpdateError: names, order or shapes differ from the specs, or a receiver was lost or refused.
            OSError: they cannot be written.
        """

    def cancel(self, reason: str) -> None:
        """End the version for everybody who waits in it: the receivers and all ranks that send. From any thread."""

    def close(self) -> None:
        """Free what the route holds. Safe to call twice."""


def open_sender(route: str, location: str, rank: int = 0, device: str = "cpu") -> WeightSender:
    """The trainer's end of a route.

    Args:
        location: the directory in which `shm` and `disk` keep their files; the address of `broadcast`
            (`tcp://host:port?timeout=seconds`; port 0 takes any), on which rank 0 listens; nothing for `ipc`. Ranks
            other than 0 give the `location` of rank 0's sender.
        rank: of the trainer.
        device: where the parameters live.

    Raises:
        WeightUpdateError: no such route, or it cannot work here.
    """
    if route == "broadcast":
        return BroadcastSender(location, rank, device)
    if route == "ipc":
        return IpcSender(device)
    if route not in ROUTES:
        raise WeightUpdateError(f"weight route: expected one of {', '.join(ROUTES)}, found {route!r}.")
    return StoredSender(route, location, rank)


class WeightReceiver:
    """A server's end of every route. It keeps what the next update can use again: mappings, connections, groups."""

    def __init__(self) -> None:
        self._broadcasts = defaultdict[int, BroadcastReceiver](BroadcastReceiver)
        self._ipc = IpcReader()
        self._mappings = Mappings(write=False)

    def receive(self, meta: WeightUpdateMeta, targets: dict[str, torch.Tensor]) -> dict[str, int]:
        """Copy a version, all its parts, into the reader's own contiguous tensors, one for each parameter.

        Returns:
            the checksum of what each holds then, by name.

        Raises:
            WeightUpdateError: the weights cannot be read, are not finite, or the trainer was lost.
        """
        sums = self._receive(meta, targets)
        bad = [name for name, each in sums.items() if not each.finite]
        if bad:
            raise WeightUpdateError(
                f"version {meta.version}: expected finite numbers, found nan or infinity in {len(bad)} parameters, the "
                f"first {bad[:3]}. The trainer's step made them; lower the learning rate, or look at its gradients."
            )
        return {name: each.value for name, each in sums.items()}

    def _receive(self, meta: WeightUpdateMeta, targets: dict[str, torch.Tensor]) -> dict[str, Checksum]:
        if meta.route in RENDEZVOUS_ROUTES:
            with ThreadPoolExecutor(max(len(meta.parts), 1)) as pool:  # no sender must wait for another
                parts = [
                    pool.submit(self._broadcasts[index].receive, part, [targets[spec.name] for spec in part.params])
                    for index, part in enumerate(meta.parts)
                ]
            return {name: value for part in parts for name, value in part.result().items()}
        source = self._ipc.read(meta) if meta.route == "ipc" else open_weights(meta, self._mappings)
        return {name: copy_summed(targets[name], tensor) for name, tensor in source}

    def refuse(self, meta: WeightUpdateMeta, reason: str) -> None:
        """Tell a trainer that waits for this receiver that it cannot take the version, and why."""
        if meta.route in RENDEZVOUS_ROUTES and meta.parts:
            self._broadcasts[0].refuse(meta.parts[0], reason)

    def close(self) -> None:
        """Leave groups and connections, and forget mappings."""
        for receiver in self._broadcasts.values():
            receiver.close()
        self._ipc, self._mappings = IpcReader(), Mappings(write=False)
