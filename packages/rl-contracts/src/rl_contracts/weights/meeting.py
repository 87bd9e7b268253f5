"""Where trainer and servers meet before a broadcast: a key-value store that rank 0 of the trainer keeps.

Who takes part is decided for each update by the client of the servers, which tells each its seat in the request to
stage; so a server may be evicted or come back between any two. Everybody arrives, then the trainer says `go`, or says
why not. The process group of the last update is used again if all still have it; else they form a new one. What the
store holds is JSON, and each try has keys of its own, which cannot be guessed.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from rl_contracts.data import WeightUpdateMeta
from rl_contracts.errors import WeightUpdateError

_POLL = 0.002
"""Seconds between two looks into the store."""


@dataclass(frozen=True, slots=True)
class Place:
    """A location `tcp://host:port/update?timeout=...&rank=...&world=...`, taken apart."""

    host: str
    """Address on which the trainer listens."""
    port: int = 0
    """Its port; 0, before it listens: any free one."""
    update: str = ""
    """Which update, and which try."""
    timeout: float = 60.0
    """Seconds that each step may take: to arrive, to connect, to move one piece."""
    rank: int = 0
    """Seat of the reader; the trainer has 0."""
    world: int = 0
    """Seats in all, the trainer's included."""

    @classmethod
    def parse(cls, location: str) -> Place:
        """Inverse of `location`.

        Raises:
            WeightUpdateError: it is none.
        """
        try:
            parts = urlsplit(location)
            values = {name: float(value) for name, value in parse_qsl(parts.query)}
            if parts.scheme != "tcp" or not parts.hostname or set(values) - {"timeout", "rank", "world"}:
                raise ValueError("not of that form")
            seat = int(values.get("rank", 0)), int(values.get("world", 0))
            timeout = values.get("timeout", 60.0)
            return cls(parts.hostname, parts.port or 0, parts.path.lstrip("/"), timeout, *seat)
        except ValueError as error:
            raise WeightUpdateError(
                f"route broadcast: expected a location tcp://host:port/update?timeout=60, found {location!r}: {error}."
            ) from error

    @property
    def location(self) -> str:
        """As a URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        query = {"timeout": self.timeout} | ({"rank": self.rank, "world": self.world} if self.world else {})
        return f"tcp://{host}:{self.port}/{self.update}?{urlencode(query)}"


def seated(meta: WeightUpdateMeta, rank: int, world: int) -> WeightUpdateMeta:
    """What one receiver of a broadcast is sent: the same update with its seat, from 1 to `world - 1`."""
    return replace(meta, location=replace(Place.parse(meta.location), rank=rank, world=world).location)


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a receiver says when it is there."""

    name: str
    """Its seat, for messages."""
    group: str = ""
    """Group that it still has, in which it had the same seat; empty: none."""
    device: str = "cpu"
    """`cpu`, or the unique id of its GPU."""
    error: str = ""
    """Why it cannot take part."""


@dataclass(frozen=True, slots=True)
class Go:
    """What the trainer says when all are there."""

    group: str = ""
    """The group to use: the one that all have, or a name for the one to form."""
    backend: str = "gloo"
    """`gloo` or `nccl`."""
    error: str = ""
    """Why it does not come about."""


class Host:
    """The trainer's side: keeps the store.

    Args:
        place: host, port and timeout.

    Raises:
        WeightUpdateError: the address cannot be listened on.
    """

    def __init__(self, place: Place) -> None:
        from torch.distributed import TCPStore

        family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
        try:
            listener = socket.create_server((place.host, place.port), family=family)
        except OSError as error:
            raise WeightUpdateError(
                f"route broadcast: cannot listen on {place.host}:{place.port}: {error}. Set publish.host to an "
                "address of this machine that the servers can reach."
            ) from error
        self.place = replace(place, port=listener.getsockname()[1])
        wait = timedelta(seconds=place.timeout)
        self.store: Any = TCPStore(
            place.host, self.place.port, None, True, wait, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def close(self) -> None:
        """End the store; receivers that wait in it get an error."""
        self.store = None

    def new_update(self, version: int) -> Place:
        """A place for one try to send a version."""
        return replace(self.place, update=f"{version}-{secrets.token_hex(8)}")

    def wait_for_all(self, place: Place, check: Callable[[], None]) -> list[Arrival]:
        """Wait until every receiver has arrived, at most the timeout after the first.

        Args:
            check: raises what has gone wrong on the receivers' side meanwhile.

        Raises:
            WeightUpdateError: names who did not arrive in time, or who refused and why.
        """
        deadline, world, found = math.inf, 0, dict[int, Arrival]()
        while not world or len(found) < world - 1:
            check()  # before the first is there, their client knows how long to wait for any
            if not world and (value := self._read(place, "world")) is not None:
                deadline, world = time.monotonic() + place.timeout, int(value)
            for rank in (rank for rank in range(1, world) if rank not in found):
                value = self._read(place, str(rank))
                if value is not None:
                    found[rank] = Arrival(**value)
            refused = next((arrival for arrival in found.values() if arrival.error), None)
            if refused is not None:
                raise WeightUpdateError(f"{refused.name} does not take part: {refused.error}")
            if time.monotonic() > deadline:
                missing = ", ".join(str(rank) for rank in range(1, world) if rank not in found)
                raise WeightUpdateError(
                    f"receiver {missing} of {world - 1} did not arrive within {place.timeout:g} s of the first. "
                    f"Arrived: {', '.join(a.name for a in found.values()) or 'none'}. "
                    f"Can all servers reach {place.host}:{place.port}?"
                )
            time.sleep(_POLL)
        return [found[rank] for rank in sorted(found)]

    def say(self, place: Place, go: Go) -> None:
        """Let the receivers go on, or tell them why not."""
        _write(self.store, place, "go", go)

    def _read(self, place: Place, name: str) -> Any:
        return _read(self.store, place, name)


def arrive(store: Any, place: Place, arrival: Arrival) -> Go:
    """The receiver's side: say that it is there, and wait for the trainer's word.

    Raises:
        WeightUpdateError: the trainer is gone, says nothing in time, or says why it does not go on.
    """
    deadline = time.monotonic() + place.timeout
    try:
        _write(store, place, str(place.rank), arrival)
        store.set(_key(place, "world"), json.dumps(place.world))
        if arrival.error:
            raise WeightUpdateError(arrival.error)
        while (value := _read(store, place, "go")) is None:
            if time.monotonic() > deadline:
                raise WeightUpdateError(
                    f"{arrival.name} arrived, but within {place.timeout:g} s the trainer at {place.host}:{place.port} "
                    "did not say go. Did all other servers arrive?"
                )
            time.sleep(_POLL)
    except RuntimeError as error:
        raise WeightUpdateError(
            f"{arrival.name}: the trainer at {place.host}:{place.port} is gone: {first_line(error)}"
        ) from error
    go = Go(**value)
    if go.error:
        raise WeightUpdateError(f"the trainer broke off: {go.error}")
    return go


def connect(place: Place) -> Any:
    """A receiver's connection to the trainer's store.

    Raises:
        WeightUpdateError: nobody listens there.
    """
    from torch.distributed import TCPStore

    try:
        return TCPStore(place.host, place.port, None, False, timedelta(seconds=place.timeout), wait_for_workers=False)
    except RuntimeError as error:
        raise WeightUpdateError(
            f"no trainer listens at {place.host}:{place.port}: {first_line(error)} It must listen on an address that "
            "the servers can reach (publish.host)."
        ) from error


def own_address(place: Place) -> str:
    """The address of this machine that lies towards the trainer."""
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((place.host, place.port or 9))  # sends nothing
        return str(probe.getsockname()[0])


def first_line(error: BaseException) -> str:
    """What libtorch says, without its source lines, its trace and its advice."""
    text = re.sub(r"\[[^\]]*\.cc:\d+\]\s*", "", str(error).partition("\n")[0])
    return text.partition(" This is typically")[0].strip() or type(error).__name__


def _key(place: Place, name: str) -> str:
    return f"{place.update}/{name}"


def _write(store: Any, place: Place, name: str, value: Arrival | Go) -> None:
    store.set(_key(place, name), json.dumps(asdict(value)))


def _read(store: Any, place: Place, name: str) -> Any:
    key = _key(place, name)
    return json.loads(store.get(key)) if store.check([key]) else None
