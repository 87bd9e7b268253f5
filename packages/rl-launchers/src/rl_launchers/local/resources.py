"""The ports, cores and devices of this machine, handed out without overlap."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Iterable

import psutil

from rl_contracts.errors import ConfigError, LaunchError


class Pool:
    """Things that one worker at a time may have.

    Args:
        noun: what they are, in the plural, for messages.
        items: their names.
    """

    def __init__(self, noun: str, items: Iterable[str]) -> None:
        self._noun = noun
        self._free = list(items)
        self.size = len(self._free)
        """How many there are, free or not."""

    def acquire(self, count: int, role: str) -> list[str]:
        """Hand out `count` of them.

        Raises:
            LaunchError: fewer are free.
        """
        if count > len(self._free):
            raise LaunchError(
                f"role {role!r} needs {count} {self._noun}, but {len(self._free)} of this machine's {self.size} are "
                f"free. Lower its count or its {self._noun} per process, or stop another role first."
            )
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def release(self, items: Iterable[str]) -> None:
        """Return what was taken."""
        self._free.extend(items)


def pinnable_cores() -> list[str]:
    """Names of the cores that this process may use.

    Raises:
        ConfigError: this system cannot pin processes to cores.
    """
    if sys.platform != "linux":
        raise ConfigError(f"pin_cores: expected false on {sys.platform}, found true. Only Linux can pin processes.")
    return [str(core) for core in sorted(os.sched_getaffinity(0))]


class PortReservation:
    """A port that is ours until `release`.

    The reservation is a bound socket that never listens, with SO_REUSEADDR. On Linux a server that sets the same
    option (asyncio, uvicorn, torch's store and all common ones do) may listen on the port beside it, while the kernel
    gives it to nobody who asks for a free one. Elsewhere a second bind is refused, so `hand_over` gives the port up
    just before the worker starts.

    Args:
        host: local address to reserve on; `""` is all of IPv4, `"::"` of IPv6.
        port: a certain port; 0 is any free one.

    Raises:
        LaunchError: the port is in use or may not be used; names it and, where it can be known, the process.
    """

    def __init__(self, host: str = "", port: int = 0) -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            if error.errno == errno.EADDRINUSE:
                raise LaunchError(
                    f"port {port} is in use by {holder_of(port)}. Stop that process, or choose another port."
                ) from error
            raise LaunchError(
                f"port {port} of {host or 'this host'} cannot be used: {error.strerror}. Choose another host or port."
            ) from error
        self.port: int = self._socket.getsockname()[1]

    def hand_over(self) -> None:
        """Call just before the worker that will listen is started."""
        if sys.platform != "linux":
            self._socket.close()

    def release(self) -> None:
        """Give the port up. May be called twice."""
        self._socket.close()


def holder_of(port: int) -> str:
    """The process that listens on a TCP port, in words; says so where it cannot be known."""
    try:
        pids = {
            connection.pid
            for connection in psutil.net_connections(kind="tcp")
            if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN
        }
        pid = next(iter(pids - {None}), None)
        return f"process {pid} ({psutil.Process(pid).name()})" if pid is not None else "a process we may not see"
    except psutil.Error:
        return "a process we may not see"
