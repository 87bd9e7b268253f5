"""Schedulers that start the processes of a run, and the launcher that supervises them.

Names are imported on first use, so that the reaper process, whose module is in this package, stays small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_contracts.runtime.lazy_imports import lazy_getattr

if TYPE_CHECKING:
    from rl_launchers.local.scheduler import LocalScheduler, LocalSchedulerConfig
    from rl_launchers.ray.scheduler import RayScheduler, RaySchedulerConfig
    from rl_launchers.slurm.scheduler import SlurmScheduler, SlurmSchedulerConfig
    from rl_launchers.supervise.control import RunControl
    from rl_launchers.supervise.interrupts import uv_parent
    from rl_launchers.supervise.launcher import Launcher, LauncherConfig
    from rl_launchers.supervise.run_restarts import Resume

    __version__: str
else:
    __getattr__ = lazy_getattr(
        __name__,
        {
            "Launcher": "supervise.launcher",
            "LauncherConfig": "supervise.launcher",
            "LocalScheduler": "local.scheduler",
            "LocalSchedulerConfig": "local.scheduler",
            "RayScheduler": "ray.scheduler",
            "RaySchedulerConfig": "ray.scheduler",
            "Resume": "supervise.run_restarts",
            "RunControl": "supervise.control",
            "SlurmScheduler": "slurm.scheduler",
            "SlurmSchedulerConfig": "slurm.scheduler",
            "uv_parent": "supervise.interrupts",
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
