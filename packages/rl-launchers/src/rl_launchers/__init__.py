"""Schedulers that start the processes of a run, and the launcher that supervises them.

Names are imported when they are first used, so that the keeper process, which lives in this package, stays small.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_launchers.launcher import Launcher, LauncherConfig
    from rl_launchers.local import LocalScheduler, LocalSchedulerConfig

__all__ = ["Launcher", "LauncherConfig", "LocalScheduler", "LocalSchedulerConfig"]

_HOMES = {
    "Launcher": "launcher",
    "LauncherConfig": "launcher",
    "LocalScheduler": "local",
    "LocalSchedulerConfig": "local",
}


def __getattr__(name: str) -> Any:
    """Import a public name from the module that holds it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
