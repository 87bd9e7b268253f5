"""What would run where: allocation, devices, batch arithmetic and run directory, checked before any process starts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import ClassVar

from rl_contracts.allocation import Allocation, Component
from rl_contracts.config import Settings, bounded, choice, require
from rl_contracts.errors import ConfigError
from rl_contracts.scheduler import Resources
from rl_launchers import LauncherConfig


@dataclass
class ClusterConfig(Settings):
    """What there is to run on, and what of it is used."""

    setting: ClassVar[str] = "cluster"
    device: str = choice("auto", ("auto", "cpu", "cuda"))
    """Where models run: `cpu`, `cuda`, or `auto`: on GPUs where there are any (too few are refused), else on the
    CPU."""
    devices: int = bounded(0, "0 (what there is) or more", lambda number: number >= 0)
    """GPUs in all; 0: what the scheduler finds."""
    cores: int = bounded(0, "0 (what there is) or more", lambda number: number >= 0)
    """Cores in all; 0: what the scheduler finds. Processes share them where there are fewer than processes."""


@dataclass(frozen=True)
class Layout:
    """One trainer, and the servers of one role or none."""

    actor: Component
    rollout: Component | None
    shared: bool = False
    """Whether both use the same GPUs, at the same time."""


@dataclass(frozen=True)
class Devices:
    """Where the processes of a run compute."""

    kind: str
    """`cpu` or `cuda`."""
    cores_each: int
    """Cores and threads per rank, of the trainer or of a server, so that together they fill what there is."""
    sentence: str
    """What is used of what there is, in words."""


def layout_of(allocation: str, servers: str) -> Layout:
    """Parse an allocation and find its parts.

    Args:
        servers: whether they are `required`, `optional` or `refused`.

    Raises:
        ConfigError: no trainer or several, or no servers where they are needed.
    """
    parsed = Allocation.parse(allocation)
    if len(parsed.train) != 1:
        raise ConfigError(f"allocation={allocation}: expected one trainer, found {len(parsed.train)}.")
    (actor,), found = parsed.train, len(parsed.inference)
    if found > 1 or (servers == "required" and not found):
        raise ConfigError(f"allocation={allocation}: expected servers of one kind, found {found}.")
    if servers == "refused" and found:
        raise ConfigError(f"allocation={allocation}: this command asks no servers; use {actor} alone.")
    return Layout(actor, parsed.inference[0] if found else None, shared=len(parsed.groups[0]) > 1)


def devices_of(layout: Layout, cluster: ClusterConfig, launcher: LauncherConfig) -> Devices:
    """Where a run computes. Each rank and each part of a split server has a GPU of its own, or one rank and one part
    have one together (`|`); cores may be shared.

    Raises:
        ConfigError: fewer GPUs than the allocation needs, none where they are asked for, nobody says what there is, or
            the scheduler has no GPUs for two.
    """
    assert launcher.options is not None
    found = launcher.options.resources() or Resources(gpus=cluster.devices, cores=cluster.cores)
    gpus, cores = cluster.devices or found.gpus, cluster.cores or found.cores
    source = f"cluster.cores with launcher.kind={launcher.kind}"
    require(cores > 0, source, "a number, since this scheduler cannot know it (and cluster.devices for GPUs)", cores)
    roles = [role for role in (layout.rollout, layout.actor) if role is not None]
    processes, written = sum(role.world_size for role in roles), ("|" if layout.shared else "+").join(map(str, roles))
    cores_each = max(1, cores // processes)
    if cluster.device == "cpu" or (cluster.device == "auto" and not gpus):
        why = "as asked" if cluster.device == "cpu" else "no GPU was found"
        return Devices("cpu", cores_each, f"CPU ({why}): {processes} processes, {cores_each} of {cores} cores each")
    alone = f"launcher.kind={launcher.kind} with allocation={written}"
    require(launcher.options.shares_devices or not layout.shared, alone, "`+`: this scheduler shares no GPUs", "`|`")
    needed = layout.actor.world_size if layout.shared else processes
    if gpus < needed:
        raise ConfigError(
            f"allocation={written} with cluster.device={cluster.device}: expected {needed} GPUs, one a rank, found "
            f"{gpus}; use a smaller allocation, or cluster.device=cpu."
        )
    each = ", ".join(f"{role.name} {role.world_size}" for role in roles)
    return Devices("cuda", cores_each, f"{needed} of {gpus} GPUs: {each}")


def run_directory(run_dir: str, experiment: str, trial: str) -> Path:
    """Where a run keeps its files: `run_dir`, or `runs/<experiment>/<trial>`; an empty trial is the time of day."""
    name = trial or datetime.now().strftime("%Y%m%d-%H%M%S-%f")[:-3]
    return Path(run_dir or Path("runs") / experiment / name).resolve()
