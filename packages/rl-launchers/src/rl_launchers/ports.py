"""Ports for workers: reserved so that nobody else is given them, checked before anything starts."""

from __future__ import annotations

import errno
import socket
import sys

import psutil

from rl_contracts.errors import LaunchError


class PortReservation:
    """A port that is ours until `release`.

    The reservation is a bound socket that never listens, with SO_REUSEADDR. On Linux a server that sets the same
    option (asyncio, uvicorn, torch's store and all common ones do) may listen on the port beside it, while the kernel
    gives it to nobody who asks for a free one. Elsewhere a second bind is refused, so `hand_over` gives the port up
    just before the worker starts.

    Args:
        host: local address to reserve on; `""` is all of them.
        port: a certain port; 0 is any free one.

    Raises:
        LaunchError: the port is in use or may not be used; names it and, where it can be known, the process.
    """

    def __init__(self, host: str = "", port: int = 0) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise LaunchError(_refusal(host, port, error)) from error
        self.port: int = self._socket.getsockname()[1]

    def hand_over(self) -> None:
        """Call just before the worker that will listen is started."""
        if sys.platform != "linux":
            self._socket.close()

    def release(self) -> None:
        """Give the port up. May be called twice."""
        self._socket.close()


def _refusal(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is in use by {holder_of(port)}. Stop that process, or choose another port."
    return f"port {port} of {host or 'this host'} cannot be used: {error.strerror}. Choose another host or port."


def holder_of(port: int) -> str:
    """The process that listens on a TCP port, in words; says so where it cannot be known."""
    try:
        connections = psutil.net_connections(kind="tcp")
        pids = {
            connection.pid
            for connection in connections
            if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN
        }
        pid = next(iter(pids - {None}), None)
        return f"process {pid} ({psutil.Process(pid).name()})" if pid is not None else "a process we may not see"
    except psutil.Error:
        return "a process we may not see"
