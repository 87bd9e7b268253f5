"""Exclusive allocation of this machine's ports and GPUs."""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Iterable

import psutil

from rl_contracts.errors import LaunchError


class GpuPool:
    """Pool of GPUs, each held by at most one worker.

    Args:
        names: names of the GPUs.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._free = list(names)
        self.size = len(self._free)
        """Total number of GPUs, free or in use."""

    def acquire(self, count: int, role: str) -> list[str]:
        """Take `count` free GPUs and return their names.

        Raises:
            LaunchError: fewer than `count` are free; the message names the role.
        """
        if count > len(self._free):
            raise LaunchError(
                f"role {role!r} needs {count} GPUs, but {len(self._free)} of this machine's {self.size} are "
                "free. Lower its count or its GPUs per process, or stop another role first."
            )
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def release(self, names: Iterable[str]) -> None:
        """Return GPUs to the pool."""
        self._free.extend(names)


class PortReservation:
    """Port that is reserved for a worker until `release`.

    The reservation is a bound socket with SO_REUSEADDR that never listens. On Linux a server that sets the same option
    (asyncio, uvicorn, torch's store and all common ones do) can listen on the reserved port. Meanwhile the kernel never
    assigns the port to a process that requests any free port. Other systems reject a second bind, so `hand_over`
    releases the port just before the worker starts.

    Args:
        host: local address of the port; `""` for all IPv4 addresses, `"::"` for all IPv6 addresses.
        port: port number; 0 for any free port.

    Raises:
        LaunchError: the port is in use or not permitted. The message names the port and, if known, the process.
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
        """Prepare the port for its worker; call this just before the worker starts."""
        if sys.platform != "linux":
            self._socket.close()

    def release(self) -> None:
        """Release the port. Repeated calls are allowed."""
        self._socket.close()


def holder_of(port: int) -> str:
    """Return a description of the process that listens on a TCP port, or "an unknown process"."""
    try:
        pids = {
            connection.pid
            for connection in psutil.net_connections(kind="tcp")
            if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN
        }
        pid = next(iter(pids - {None}), None)
        return f"process {pid} ({psutil.Process(pid).name()})" if pid is not None else "an unknown process"
    except psutil.Error:
        return "an unknown process"
