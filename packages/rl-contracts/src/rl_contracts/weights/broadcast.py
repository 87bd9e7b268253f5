"""The `broadcast` route: the parameters go from rank 0 of the trainer to all servers at once, over a process group of
their own (gloo between hosts' memories, nccl between GPUs), straight into the buffers in which they will be served.

Large parameters go piece by piece out of their own memory, small ones share a bucket. Nothing is kept on the way, so
both ends must be there at the same time; `rl_contracts.weights.meeting` says how they meet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rl_contracts.data import ParamSpec
from rl_contracts.errors import WeightUpdateError
from rl_contracts.weights.checksum import checksum, copy_with_checksum
from rl_contracts.weights.layout import ALIGNMENT, checked, dtype_of, size_of
from rl_contracts.weights.meeting import Arrival, Go, Host, Place, arrive, connect, first_line, own_address

if TYPE_CHECKING:
    import torch

PIECE = 8 * 2**20
"""Bytes that are sent at once, and of a bucket: what gloo moves fastest."""
LARGE = 2**20
"""Parameters of so many bytes go by themselves."""
_AHEAD = 3
"""Pieces under way while an earlier one is waited for and summed."""


class Broadcast:
    """A formed process group of trainer and receivers.

    Args:
        store: where its members find each other.
        place: this member's seat, the number of seats, and the timeout.
        go: name and backend.
        host: address of this machine on which gloo listens.
    """

    def __init__(self, store: Any, place: Place, go: Go, host: str) -> None:
        from torch.distributed import PrefixStore

        self.name, self.rank, self.world, self.backend = go.group, place.rank, place.world, go.backend
        self._wait = timedelta(seconds=place.timeout)
        own = PrefixStore(f"group-{go.group}", store)
        make = _make_nccl if go.backend == "nccl" else _make_gloo
        self._group = make(own, place, self._wait, host)

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
        pipe, bucket, sums = self._pipe(), _Bucket(on), dict[str, int]()
        for spec, tensor in checked(specs, tensors):
            flat, dtype, size = tensor.detach().reshape(-1), dtype_of(spec), size_of(spec)
            if size >= LARGE:
                total = 0
                for span, offset in _pieces(flat.numel(), dtype.itemsize):
                    piece = flat[span].to(on, dtype)
                    pipe.put(spec.name, piece)
                    total += checksum(piece, offset)
                sums[spec.name] = total % 2**64
            else:
                if not bucket.fits(size):
                    pipe.put(spec.name, bucket.memory[: bucket.used])
                    bucket = _Bucket(on)
                sums[spec.name] = copy_with_checksum(bucket.take(size).view(dtype), flat)
        pipe.put("the last bucket", bucket.memory[: bucket.used])
        pipe.finish()
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
        sums = {spec.name: 0 for spec in specs}
        pipe, bucket = self._pipe(), _Bucket(on)
        for spec, target in zip(specs, targets, strict=True):
            flat, size = target.view(-1), size_of(spec)
            if size >= LARGE:
                for span, offset in _pieces(flat.numel(), flat.itemsize):
                    pipe.put(spec.name, *_landing(spec.name, flat[span], offset, on, sums))
                continue
            if not bucket.fits(size):
                pipe.put(spec.name, bucket.memory[: bucket.used], bucket.unpack(sums))
                bucket = _Bucket(on)
            bucket.members.append((spec.name, flat, bucket.take(size)))
        pipe.put("the last bucket", bucket.memory[: bucket.used], bucket.unpack(sums))
        pipe.finish()
        return {name: total % 2**64 for name, total in sums.items()}

    def close(self) -> None:
        """Leave the group; members that still wait in it get an error."""
        group, self._group = self._group, None
        if group is not None and self.backend == "nccl":
            group.abort()

    def _pipe(self) -> _Pipe:
        if self._group is None:
            raise WeightUpdateError("route broadcast: this group was left.")
        return _Pipe(self._group, self._wait)


class BroadcastSender:
    """The trainer's end; see `rl_contracts.weights.WeightSender`."""

    def __init__(self, location: str, device: str) -> None:
        self._host = Host(Place.parse(location))
        self._device = device
        self._group: Broadcast | None = None

    def begin(self, version: int) -> Place:
        """Where the receivers of a version come to."""
        return self._host.new_update(version)

    def send(
        self,
        place: Place,
        specs: tuple[ParamSpec, ...],
        tensors: Iterable[tuple[str, torch.Tensor]],
        check: Callable[[], None],
    ) -> dict[str, int]:
        """Wait for the receivers and send; the checksums of what was sent.

        Raises:
            WeightUpdateError: says who did not arrive or was lost, and when. The group is given up then.
        """
        try:
            group = self._meet(place, check)
            return group.send(specs, tensors, self._device)
        except BaseException as error:
            self._leave()
            self._host.say(place, Go(error=first_line(error)))
            if isinstance(error, RuntimeError):
                raise WeightUpdateError(f"route broadcast, update {place.update}: {first_line(error)}") from error
            raise

    def close(self) -> None:
        """Leave the group and end the store. Safe to call twice."""
        self._leave()
        self._host.close()

    def _meet(self, place: Place, check: Callable[[], None]) -> Broadcast:
        arrivals = self._host.wait_for_all(place, check)
        world = len(arrivals) + 1
        devices = [_device_id(self._device), *(arrival.device for arrival in arrivals)]
        # nccl wants a GPU for each member
        backend = "nccl" if "cpu" not in devices and len(set(devices)) == world else "gloo"
        old = self._group
        if old is not None and old.world == world and all(a.group == old.name for a in arrivals):
            self._host.say(place, Go(old.name, old.backend))
            return old
        self._leave()
        go = Go(place.update, backend)
        self._host.say(place, go)
        self._group = Broadcast(self._host.store, replace(place, rank=0, world=world), go, place.host)
        return self._group

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


class BroadcastReceiver:
    """A server's end: it keeps the connection to the trainer and the group between updates."""

    def __init__(self) -> None:
        self._store: Any = None
        self._store_at = ("", 0)
        self._group: Broadcast | None = None

    def receive(
        self, location: str, specs: tuple[ParamSpec, ...], make_targets: Callable[[], list[torch.Tensor]]
    ) -> dict[str, int]:
        """Meet the trainer and receive; the checksums of what the targets hold.

        Args:
            make_targets: contiguous tensors, one per spec; may raise a WeightUpdateError, which the trainer is told.

        Raises:
            WeightUpdateError: says who did not arrive or was lost.
        """
        place = Place.parse(location)
        if not 0 < place.rank < place.world:
            raise WeightUpdateError(f"route broadcast: {location!r} gives this server no seat.")
        try:
            if self._store_at != (place.host, place.port):
                self.close()
                self._store, self._store_at = connect(place), (place.host, place.port)
            error, targets = "", list[Any]()
            try:
                targets = make_targets()
            except WeightUpdateError as refusal:
                error = str(refusal)
            return self._meet(place, error, targets).receive(specs, targets)
        except (RuntimeError, WeightUpdateError) as error:
            self.close()
            if isinstance(error, WeightUpdateError):
                raise
            raise WeightUpdateError(f"receiver {place.rank} of {place.world - 1}: {first_line(error)}") from error

    def close(self) -> None:
        """Leave the group and the store."""
        if self._group is not None:
            self._group.close()
        self._group, self._store, self._store_at = None, None, ("", 0)

    def _meet(self, place: Place, error: str, targets: list[torch.Tensor]) -> Broadcast:
        old = self._group
        held = old.name if old is not None and (old.rank, old.world) == (place.rank, place.world) else ""
        device = _device_id(str(targets[0].device)) if targets else "cpu"
        go = arrive(self._store, place, Arrival(f"receiver {place.rank}", held, device, error))
        if old is not None and go.group == old.name:
            return old
        if old is not None:
            old.close()
        self._group = Broadcast(self._store, place, go, own_address(place))
        return self._group


class _Bucket:
    """Small parameters one after the other."""

    def __init__(self, device: str) -> None:
        import torch

        self.memory = torch.empty(PIECE, dtype=torch.uint8, device=device)
        self.used = 0
        self.members: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def fits(self, size: int) -> bool:
        return self.used + size <= PIECE

    def take(self, size: int) -> torch.Tensor:
        """The next `size` bytes."""
        start, self.used = self.used, self.used + -(-size // ALIGNMENT) * ALIGNMENT
        return self.memory[start : start + size]

    def unpack(self, sums: dict[str, int]) -> Callable[[], None]:
        """What to do once it has arrived."""

        def work() -> None:
            for name, target, part in self.members:
                sums[name] = copy_with_checksum(target, part.view(target.dtype))

        return work


class _Pipe:
    """Broadcasts in order, a few of them ahead of the one that is waited for."""

    def __init__(self, group: Any, wait: timedelta) -> None:
        from torch.distributed import BroadcastOptions

        self._group, self._wait = group, wait
        self._options = BroadcastOptions()
        self._options.rootRank = self._options.rootTensor = 0
        self._running: deque[tuple[str, Any, torch.Tensor, Callable[[], None]]] = deque()

    def put(self, name: str, piece: torch.Tensor, then: Callable[[], None] = lambda: None) -> None:
        """Start one; `then` is called when it is done. `name` is for errors."""
        import torch

        if not piece.numel():
            return
        try:
            work = self._group.broadcast([piece.view(torch.uint8)], self._options)
        except RuntimeError as error:
            raise _broken(name, error) from error
        self._running.append((name, work, piece, then))
        if len(self._running) > _AHEAD:
            self._finish_one()

    def finish(self) -> None:
        """Wait for all."""
        while self._running:
            self._finish_one()

    def _finish_one(self) -> None:
        name, work, _, then = self._running.popleft()
        try:
            work.wait(self._wait)
        except RuntimeError as error:
            raise _broken(name, error) from error
        then()


def _broken(name: str, error: RuntimeError) -> WeightUpdateError:
    return WeightUpdateError(
        f"the broadcast broke at parameter {name!r}: {first_line(error)} (a member of the group died, or did not move "
        "for the time that a step may take)"
    )


def _landing(
    name: str, target: torch.Tensor, offset: int, on: str, sums: dict[str, int]
) -> tuple[torch.Tensor, Callable[[], None]]:
    """Memory into which a piece of a large parameter is received, and what to do once it is there."""
    import torch

    direct = target.device == torch.device(on)
    piece = target if direct else torch.empty_like(target, device=on)

    def work() -> None:
        if not direct:
            target.copy_(piece)
        sums[name] += checksum(target, offset)

    return piece, work


def _pieces(count: int, itemsize: int) -> Iterator[tuple[slice, int]]:
    """Elements of each piece, and the byte at which it begins."""
    step = PIECE // itemsize
    for start in range(0, count, step):
        yield slice(start, min(start + step, count)), start * itemsize


def _make_gloo(store: Any, place: Place, wait: timedelta, host: str) -> Any:
    from torch.distributed import ProcessGroupGloo

    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = wait
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._threads = 2
    return ProcessGroupGloo(store, place.rank, place.world, options)


def _make_nccl(store: Any, place: Place, wait: timedelta, host: str) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = wait
    return ProcessGroupNCCL(store, place.rank, place.world, options)


def _device_id(device: str) -> str:
    import torch

    kind = torch.device(device)
    return "cpu" if kind.type != "cuda" else str(torch.cuda.get_device_properties(kind).uuid)
