"""A broadcast's end in a server that is another program: its seats beside the trainer's senders.

For files beside this one, which run inside servers; needs what `rl_stored` needs. `rl_contracts.weights.broadcast` and
`.rendezvous` are the trainer's end, and say how it goes.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

if TYPE_CHECKING:
    from rl_inference.backends.plugins import rl_stored
    from rl_inference.backends.plugins.rl_guard import RefusedError
else:
    import rl_stored
    from rl_guard import RefusedError

logger = logging.getLogger("rl.staging")

PIECE = 8 * 2**20
LARGE = 2**20
AHEAD = 3


class Receiver:
    """A server's seat with one sender; keeps the connection and the group between updates."""

    def __init__(self) -> None:
        self._store: Any = None
        self._where: tuple[str, int] = ("", 0)
        self._group: Any = None
        self._name, self._seat = "", (0, 0)
        self._backend = "gloo"

    def receive(self, part: dict[str, Any], targets: dict[str, Any], device: str) -> None:
        """Meet the sender, and receive into the host's memory.

        Raises:
            RefusedError: says who did not join, or was lost.
        """
        seat = Seat(part["location"])
        try:
            self._meet(seat, device)
            self._take(part, targets, seat, device)
        except (RuntimeError, RefusedError) as error:
            self._group, self._store, self._name = None, None, ""
            if isinstance(error, RefusedError):
                raise
            raise RefusedError(f"receiver {seat.rank} of {seat.world - 1}: {first_line(error)}") from error

    def refuse(self, part: dict[str, Any], reason: str) -> None:
        """Tell all who wait in the update that this server cannot take part, and why."""
        try:
            seat = Seat(part["location"])
            self._connect(seat)
            told = f"receiver {seat.rank} refuses: {reason}"
            self._store.compare_set(f"{seat.update}/off", "", json.dumps(told))
        except (RuntimeError, ValueError, RefusedError):
            logger.warning("the trainer could not be told that the update is refused: %s", reason)

    def _connect(self, seat: Seat) -> None:
        from torch.distributed import TCPStore

        if self._store is None or self._where != (seat.host, seat.port):
            self._group, self._name = None, ""
            try:
                wait = timedelta(seconds=seat.timeout)
                self._store = TCPStore(seat.host, seat.port, None, False, wait, wait_for_workers=False)
            except RuntimeError as error:
                raise RefusedError(
                    f"no trainer listens at {seat.host}:{seat.port}: {first_line(error)} It must listen on an address "
                    "that the servers can reach (publish.host)."
                ) from error
            self._where = (seat.host, seat.port)

    def _meet(self, seat: Seat, device: str) -> None:
        """Join, wait for the start, and form the group that is asked for, unless it is the last one."""
        from torch.distributed import PrefixStore

        self._connect(seat)
        held = self._name if self._seat == (seat.rank, seat.world) else ""
        seat.put(self._store, str(seat.rank), {"group": held, "device": _device_id(device)})
        seat.put(self._store, "world", seat.world)
        deadline = time.monotonic() + seat.timeout
        while (start := seat.get(self._store, "start")) is None:
            if time.monotonic() > deadline:
                raise RefusedError(
                    f"receiver {seat.rank} joined, but within {seat.timeout:g} s the trainer at {seat.host}:"
                    f"{seat.port} did not start. Did all other servers join?"
                )
            time.sleep(0.002)
        if start["group"] != self._name or self._group is None:
            self._group = None
            self._backend = start["backend"]
            self._group = _process_group(self._backend, PrefixStore(start["group"], self._store), seat)
            self._name, self._seat = start["group"], (seat.rank, seat.world)

    def _take(self, part: dict[str, Any], targets: dict[str, Any], seat: Seat, device: str) -> None:
        """All pieces, in the order and of the sizes in which the sender cuts them."""
        import torch

        on, wait = device if self._backend == "nccl" else "cpu", timedelta(seconds=seat.timeout)
        under_way: deque[tuple[Any, Any, list[tuple[Any, Any]]]] = deque()

        def land(most: int) -> None:
            while len(under_way) > most:
                work, _, landings = under_way.popleft()
                work.wait(wait)
                for target, piece in landings:
                    if target is not piece:
                        target.copy_(piece)

        for piece, landings in _pieces(part, targets, on):
            under_way.append((self._group.broadcast(piece.view(torch.uint8), 0), piece, landings))
            land(AHEAD)
        land(0)
        if on != "cpu":
            torch.cuda.synchronize(on)


def _pieces(part: dict[str, Any], targets: dict[str, Any], on: str) -> Iterator[tuple[Any, list[tuple[Any, Any]]]]:
    """What is broadcast at once, and what goes where from it: large parameters in pieces of their own, small ones in
    buckets."""
    import torch

    landings: list[tuple[Any, Any]] = []
    bucket, used = torch.empty(PIECE, dtype=torch.uint8, device=on), 0
    for name, _, size in rl_stored.places(part)[0]:
        flat = targets[name].view(-1)
        if size < LARGE:
            if used + size > PIECE:
                yield bucket[:used], landings
                bucket, used, landings = torch.empty(PIECE, dtype=torch.uint8, device=on), 0, []
            landings.append((flat, bucket[used : used + size].view(flat.dtype)))
            used += -(-size // 64) * 64
            continue
        for start in range(0, flat.numel(), PIECE // flat.itemsize):
            target = flat[start : start + PIECE // flat.itemsize]
            piece = target if on == "cpu" else torch.empty_like(target, device=on)
            yield piece, [(target, piece)]
    if used:
        yield bucket[:used], landings


class Seat:
    """A location `tcp://host:port/update/sender?timeout=...&rank=...&world=...`, taken apart.

    Raises:
        RefusedError: it is none, or gives no rank.
    """

    def __init__(self, location: str) -> None:
        try:
            url = urlsplit(location)
            query = {name: float(value) for name, value in parse_qsl(url.query)}
            self.host, self.port = str(url.hostname), int(url.port or 0)
            self.update, _, self.sender = url.path.strip("/").partition("/")
            self.timeout = query.get("timeout", 60.0)
            self.rank, self.world = int(query.get("rank", 0)), int(query.get("world", 0))
        except (ValueError, OverflowError) as error:
            raise RefusedError(f"expected a location tcp://host:port/update, found {location!r}: {error}.") from error
        if url.scheme != "tcp" or not 0 < self.rank < self.world:
            raise RefusedError(f"{location!r} gives this server no rank.")

    def put(self, store: Any, name: str, value: Any) -> None:
        """Say something to the sender."""
        store.set(f"{self.update}/{self.sender}/{name}", json.dumps(value))

    def get(self, store: Any, name: str) -> Any:
        """What the sender said; None: nothing yet.

        Raises:
            RefusedError: somebody called the update off.
        """
        off, key = f"{self.update}/off", f"{self.update}/{self.sender}/{name}"
        if store.check([off]):
            raise RefusedError(f"the update was called off: {json.loads(store.get(off))}")
        return json.loads(store.get(key)) if store.check([key]) else None


def _process_group(backend: str, store: Any, seat: Seat) -> Any:
    from torch import distributed

    kind: Any = distributed.ProcessGroupNCCL if backend == "nccl" else distributed.ProcessGroupGloo
    options = kind.Options() if backend == "nccl" else kind._Options()
    options._timeout = timedelta(seconds=seat.timeout)
    if backend == "gloo":
        family = socket.AF_INET6 if ":" in seat.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((seat.host, seat.port))  # sends nothing
            options._devices = [kind.create_device(hostname=str(probe.getsockname()[0]))]
        options._threads = 2
    return kind(store, seat.rank, seat.world, options)


def _device_id(device: str) -> str:
    import torch

    kind = torch.device(device)
    return "cpu" if kind.type != "cuda" else str(torch.cuda.get_device_properties(kind).uuid)


def first_line(error: BaseException) -> str:
    """What libtorch says, without its trace."""
    return str(error).partition("\n")[0].strip() or type(error).__name__
