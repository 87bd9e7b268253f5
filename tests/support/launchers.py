"""Clusters and settings per launcher, for tests of complete commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from commands import Command
from ray_cluster import ray
from slurm_cluster import slurm

CLUSTERS: dict[str, Callable[[], Any]] = {"local": nullcontext, "ray": ray, "slurm": slurm}


@contextmanager
def running_cluster(launcher: str) -> Iterator[dict[str, Any]]:
    """Start the cluster of a launcher, and yield the settings of a run that uses two of its nodes."""
    with CLUSTERS[launcher]():
        yield settings_of(launcher)


def settings_of(launcher: str, nodes: int = 2, **options: object) -> dict[str, Any]:
    """Return the settings of a run on nodes of a cluster, with further `launcher.options`."""
    cluster = {} if launcher == "local" else {"cluster.nodes": nodes}
    return {"launcher": launcher} | cluster | {f"launcher.options.{k}": v for k, v in options.items()}


def nodes_of(command: Command) -> dict[str, str]:
    """Wait until server and trainer run, and return their nodes by worker name."""
    command.wait_for(lambda: {"rollout-0", "actor-0"} <= set(command.workers()))
    return {name: command.workers()[name]["node"] for name in ("rollout-0", "actor-0")}
