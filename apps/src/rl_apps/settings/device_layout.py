"""What would run where: allocation, devices, batch arithmetic and run directory, checked before any process starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import ClassVar

from rl_contracts.allocation import Allocation, Component
from rl_contracts.config import Settings, bounded, choice, require
from rl_contracts.errors import ConfigError, LaunchError
from rl_contracts.scheduler import JobSpec, Node
from rl_launchers import LauncherConfig
from rl_launchers.cluster.placement import Ledger, used_nodes


@dataclass
class ClusterConfig(Settings):
    """What there is to run on, and what of it is used."""

    setting: ClassVar[str] = "cluster"
    device: str = choice("auto", ("auto", "cpu", "cuda"))
    """Where models run: `cpu`, `cuda`, or `auto`: on GPUs where there are any (too few are refused), else on the
    CPU."""
    nodes: int = bounded(0, "0 (what there is) or more", lambda number: number >= 0)
    """Machines that are used; 0: as many as the scheduler has, or one."""
    devices: int = bounded(0, "0 (what there is) or more", lambda number: number >= 0)
    """GPUs of each machine; 0: what the scheduler finds."""
    cores: int = bounded(0, "0 (what there is) or more", lambda number: number >= 0)
    """Cores of each machine; 0: what the scheduler finds. Processes share them where there are fewer than processes."""

    def of(self, launcher: LauncherConfig, plan: bool = False) -> list[Node]:
        """The machines: what the scheduler knows of them, and what is said here.

        Args:
            launcher: whose scheduler is asked.
            plan: whether nothing is to be started, so that no cluster must be there.

        Raises:
            ConfigError: nobody says what there is, or more machines are asked for than there are.
        """
        assert launcher.options is not None
        found, kind = launcher.options.planned() if plan else launcher.options.resources(), launcher.kind
        if found is None:
            nodes = [Node(f"node{index}", "", 0) for index in range(self.nodes or 1)]
        else:
            nodes = list(found.nodes) or [Node("this machine", "", found.cores, found.gpus)]
            there = ", ".join(node.name for node in nodes)
            fits = f"at most {len(nodes)}, which launcher.kind={kind} has ({there})"
            require(self.nodes <= len(nodes), "cluster.nodes", fits, self.nodes)
        chosen = used_nodes(nodes, self.nodes, self.cores, self.devices)
        unknown = "a number, since this scheduler cannot know it (and cluster.devices for GPUs)"
        least = min(node.cores for node in chosen)
        require(plan or least > 0, f"cluster.cores with launcher.kind={kind}", unknown, least)
        return chosen

    def require_there(self, launcher: LauncherConfig) -> None:
        """Refuse GPUs that are said to be there and that the scheduler knows not to be; `--dry-run` plans with them.

        Raises:
            ConfigError: see above.
        """
        assert launcher.options is not None
        found = launcher.options.resources()
        if found is not None:
            most = max((node.gpus for node in found.nodes), default=found.gpus)
            expected = f"at most {most} on a machine, as launcher.kind={launcher.kind} finds"
            require(self.devices <= most, "cluster.devices", expected, self.devices)


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
    places: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By role, the machine of each of its processes (of each server, where that has several)."""

    def together(self, one: str, other: str) -> bool:
        """Whether two roles are on one machine and the same."""
        return len({*self.places[one], *self.places[other]}) == 1


def layout_of(allocation: str, servers: str) -> Layout:
    """Parse an allocation and find its parts.

    Args:
        servers: whether they are `required`, `optional` or `refused`.

    Raises:
        ConfigError: no trainer or several, or no servers where they are needed.
    """
    parsed = Allocation.parse(allocation)
    if len(parsed.train) != 1:
        raise ConfigError(
            f"allocation={allocation}: expected one trainer, found {len(parsed.train)}. One server and one trainer are "
            "embedded:d1+fsdp:d1."
        )
    (actor,), found = parsed.train, len(parsed.inference)
    if found > 1 or (servers == "required" and not found):
        raise ConfigError(f"allocation={allocation}: expected servers of one kind, found {found}.")
    if servers == "refused" and found:
        raise ConfigError(f"allocation={allocation}: this command asks no servers; use {actor} alone.")
    return Layout(actor, parsed.inference[0] if found else None, shared=len(parsed.groups[0]) > 1)


def devices_of(layout: Layout, cluster: ClusterConfig, launcher: LauncherConfig, plan: bool = False) -> Devices:
    """Where a run computes. Each rank and each part of a split server has a GPU of its own, or one rank and one part
    have one together (`|`); cores may be shared. A `plan` starts nothing, and needs no cluster.

    Raises:
        ConfigError: fewer GPUs than the allocation needs, none where they are asked for, a server that fits on no
            machine, nobody says what there is, or the scheduler has no GPUs for two.
    """
    assert launcher.options is not None
    nodes = cluster.of(launcher, plan)
    gpus, cores = sum(node.gpus for node in nodes), sum(node.cores for node in nodes)
    roles = [role for role in (layout.rollout, layout.actor) if role is not None]
    processes, written = sum(role.world_size for role in roles), ("|" if layout.shared else "+").join(map(str, roles))
    cores_each = max(1, min(cores // processes, *(node.cores for node in nodes)))
    on = f" on {len(nodes)} nodes" if len(nodes) > 1 else ""
    if cluster.device == "cpu" or (cluster.device == "auto" and not gpus):
        why = "as asked" if cluster.device == "cpu" else "no GPU was found"
        each = (
            f"{cores_each} of {cores} cores each"
            if cores
            else "1 core each (launcher.options.cores_per_node says how many a node has)"
        )
        turns = "; more processes than cores, so they share them" if 0 < cores < processes else ""
        sentence = f"CPU ({why}): {processes} process{'es' * (processes > 1)}, {each}{on}{turns}"
        return Devices("cpu", cores_each, sentence, _placements(layout, nodes, cores_each, 0))
    alone = f"launcher.kind={launcher.kind} with allocation={written}"
    require(launcher.options.shares_devices or not layout.shared, alone, "`+`: this scheduler shares no GPUs", "`|`")
    needed = layout.actor.world_size if layout.shared else processes
    if gpus < needed:
        raise ConfigError(
            f"allocation={written} with cluster.device={cluster.device}: expected {needed} GPUs, one a rank, found "
            f"{gpus}{on}; use a smaller allocation, or cluster.device=cpu."
        )
    each = ", ".join(f"{role.name} {role.world_size}" for role in roles)
    sentence = f"{needed} of {gpus} GPUs: {each}{on}"
    return Devices("cuda", cores_each, sentence, _placements(layout, nodes, cores_each, 1))


def _placements(layout: Layout, nodes: list[Node], cores_each: int, gpus: int) -> dict[str, tuple[str, ...]]:
    """Which process goes to which machine, by the arithmetic of the schedulers.

    Raises:
        ConfigError: there is no room.
    """
    ledger, places = Ledger(nodes), dict[str, tuple[str, ...]]()
    for role in (layout.rollout, layout.actor):
        if role is not None:
            parts = 1 if role is layout.actor else role.strategy.model_size
            beside = places[layout.rollout.name] if layout.shared and layout.rollout and role is layout.actor else ()
            spec = JobSpec(role.name, (), cpus=cores_each * parts, gpus=gpus * parts, spmd=role is layout.actor)
            try:
                places[role.name] = tuple(ledger.allocate(spec, role.world_size // parts, beside))
            except LaunchError as error:
                raise ConfigError(f"allocation: {error}") from error
    return places


def run_directory(run_dir: str, experiment: str, trial: str) -> Path:
    """Where a run keeps its files: `run_dir`, or `runs/<experiment>/<trial>`; an empty trial is the time of day.

    Raises:
        ConfigError: a file is in the way.
    """
    for setting, part in (("experiment", experiment), ("trial", trial)):
        require(".." not in Path(part).parts, setting, "a name below runs/; run_dir may be any directory", part)
    name = trial or datetime.now().strftime("%Y%m%d-%H%M%S-%f")[:-3]
    directory = Path(run_dir or Path("runs") / experiment / name).resolve()
    there = next(path for path in (directory, *directory.parents) if path.exists())
    require(there.is_dir(), "run_dir", f"a directory that can be written ({there} is a file)", str(directory))
    return directory
