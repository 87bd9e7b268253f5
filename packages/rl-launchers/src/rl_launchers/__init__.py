"""Schedulers that start the processes of a run, and the launcher that supervises them.

Names are imported when they are first used, so that the keeper process, which lives in this package, stays small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_contracts.lazy import on_demand

if TYPE_CHECKING:
    from rl_launchers.attempts import Resume
    from rl_launchers.control import RunControl
    from rl_launchers.interrupts import uv_parent
    from rl_launchers.launcher import Launcher, LauncherConfig
    from rl_launchers.local import LocalScheduler, LocalSchedulerConfig
    from rl_launchers.ray import RayScheduler, RaySchedulerConfig
    from rl_launchers.slurm import SlurmScheduler, SlurmSchedulerConfig
else:
    __getattr__ = on_demand(
        __name__,
        {
            "Launcher": "launcher",
            "LauncherConfig": "launcher",
            "LocalScheduler": "local",
            "LocalSchedulerConfig": "local",
            "RayScheduler": "ray",
            "RaySchedulerConfig": "ray",
            "Resume": "attempts",
            "RunControl": "control",
            "SlurmScheduler": "slurm",
            "SlurmSchedulerConfig": "slurm",
            "uv_parent": "interrupts",
        },
    )

__all__ = [
    "Launcher",
    "LauncherConfig",
    "LocalScheduler",
    "LocalSchedulerConfig",
    "RayScheduler",
    "RaySchedulerConfig",
    "Resume",
    "RunControl",
    "SlurmScheduler",
    "SlurmSchedulerConfig",
    "uv_parent",
]
