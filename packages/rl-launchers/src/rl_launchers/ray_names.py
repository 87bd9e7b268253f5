"""Names of a run that a Ray cluster keeps, for shared storage that is slow to show what another node wrote."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from functools import cached_property
from typing import Any

from rl_contracts.errors import LaunchError
from rl_contracts.names import NameService, NameTakenError, UnknownNameError, segments, taken

ANSWER_SECONDS = 5.0
"""For the cluster to answer."""


class NamesUnreachableError(LaunchError, OSError):
    """The cluster does not answer. Whoever waits out a full disk waits this out as well."""


class RayNames(NameService):
    """Names in the control store of a Ray cluster (GCS), which lives on its head and is reached from every node.

    A process that asks it is no driver or worker of Ray, and costs the cluster a connection. Whoever may use the
    cluster may read and write them, so a cluster that strangers reach should ask for a token (`RAY_AUTH_MODE=token`).

    Args:
        address: `host:port` of the control store.
        run: what the run is called there, like no other.
        token_path: file of the token that the cluster asks for; empty: it asks for none, or the environment says.
    """

    def __init__(self, address: str, run: str, token_path: str = "") -> None:
        self._address, self._run = address, run.encode()
        if token_path:  # Ray looks there only, and only when it is loaded
            os.environ.setdefault("RAY_AUTH_MODE", "token")
            os.environ.setdefault("RAY_AUTH_TOKEN_PATH", token_path)

    def add(self, key: str, value: str, replace: bool = False) -> None:
        segments(key)
        if not self._asked("put", key.encode(), value.encode(), replace) and not replace:
            raise NameTakenError(taken(key, self.get(key)))

    def get(self, key: str) -> str:
        segments(key)
        if (value := self._asked("get", key.encode())) is None:
            raise UnknownNameError(f"names: nobody has added {key!r} in the Ray cluster at {self._address}")
        found: str = value.decode()
        return found

    def children(self, prefix: str = "") -> dict[str, str]:
        below = f"{'/'.join(segments(prefix))}/" if prefix else ""
        keys = self._asked("keys", below.encode())
        values = self._asked("multi_get", keys) if keys else {}
        return {key.decode(): values[key].decode() for key in sorted(values)}

    def delete(self, key: str) -> None:
        segments(key)
        self._asked("del", key.encode(), False)

    @cached_property
    def _store(self) -> Any:
        host, _, port = self._address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS).close()  # Ray would try for a minute
        from ray._raylet import GcsClient  # type: ignore[attr-defined]

        return GcsClient(address=self._address)

    def _asked(self, what: str, *arguments: Any) -> Any:
        from ray.exceptions import RayError

        try:
            call: Callable[..., Any] = getattr(self._store, f"internal_kv_{what}")
            return call(*arguments, self._run, ANSWER_SECONDS)
        except (RayError, OSError) as error:
            raise NamesUnreachableError(
                f"the Ray cluster at {self._address}, which keeps this run's names, does not answer: "
                f"{' '.join(str(error).split())}. Where it is gone, so is what ran there; the same command goes on "
                "from the last recover point."
            ) from error
