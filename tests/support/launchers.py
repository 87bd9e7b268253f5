"""The launchers, each with the cluster that it needs, for tests of whole commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from commands import Command
from ray_cluster import ray
from slurm_cluster import slurm

CLUSTERS: dict[str, Callable[[], Any]] = {"local": nullcontext, "ray": ray, "slurm": slurm}
OPTIONS = {"local": {}, "ray": {"nodes": 2}, "slurm": {"nodes": 2, "poll_seconds": 1}}


@contextmanager
def running_cluster(launcher: str) -> Iterator[dict[str, Any]]:
    """Its cluster, of two nodes (Ray) or four (Slurm); yields the settings by which a run takes two nodes of it."""
    with CLUSTERS[launcher]():
        yield settings_of(launcher)


def settings_of(launcher: str, **options: object) -> dict[str, Any]:
    """The settings by which a run takes two nodes of a cluster, with further `launcher.options`."""
    return {"launcher": launcher} | {f"launcher.options.{k}": v for k, v in (OPTIONS[launcher] | options).items()}


def nodes_of(command: Command) -> dict[str, str]:
    """The nodes of server and trainer, once both are there."""
    command.wait_for(lambda: {"rollout-0", "actor-0"} <= set(command.workers()))
    return {name: command.workers()[name]["node"] for name in ("rollout-0", "actor-0")}
