"""Receiving end of the `broadcast` route in vLLM and SGLang servers.

The other files of this directory import it inside the servers; it has the requirements of `rl_stored`.
`rl_contracts.weights.broadcast` and `.rendezvous` have the sending end and define the protocol.
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
    from rl_inference.backends.plugins.rl_guard import RejectedError
else:
    import rl_stored
    from rl_guard import RejectedError

logger = logging.getLogger("rl.staging")

PIECE = 8 * 2**20
"""Bytes per broadcast and per bucket; equal to the sender's."""
LARGE = 2**20
"""Minimum size in bytes of a parameter that is sent separately instead of in a bucket; equal to the sender's."""
AHEAD = 3
"""Number of broadcasts in flight while an earlier one is awaited."""


class Receiver:
    """Receiving end for one sender; keeps the connection to the trainer and the group between updates."""

    def __init__(self) -> None:
        self._store: Any = None
        self._endpoint: tuple[str, int] = ("", 0)
        self._group: Any = None
        self._group_name, self._rank_and_world = "", (0, 0)
        self._backend = "gloo"

    def receive(self, part: dict[str, Any], targets: dict[str, Any], device: str) -> None:
        """Join the sender's group, and receive the parameters into host memory.

        Raises:
            RejectedError: the trainer did not start the broadcast in time or was lost, or the update was canceled.
        """
        address = Address(part["location"])
        try:
            self._meet(address, device)
            self._receive_pieces(part, targets, address, device)
        except (RuntimeError, RejectedError) as error:
            self._group, self._store, self._group_name = None, None, ""
            if isinstance(error, RejectedError):
                raise
            raise RejectedError(f"receiver {address.rank} of {address.world - 1}: {first_line(error)}") from error

    def reject(self, part: dict[str, Any], reason: str) -> None:
        """Cancel the update, and send all waiting participants the reason why this server cannot take part."""
        try:
            address = Address(part["location"])
            self._connect(address)
            message = f"receiver {address.rank} rejected the update: {reason}"
            self._store.compare_set(f"{address.update}/off", "", json.dumps(message))
        except (RuntimeError, ValueError, RejectedError):
            logger.warning("could not notify the trainer that this server rejected the update: %s", reason)

    def _connect(self, address: Address) -> None:
        from torch.distributed import TCPStore

        if self._store is None or self._endpoint != (address.host, address.port):
            self._group, self._group_name = None, ""
            try:
                wait = timedelta(seconds=address.timeout)
                self._store = TCPStore(address.host, address.port, None, False, wait, wait_for_workers=False)
            except RuntimeError as error:
                raise RejectedError(
                    f"no trainer listens at {address.host}:{address.port}: {first_line(error)} Set "
                    "launcher.options.host to an address of the trainer that the servers can reach."
                ) from error
            self._endpoint = (address.host, address.port)

    def _meet(self, address: Address, device: str) -> None:
        """Join, wait for the start, and form the named group, unless this receiver already has it."""
        from torch.distributed import PrefixStore

        self._connect(address)
        old_name = self._group_name if self._rank_and_world == (address.rank, address.world) else ""
        address.put(self._store, str(address.rank), {"group": old_name, "device": _device_id(device)})
        address.put(self._store, "world", address.world)
        deadline = time.monotonic() + address.timeout
        while (start := address.get(self._store, "start")) is None:
            if time.monotonic() > deadline:
                raise RejectedError(
                    f"receiver {address.rank} joined, but the trainer at {address.host}:{address.port} did not start "
                    f"the broadcast within {address.timeout:g} s. Check that all other servers joined."
                )
            time.sleep(0.002)
        if start["group"] != self._group_name or self._group is None:
            self._group = None
            self._backend = start["backend"]
            self._group = _process_group(self._backend, PrefixStore(start["group"], self._store), address)
            self._group_name, self._rank_and_world = start["group"], (address.rank, address.world)

    def _receive_pieces(self, part: dict[str, Any], targets: dict[str, Any], address: Address, device: str) -> None:
        """Receive all pieces. Both ends split the parameters into the same pieces in the same order."""
        import torch

        transfer_device, wait = device if self._backend == "nccl" else "cpu", timedelta(seconds=address.timeout)
        running: deque[tuple[Any, Any, list[tuple[Any, Any]]]] = deque()

        def finish(max_running: int) -> None:
            while len(running) > max_running:
                work, _, landings = running.popleft()
                work.wait(wait)
                for target, piece in landings:
                    if target is not piece:
                        target.copy_(piece)

        for piece, landings in _pieces(part, targets, transfer_device):
            running.append((self._group.broadcast(piece.view(torch.uint8), 0), piece, landings))
            finish(AHEAD)
        finish(0)
        if transfer_device != "cpu":
            torch.cuda.synchronize(transfer_device)


def _pieces(part: dict[str, Any], targets: dict[str, Any], device: str) -> Iterator[tuple[Any, list[tuple[Any, Any]]]]:
    """Yield the buffer of each broadcast, and its landings: pairs of a target and its slice of the buffer.

    Large parameters are split into separate pieces, small ones share a bucket.
    """
    import torch

    landings: list[tuple[Any, Any]] = []
    bucket, used = torch.empty(PIECE, dtype=torch.uint8, device=device), 0
    for name, _, size in rl_stored.offsets(part)[0]:
        flat = targets[name].view(-1)
        if size < LARGE:
            if used + size > PIECE:
                yield bucket[:used], landings
                bucket, used, landings = torch.empty(PIECE, dtype=torch.uint8, device=device), 0, []
            landings.append((flat, bucket[used : used + size].view(flat.dtype)))
            used += -(-size // 64) * 64
            continue
        for start in range(0, flat.numel(), PIECE // flat.itemsize):
            target = flat[start : start + PIECE // flat.itemsize]
            piece = target if device == "cpu" else torch.empty_like(target, device=device)
            yield piece, [(target, piece)]
    if used:
        yield bucket[:used], landings


class Address:
    """Parsed location `tcp://host:port/update/sender?timeout=...&rank=...&world=...`.

    Raises:
        RejectedError: the location is invalid or has no rank.
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
            raise RejectedError(
                f"route broadcast: expected a location such as tcp://host:port?timeout=60, found {location!r}: {error}."
            ) from error
        if url.scheme != "tcp" or not 0 < self.rank < self.world:
            raise RejectedError(
                f"route broadcast: expected the rank of this server in the location, found {location!r}."
            )

    def put(self, store: Any, name: str, value: Any) -> None:
        """Set a key for the sender."""
        store.set(f"{self.update}/{self.sender}/{name}", json.dumps(value))

    def get(self, store: Any, name: str) -> Any:
        """Return the value of a key, or None if it is not set.

        Raises:
            RejectedError: the update was canceled.
        """
        cancel_key, key = f"{self.update}/off", f"{self.update}/{self.sender}/{name}"
        if store.check([cancel_key]):
            raise RejectedError(f"the update was canceled: {json.loads(store.get(cancel_key))}")
        return json.loads(store.get(key)) if store.check([key]) else None


def _process_group(backend: str, store: Any, address: Address) -> Any:
    from torch import distributed

    group_class: Any = distributed.ProcessGroupNCCL if backend == "nccl" else distributed.ProcessGroupGloo
    options = group_class.Options() if backend == "nccl" else group_class._Options()
    options._timeout = timedelta(seconds=address.timeout)
    if backend == "gloo":
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address.host, address.port))  # sends nothing
            options._devices = [group_class.create_device(hostname=str(probe.getsockname()[0]))]
        options._threads = 2
    return group_class(store, address.rank, address.world, options)


def _device_id(device: str) -> str:
    import torch

    parsed = torch.device(device)
    return "cpu" if parsed.type != "cuda" else str(torch.cuda.get_device_properties(parsed).uuid)


def first_line(error: BaseException) -> str:
    """Return the first line of a libtorch error, without its stack trace."""
    return str(error).partition("\n")[0].strip() or type(error).__name__
