"""Rendezvous of trainer and servers before a broadcast, in a key-value store that rank 0 of the trainer hosts.

The client of the servers decides for each update which servers take part. The request to stage the version passes each
server its rank, so a server may be evicted or rejoin between two updates. All servers join, then the trainer starts.
Any participant may instead cancel the update with a reason; all others receive the first reason. Each trainer rank that
sends meets the servers under a separate key of the same store. Values in the store are JSON. Each attempt has separate
keys, which cannot be guessed and which the sender deletes later.
"""

from __future__ import annotations

import json
import math
import re
import socket
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from rl_contracts.data import WeightUpdateMeta
from rl_contracts.errors import WeightUpdateError
from rl_contracts.runtime.aio import run_in_thread

_POLL = 0.002
"""Seconds between two polls of the store."""
_LATE_SECONDS = 5.0
"""Extra seconds that libtorch may take after the timeout to report that no process listens."""


@dataclass(frozen=True, slots=True)
class Address:
    """Parsed location `tcp://host:port/update/sender?timeout=...&rank=...&world=...`."""

    host: str
    """Address on which rank 0 of the trainer listens."""
    port: int = 0
    """Port of rank 0; before it listens, 0 means any free port."""
    update: str = ""
    """Name of the update and its attempt."""
    sender: str = ""
    """Trainer rank that sends this part."""
    timeout: float = 60.0
    """Seconds that each step may take: joining, connecting, transferring one piece."""
    rank: int = 0
    """Rank of the receiver in the process group; the sender has rank 0."""
    world: int = 0
    """Size of the process group."""

    @classmethod
    def parse(cls, location: str) -> Address:
        """Parse a location; the inverse of `location`.

        Raises:
            WeightUpdateError: the location is invalid.
        """
        try:
            url = urlsplit(location)
            query = {name: float(value) for name, value in parse_qsl(url.query)}
            if url.scheme != "tcp" or not url.hostname or set(query) - {"timeout", "rank", "world"}:
                raise ValueError("scheme, host or parameters are wrong")
            update, _, sender = url.path.strip("/").partition("/")
            rank, world, timeout = int(query.get("rank", 0)), int(query.get("world", 0)), query.get("timeout", 60.0)
            if not (0 < timeout <= 86400 and 0 <= rank <= world < 2**16):
                raise ValueError("timeout must be above 0 and at most 86400 s, and rank at most world")
            return cls(url.hostname, url.port or 0, update, sender, timeout, rank, world)
        except (ValueError, OverflowError) as error:
            raise WeightUpdateError(
                f"route broadcast: expected a location such as tcp://host:port?timeout=60, found {location!r}: {error}."
            ) from error

    @property
    def location(self) -> str:
        """Address as a URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        query = {"timeout": self.timeout} | ({"rank": self.rank, "world": self.world} if self.world else {})
        return f"tcp://{host}:{self.port}/{self.update}/{self.sender}?{urlencode(query)}"


def with_rank(meta: WeightUpdateMeta, rank: int, world: int) -> WeightUpdateMeta:
    """Return the update for one receiver of a broadcast, with its rank, from 1 to `world - 1`."""
    parts = (
        replace(part, location=replace(Address.parse(part.location), rank=rank, world=world).location)
        for part in meta.parts
    )
    return replace(meta, parts=tuple(parts))


class Rendezvous:
    """Rendezvous of a sender with all receivers for one update.

    Args:
        store: store from `host` or `connect`.
        address: names the update, the sender, and the caller's rank.
    """

    def __init__(self, store: Any, address: Address) -> None:
        self._store, self._address = store, address
        self._cancel_key = f"{address.update}/off"

    def join(self, group: str, device: str) -> tuple[str, str]:
        """Join as a receiver and wait for the start.

        Args:
            group: name of the group that this receiver still has with the same rank; empty for none.
            device: `cpu`, or the unique id of its GPU.

        Returns:
            name and backend of the group to use: a group that all members still have, or a new group to form.

        Raises:
            WeightUpdateError: the trainer is gone or does not start the broadcast in time, or the update was canceled.
        """
        address, deadline = self._address, time.monotonic() + self._address.timeout
        try:
            self._set(str(address.rank), {"group": group, "device": device})
            self._set("world", address.world)
            while (start := self._get("start")) is None:
                if time.monotonic() > deadline:
                    raise WeightUpdateError(
                        f"receiver {address.rank} joined, but the trainer at {address.host}:{address.port} did not "
                        f"start the broadcast within {address.timeout:g} s. Check that all other servers joined."
                    )
                time.sleep(_POLL)
        except RuntimeError as error:
            raise WeightUpdateError(
                f"receiver {address.rank}: the trainer at {address.host}:{address.port} is gone: {first_line(error)}"
            ) from error
        return str(start["group"]), str(start["backend"])

    def wait_for_all(self) -> list[dict[str, str]]:
        """Wait as the sender until every receiver has joined. The timeout begins when the first receiver joins.

        Before that there is no limit: the client of the servers cancels an update that takes too long.

        Returns:
            `group` and `device` of each receiver (see `join`), in order of their ranks.

        Raises:
            WeightUpdateError: receivers did not join in time (the message names them), or the update was canceled.
        """
        address, deadline, world, joined = self._address, math.inf, 0, dict[int, dict[str, str]]()
        while not world or len(joined) < world - 1:
            if not world and (value := self._get("world")) is not None:
                deadline, world = time.monotonic() + address.timeout, int(value)
            for rank in sorted(set(range(1, world)) - set(joined)):
                if (value := self._get(str(rank))) is not None:
                    joined[rank] = value
            if time.monotonic() > deadline:
                missing = ", ".join(str(rank) for rank in range(1, world) if rank not in joined)
                raise WeightUpdateError(
                    f"receiver {missing} of {world - 1} did not join within {address.timeout:g} s of the first. "
                    f"Joined: {', '.join(map(str, sorted(joined))) or 'none'}. Check that all servers can reach "
                    f"{address.host}:{address.port}."
                )
            time.sleep(_POLL)
        return [joined[rank] for rank in sorted(joined)]

    def start(self, group: str, backend: str) -> None:
        """Let the receivers continue with a group."""
        self._set("start", {"group": group, "backend": backend})

    def cancel(self, reason: str) -> None:
        """Cancel the update for all waiting participants, at this sender and the others. The first reason is kept.

        Raises:
            RuntimeError: the store is gone, which all other participants notice as well.
        """
        self._store.compare_set(self._cancel_key, "", json.dumps(reason))

    def _set(self, name: str, value: Any) -> None:
        self._store.set(f"{self._address.update}/{self._address.sender}/{name}", json.dumps(value))

    def _get(self, name: str) -> Any:
        """Return the value of a key, or None if it is not set.

        Raises:
            WeightUpdateError: the update was canceled.
        """
        if self._store.check([self._cancel_key]):
            raise WeightUpdateError(f"the update was canceled: {json.loads(self._store.get(self._cancel_key))}")
        key = f"{self._address.update}/{self._address.sender}/{name}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None


def host(address: Address) -> tuple[Any, Address]:
    """Host the store on rank 0, and return it with the address on which it listens.

    Raises:
        WeightUpdateError: the process cannot listen on the address.
    """
    from torch.distributed import TCPStore

    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        listener = socket.create_server((address.host, address.port), family=family)
    except OSError as error:
        raise WeightUpdateError(
            f"route broadcast: cannot listen on {address.host}:{address.port}: {error}. Set launcher.options.host to "
            "an address of this machine that the servers can reach."
        ) from error
    address = replace(address, port=listener.getsockname()[1])
    wait, fd = timedelta(seconds=address.timeout), listener.detach()
    store = TCPStore(address.host, address.port, None, True, wait, wait_for_workers=False, master_listen_fd=fd)
    return store, address


def connect(address: Address) -> Any:
    """Connect to the store of rank 0. Each thread that may wait in it needs a separate connection.

    Raises:
        WeightUpdateError: no process listens there, or the listening process sends no reply.
    """
    from torch.distributed import TCPStore

    wait = timedelta(seconds=address.timeout)
    try:
        return run_in_thread(
            lambda: TCPStore(address.host, address.port, None, False, wait, wait_for_workers=False)
        ).result(address.timeout + _LATE_SECONDS)
    except TimeoutError as error:
        raise WeightUpdateError(
            f"{address.host}:{address.port} accepts connections but sent no reply within {address.timeout:g} s. Check "
            "whether the trainer hangs."
        ) from error
    except RuntimeError as error:
        raise WeightUpdateError(
            f"no trainer listens at {address.host}:{address.port}: {first_line(error)} Set launcher.options.host to "
            "an address of the trainer that the servers can reach."
        ) from error


def delete(store: Any, prefix: str) -> None:
    """Delete all keys that begin with a prefix."""
    for key in store.list_keys():
        if key.startswith(prefix):
            store.delete_key(key)


def own_address(address: Address) -> str:
    """Return the address from which this machine reaches the store."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address.host, address.port or 9))  # sends nothing
        return str(probe.getsockname()[0])


def first_line(error: BaseException) -> str:
    """Return the message of a libtorch error without source locations, stack trace and advice."""
    text = re.sub(r"\[[^\]]*\.cc:\d+\]\s*", "", str(error).partition("\n")[0])
    return text.partition(" This is typically")[0].strip() or type(error).__name__
