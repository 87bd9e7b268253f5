"""Schedulers that start the processes of a run, and the launcher that supervises them."""

from rl_launchers.launcher import Launcher, LauncherConfig
from rl_launchers.local import LocalScheduler

__all__ = ["Launcher", "LauncherConfig", "LocalScheduler"]
