"""The `broadcast` route: parameters go from a rank of the trainer to all servers at once, over a process group of their
own (gloo between hosts' memories, nccl between GPUs), straight into the buffers in which they will be served.

Large parameters go piece by piece out of their own memory, small ones share a bucket. Nothing is kept on the way, so
both ends must be there at the same time; `rl_contracts.weights.rendezvous` says how they meet. Where several ranks
send, each has a group with all servers, and all groups move at the same time.
"""

from __future__ import annotations

import contextlib
import secrets
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rl_contracts.data import ParamSpec, WeightPart, WeightUpdateMeta
from rl_contracts.errors import WeightUpdateError
from rl_contracts.weights.checksum import checksum, copy_with_checksum
from rl_contracts.weights.layout import ALIGNMENT, checked, dtype_of, size_of
from rl_contracts.weights.rendezvous import Address, Rendezvous, connect, delete, first_line, host, own_address

if TYPE_CHECKING:
    import torch

PIECE = 8 * 2**20
"""Bytes that are sent at once, and of a bucket: what gloo moves fastest."""
LARGE = 2**20
"""Parameters of so many bytes go by themselves."""
_AHEAD = 3
"""Pieces under way while an earlier one is waited for and summed."""


class BroadcastSender:
    """A sender's end; see `rl_contracts.weights.WeightSender`.

    Args:
        location: `tcp://host:port?timeout=seconds`. Rank 0 listens there (port 0 takes any); the others come to its
            `location`.
        rank: of the trainer.
        device: where the parameters live.
    """

    meets = True

    def __init__(self, location: str, rank: int, device: str) -> None:
        address = Address.parse(location)
        self._rank, self._device, self._updates = rank, device, 0
        if rank == 0:
            self._store, address = host(replace(address, update=secrets.token_hex(8)))
            self._own = address.host
        else:
            self._store, self._own = connect(address), own_address(address)
        self._session = address
        self._past: deque[Rendezvous] = deque()
        self._group: _Group | None = None

    @property
    def location(self) -> str:
        """Where the trainer's other ranks come to."""
        return self._session.location

    def begin(self, version: int, specs: tuple[ParamSpec, ...]) -> WeightUpdateMeta:
        self._updates += 1  # in step on all ranks of the trainer, so that an update has one name
        update = f"{self._session.update}-{self._updates}"
        self._address, self._specs = replace(self._session, update=update, sender=str(self._rank)), specs
        self._rendezvous = Rendezvous(self._store, self._address)
        self._past.append(self._rendezvous)
        if self._rank == 0 and len(self._past) > 2:  # nobody reads of the last but one any more
            self._past.popleft().forget()
        return WeightUpdateMeta("broadcast", version, (WeightPart(self._address.location, specs),))

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
        try:
            return self._meet().send(self._specs, tensors, self._device)
        except BaseException as error:
            self.cancel(first_line(error))
            self._leave()
            if isinstance(error, RuntimeError):
                raise WeightUpdateError(f"route broadcast: {first_line(error)}") from error
            raise

    def cancel(self, reason: str) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone, and whoever waits has seen it
            self._rendezvous.call_off(reason)

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
        # nccl wants a GPU for each member
        backend = "nccl" if "cpu" not in devices and len(set(devices)) == world else "gloo"
        name = f"{self._address.update}/{self._rank}"
        self._rendezvous.start(name, backend)
        self._group = _Group(self._store, replace(self._address, world=world), name, backend, self._own)
        return self._group

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
            with contextlib.suppress(RuntimeError):
                delete(self._store, f"group-{self._group.name}/")
            self._group = None


class BroadcastReceiver:
    """A server's end of one sender's part: it keeps the connection to the trainer and the group between updates."""

    def __init__(self) -> None:
        self._store: Any = None
        self._store_at = ("", 0)
        self._group: _Group | None = None

    def receive(self, part: WeightPart, targets: list[torch.Tensor]) -> dict[str, int]:
        """Meet the sender and receive into contiguous tensors, one per parameter; the checksums of what they hold.

        Raises:
            WeightUpdateError: says who did not join or was lost.
        """
        address = Address.parse(part.location)
        if not 0 < address.rank < address.world:
            raise WeightUpdateError(f"route broadcast: {part.location!r} gives this server no rank.")
        try:
            return self._meet(address, targets).receive(part.params, targets)
        except (RuntimeError, WeightUpdateError) as error:
            self.close()
            if isinstance(error, WeightUpdateError):
                raise
            raise WeightUpdateError(f"receiver {address.rank} of {address.world - 1}: {first_line(error)}") from error

    def refuse(self, part: WeightPart, reason: str) -> None:
        """Say that this server cannot take part, and why."""
        address = Address.parse(part.location)
        with contextlib.suppress(WeightUpdateError, RuntimeError):  # then nobody is there to be told
            Rendezvous(self._connected(address), address).call_off(f"receiver {address.rank} refuses: {reason}")

    def close(self) -> None:
        """Leave the group and the store."""
        if self._group is not None:
            self._group.close()
        self._group, self._store, self._store_at = None, None, ("", 0)

    def _connected(self, address: Address) -> Any:
        if self._store_at != (address.host, address.port):
            self.close()
            self._store, self._store_at = connect(address), (address.host, address.port)
        return self._store

    def _meet(self, address: Address, targets: list[torch.Tensor]) -> _Group:
        store, old = self._connected(address), self._group
        held = old.name if old is not None and (old.rank, old.world) == (address.rank, address.world) else ""
        device = _device_id(str(targets[0].device)) if targets else "cpu"
        name, backend = Rendezvous(store, address).join(held, device)
        if old is not None and name == old.name:
            return old
        if old is not None:
            old.close()
        self._group = _Group(store, address, name, backend, own_address(address))
        return self._group


class _Group:
    """A process group of a sender and all receivers.

    Args:
        store: where its members find each other.
        address: this member's rank, the size of the group, and the timeout of a step.
        host: address of this machine on which gloo listens.
    """

    def __init__(self, store: Any, address: Address, name: str, backend: str, host: str) -> None:
        from torch.distributed import PrefixStore

        self.name, self.rank, self.world, self.backend = name, address.rank, address.world, backend
        self._wait = timedelta(seconds=address.timeout)
        make = _make_nccl if backend == "nccl" else _make_gloo
        self._group = make(PrefixStore(f"group-{name}", store), self.rank, self.world, self._wait, host)

    def send(
        self, specs: tuple[ParamSpec, ...], tensors: Iterable[tuple[str, torch.Tensor]], device: str
    ) -> dict[str, int]:
        """Send named tensors, cast to the served dtypes.

        Returns:
            the checksum of what was sent, by name.

        Raises:
            WeightUpdateError: names, order or shapes differ from the specs; or a receiver was lost.
        """
        import torch

        on = device if self.backend == "nccl" else "cpu"
        transfer = _Transfer(self._group, self._wait, on)
        for spec, tensor in checked(specs, tensors):
            transfer.send(spec.name, tensor.detach().reshape(-1), dtype_of(spec), size_of(spec))
        sums = transfer.finish()
        if on != "cpu":
            torch.cuda.synchronize(on)
        return sums

    def receive(self, specs: tuple[ParamSpec, ...], targets: list[torch.Tensor]) -> dict[str, int]:
        """Receive into contiguous tensors, one per spec.

        Returns:
            the checksum of what each holds, by name.

        Raises:
            WeightUpdateError: the trainer or another receiver was lost.
        """
        on = "cpu" if self.backend == "gloo" or not targets else str(targets[0].device)
        transfer = _Transfer(self._group, self._wait, on)
        for spec, target in zip(specs, targets, strict=True):
            transfer.receive(spec.name, target.view(-1), size_of(spec))
        return transfer.finish()

    def close(self) -> None:
        """Leave the group; members that still wait in it get an error."""
        group, self._group = self._group, None
        if group is not None and self.backend == "nccl":
            group.abort()


class _Transfer:
    """One version on its way: broadcasts in order, a few of them ahead of the one that is waited for.

    Both ends cut the same parameters in the same way. A sender sums what it puts on the way, a receiver what has come.
    """

    def __init__(self, group: Any, wait: timedelta, on: str) -> None:
        from torch.distributed import BroadcastOptions

        self._group, self._wait, self._on = group, wait, on
        self._options = BroadcastOptions()
        self._options.rootRank = self._options.rootTensor = 0
        self._running: deque[tuple[str, Any, torch.Tensor, list[_Landing]]] = deque()
        self._sums: dict[str, int] = {}
        self._used = 0
        self._new_bucket()

    def send(self, name: str, flat: torch.Tensor, dtype: torch.dtype, size: int) -> None:
        """Send a parameter of `size` bytes in a dtype."""
        if size < LARGE:
            self._add(name, copy_with_checksum(self._take(size).view(dtype), flat))
            return
        for span, offset in _pieces(flat.numel(), dtype.itemsize):
            piece = flat[span].to(self._on, dtype)
            self._put(name, piece, [])
            self._add(name, checksum(piece, offset))

    def receive(self, name: str, flat: torch.Tensor, size: int) -> None:
        """Receive a parameter of `size` bytes."""
        import torch

        if size < LARGE:
            part = self._take(size).view(flat.dtype)
            self._landings.append((name, flat, part, 0))
            return
        for span, offset in _pieces(flat.numel(), flat.itemsize):
            target = flat[span]
            piece = target if target.device == torch.device(self._on) else torch.empty_like(target, device=self._on)
            self._put(name, piece, [(name, target, piece, offset)])

    def finish(self) -> dict[str, int]:
        """Wait for all; the checksums by name."""
        self._pass_bucket()
        while self._running:
            self._finish_one()
        return {name: total % 2**64 for name, total in self._sums.items()}

    def _take(self, size: int) -> torch.Tensor:
        """The bucket's next `size` bytes."""
        if self._used + size > PIECE:
            self._pass_bucket()
        start, self._used = self._used, self._used + -(-size // ALIGNMENT) * ALIGNMENT
        return self._bucket[start : start + size]

    def _pass_bucket(self) -> None:
        self._put("of a bucket", self._bucket[: self._used], self._landings)
        self._new_bucket()

    def _new_bucket(self) -> None:
        import torch

        self._bucket = torch.empty(PIECE, dtype=torch.uint8, device=self._on)
        self._used = 0
        self._landings: list[_Landing] = []

    def _put(self, name: str, piece: torch.Tensor, landings: list[_Landing]) -> None:
        """Start one broadcast; `name` is for errors."""
        import torch

        if piece.numel():
            try:
                work = self._group.broadcast([piece.view(torch.uint8)], self._options)
            except RuntimeError as error:
                raise _broken(name, error) from error
            self._running.append((name, work, piece, landings))
            if len(self._running) > _AHEAD:
                self._finish_one()
        else:
            self._land(landings)

    def _finish_one(self) -> None:
        name, work, _, landings = self._running.popleft()
        try:
            work.wait(self._wait)
        except RuntimeError as error:
            raise _broken(name, error) from error
        self._land(landings)

    def _land(self, landings: list[_Landing]) -> None:
        for name, target, piece, offset in landings:
            if piece is not target:
                target.copy_(piece)
            self._add(name, checksum(target, offset))

    def _add(self, name: str, part: int) -> None:
        self._sums[name] = self._sums.get(name, 0) + part


_Landing = tuple[str, "torch.Tensor", "torch.Tensor", int]
"""Of what has come: name, target, the piece (the target itself, or memory to copy from), and the byte of the parameter
at which it begins."""


def _broken(name: str, error: RuntimeError) -> WeightUpdateError:
    return WeightUpdateError(
        f"the broadcast broke at parameter {name!r}: {first_line(error)} (a member of the group died, or did not move "
        "for the time that a step may take)"
    )


def _pieces(count: int, itemsize: int) -> Iterator[tuple[slice, int]]:
    """Elements of each piece, and the byte at which it begins."""
    step = PIECE // itemsize
    for start in range(0, count, step):
        yield slice(start, min(start + step, count)), start * itemsize


def _make_gloo(store: Any, rank: int, world: int, wait: timedelta, host: str) -> Any:
    from torch.distributed import ProcessGroupGloo

    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = wait
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._threads = 2
    return ProcessGroupGloo(store, rank, world, options)


def _make_nccl(store: Any, rank: int, world: int, wait: timedelta, host: str) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = wait
    return ProcessGroupNCCL(store, rank, world, options)


def _device_id(device: str) -> str:
    import torch

    kind = torch.device(device)
    return "cpu" if kind.type != "cuda" else str(torch.cuda.get_device_properties(kind).uuid)
