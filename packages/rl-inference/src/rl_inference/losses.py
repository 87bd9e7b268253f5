"""How a server fails to answer. What a server refuses as wrong is a plain `InferenceError`."""

from __future__ import annotations

from rl_contracts.errors import InferenceError


class ServerLostError(InferenceError):
    """A server did not answer, or stopped in the middle: what it was asked can be asked of another."""


class ServerGoneError(ServerLostError):
    """The process that was there is not: nobody listens at its address."""


class ServerRestartedError(ServerGoneError):
    """Another process than before answers at its address. What it serves must be checked before it is used."""


class ServerBusyError(InferenceError):
    """A server takes no more for now (503)."""
