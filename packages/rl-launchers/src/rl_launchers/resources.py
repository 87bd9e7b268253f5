"""The cores and devices of this machine, handed out without overlap."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

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
        self._size = len(self._free)

    def __len__(self) -> int:
        return self._size

    def take(self, count: int, role: str) -> list[str]:
        """Hand out `count` of them.

        Raises:
            LaunchError: fewer are free.
        """
        if count > len(self._free):
            raise LaunchError(
                f"role {role!r} needs {count} {self._noun}, but {len(self._free)} of this machine's {self._size} are "
                f"free. Lower its count or its {self._noun} per process, or stop another role first."
            )
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give_back(self, items: Iterable[str]) -> None:
        """Return what was taken."""
        self._free.extend(items)


def visible_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """Names of the CUDA devices that this process may use, as CUDA_VISIBLE_DEVICES spells them. Needs no torch."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip() and name.strip() != "-1"]
    # CUDA numbers the devices that it finds from 0, whatever the numbers of their files are.
    return [str(i) for i, _ in enumerate(d for d in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", d.name))]


def pinnable_cores() -> list[str]:
    """Names of the cores that this process may use.

    Raises:
        ConfigError: this system cannot pin processes to cores.
    """
    if sys.platform != "linux":
        raise ConfigError(f"pin_cores: expected false on {sys.platform}, found true. Only Linux can pin processes.")
    return [str(core) for core in sorted(os.sched_getaffinity(0))]
