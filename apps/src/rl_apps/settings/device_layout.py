"""Placement of a run: allocation, machines, devices and run directory, checked before any process starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import ClassVar

from rl_contracts.allocation import Allocation, Component, ComponentKind, ParallelStrategy
from rl_contracts.config import Settings, bounded, choice, require
from rl_contracts.errors import ConfigError, LaunchError
from rl_contracts.scheduler import JobSpec, Node
from rl_launchers import LauncherConfig
from rl_launchers.cluster.placement import Ledger, used_nodes


@dataclass
class ClusterConfig(Settings):
    """The machines and devices of a run."""

    setting: ClassVar[str] = "cluster"
    device: str = choice("auto", ("auto", "cpu", "cuda"))
    """Device of all models: `cpu`, `cuda`, or `auto` (GPUs if there are any, otherwise the CPU; too few GPUs are an
    error)."""
    nodes: int = bounded(0, "0 (all available) or more", lambda number: number >= 0)
    """Number of machines; 0: all machines of the scheduler, or one. With Slurm, `launcher.options.server_nodes` are
    included, and `spare_nodes` are not."""
    devices: int = bounded(0, "0 (all available) or more", lambda number: number >= 0)
    """GPUs per machine; 0: as detected by the scheduler, or none with `device=cpu`."""
    cores: int = bounded(0, "0 (all available) or more", lambda number: number >= 0)
    """Cores per machine; 0: as detected by the scheduler. If there are fewer cores than processes, processes share
    them."""

    def request_from(self, launcher: LauncherConfig) -> None:
        """Pass these settings to the settings of the scheduler.

        Raises:
            ConfigError: the scheduler needs more machines.
        """
        assert launcher.options is not None
        gpus = 0 if self.device == "cpu" else self.devices or None
        launcher.options.use_cluster(self.nodes, self.cores, gpus)

    def of(self, launcher: LauncherConfig, plan: bool = False) -> list[Node]:
        """Return the machines: the resources of the scheduler, restricted by these settings.

        Args:
            launcher: settings of the launcher, with its scheduler.
            plan: whether this is a dry run, which needs no cluster.

        Raises:
            ConfigError: the resources are unknown, or there are fewer machines than `nodes`.
        """
        assert launcher.options is not None
        available, kind = launcher.options.planned() if plan else launcher.options.resources(), launcher.kind
        if available is None:
            nodes = [Node(f"node{index}", "", 0) for index in range(self.nodes or 1)]
        else:
            nodes = list(available.nodes) or [Node("this machine", "", available.cores, available.gpus)]
            names = ", ".join(node.name for node in nodes)
            fits = f"at most {len(nodes)}, which launcher.kind={kind} has ({names})"
            require(self.nodes <= len(nodes), "cluster.nodes", fits, self.nodes)
        chosen = used_nodes(nodes, self.nodes, self.cores, self.devices)
        unknown = "a number, because this scheduler cannot detect it (for GPUs, set cluster.devices too)"
        least = min(node.cores for node in chosen)
        require(plan or least > 0, f"cluster.cores with launcher.kind={kind}", unknown, least)
        return chosen

    def require_there(self, launcher: LauncherConfig) -> None:
        """Reject more `devices` than the scheduler finds. A dry run (`--dry-run`) does not call this.

        Raises:
            ConfigError: a machine has fewer GPUs than `devices`.
        """
        assert launcher.options is not None
        available = launcher.options.resources()
        if available is not None:
            most = max((node.gpus for node in available.nodes), default=available.gpus)
            expected = f"at most {most} on a machine, as launcher.kind={launcher.kind} finds"
            require(self.devices <= most, "cluster.devices", expected, self.devices)


@dataclass(frozen=True)
class Layout:
    """One trainer, and at most one role of servers."""

    actor: Component
    rollout: Component | None
    shared: bool = False
    """True if trainer and servers use the same GPUs."""
    trains: bool = True
    """False if `actor` is one process that evaluates, without a model or GPU."""


@dataclass(frozen=True)
class Devices:
    """Placement of the processes of a run."""

    kind: str
    """`cpu` or `cuda`."""
    cores_each: int
    """Cores and threads per rank of the trainer or of a server, so that together they use all cores."""
    sentence: str
    """One sentence for the user: the devices used, out of those available."""
    places: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Machine of each process, by role. A server of several ranks has one entry."""

    def together(self, one: str, other: str) -> bool:
        """Return whether all processes of two roles are on the same machine."""
        return len({*self.places[one], *self.places[other]}) == 1


def layout_of(allocation: str, servers: str) -> Layout:
    """Parse an allocation and return its trainer and servers.

    Args:
        servers: whether servers are `required`, `optional` or `rejected`; `alone`: required, without a trainer.

    Raises:
        ConfigError: the allocation does not have exactly one trainer, lacks required servers, or has rejected ones.
    """
    parsed = Allocation.parse(allocation)
    if servers == "alone":
        expected = "servers of one kind and no trainer, such as vllm:d1"
        require(len(parsed.components) == len(parsed.inference) == 1, "allocation", expected, allocation)
        process = Component("none", "evaluate", ParallelStrategy(), ComponentKind.TRAIN)
        return Layout(process, parsed.inference[0], trains=False)
    example = "One server and one trainer are embedded:d1+fsdp:d1."
    if len(parsed.train) != 1:
        raise ConfigError(f"allocation={allocation}: expected one trainer, found {len(parsed.train)}. {example}")
    (actor,), server_kinds = parsed.train, len(parsed.inference)
    if server_kinds > 1 or (servers == "required" and not server_kinds):
        raise ConfigError(f"allocation={allocation}: expected servers of one kind, found {server_kinds}. {example}")
    if servers == "rejected" and server_kinds:
        raise ConfigError(f"allocation={allocation}: this command uses no servers; use {actor} alone.")
    return Layout(actor, parsed.inference[0] if server_kinds else None, shared=len(parsed.groups[0]) > 1)


def devices_of(layout: Layout, cluster: ClusterConfig, launcher: LauncherConfig, plan: bool = False) -> Devices:
    """Return the placement of a run.

    Each rank of trainer and servers has its own GPU. With `|`, one trainer rank and one server rank share each GPU.
    Cores may be shared. A `plan` starts nothing and needs no cluster.

    Raises:
        ConfigError: there are fewer GPUs than needed, a server fits on no machine, the resources are unknown, or the
            scheduler cannot share GPUs.
    """
    assert launcher.options is not None
    nodes = cluster.of(launcher, plan)
    gpus, cores = sum(node.gpus for node in nodes), sum(node.cores for node in nodes)
    roles = [role for role in (layout.rollout, layout.actor) if role is not None]
    users = [role for role in roles if layout.trains or role is not layout.actor]  # of GPUs
    processes, expression = (
        sum(role.world_size for role in roles),
        ("|" if layout.shared else "+").join(map(str, users)),
    )
    cores_each = max(1, min(cores // processes, *(node.cores for node in nodes)))
    on = f" on {len(nodes)} nodes" if len(nodes) > 1 else ""
    if cluster.device == "cpu" or (cluster.device == "auto" and not gpus):
        why = "cluster.device=cpu" if cluster.device == "cpu" else "no GPU was found"
        each = (
            f"{cores_each} of {cores} cores each"
            if cores
            else "1 core each (cluster.cores sets the number of cores per node)"
        )
        sharing = "; more processes than cores, so they share them" if 0 < cores < processes else ""
        sentence = f"CPU ({why}): {processes} process{'es' * (processes > 1)}, {each}{on}{sharing}"
        return Devices("cpu", cores_each, sentence, _placements(layout, nodes, cores_each, 0))
    setting = f"launcher.kind={launcher.kind} with allocation={expression}"
    require(launcher.options.shares_devices or not layout.shared, setting, "`+`: this scheduler shares no GPUs", "`|`")
    needed = layout.actor.world_size if layout.shared else sum(role.world_size for role in users)
    if gpus < needed:
        raise ConfigError(
            f"allocation={expression} with cluster.device={cluster.device}: expected {needed} GPUs, one per rank, "
            f"found {gpus}{on}; use a smaller allocation, or cluster.device=cpu."
        )
    each = ", ".join(f"{role.name} {role.world_size}" for role in users)
    sentence = f"{needed} of {gpus} GPUs: {each}{on}"
    return Devices("cuda", cores_each, sentence, _placements(layout, nodes, cores_each, 1))


def _placements(layout: Layout, nodes: list[Node], cores_each: int, gpus: int) -> dict[str, tuple[str, ...]]:
    """Return the machine of each process by role, with the placement rules of the schedulers.

    Raises:
        ConfigError: there is no room on the machines.
    """
    ledger, places = Ledger(nodes), dict[str, tuple[str, ...]]()
    for role in (layout.rollout, layout.actor):
        if role is not None:
            ranks = 1 if role is layout.actor else role.strategy.model_size
            each = gpus if layout.trains or role is not layout.actor else 0
            preferred = places[layout.rollout.name] if layout.shared and layout.rollout and role is layout.actor else ()
            spec = JobSpec(role.name, (), cpus=cores_each * ranks, gpus=each * ranks, spmd=role is layout.actor)
            try:
                places[role.name] = tuple(ledger.allocate(spec, role.world_size // ranks, preferred))
            except LaunchError as error:
                raise ConfigError(f"allocation: {error}") from error
    return places


def run_directory(run_dir: str, experiment: str, trial: str) -> Path:
    """Return the directory of a run: `run_dir`, or `runs/<experiment>/<trial>`. An empty trial becomes a timestamp.

    Raises:
        ConfigError: a file has the name of the directory or of one of its parents.
    """
    for setting, value in (("experiment", experiment), ("trial", trial)):
        require(
            ".." not in Path(value).parts,
            setting,
            "a name without `..`, for a directory below runs/; run_dir may be any directory",
            value,
        )
    name = trial or datetime.now().strftime("%Y%m%d-%H%M%S-%f")[:-3]
    directory = Path(run_dir or Path("runs") / experiment / name).resolve()
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    require(existing.is_dir(), "run_dir", f"a directory that can be written ({existing} is a file)", str(directory))
    return directory
