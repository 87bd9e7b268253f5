"""Assignment of workers to machines. Starts nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace

from rl_contracts.errors import LaunchError
from rl_contracts.scheduler import JobSpec, Node


def used_nodes(nodes: Sequence[Node], number: int = 0, cores: int = 0, gpus: int = 0) -> list[Node]:
    """Return the first `number` machines with `cores` cores and `gpus` GPUs each; 0 means no limit."""
    return [replace(node, cores=cores or node.cores, gpus=gpus or node.gpus) for node in nodes[: number or len(nodes)]]


@dataclass
class FreeResources:
    """Free cores and GPUs of a machine."""

    node: Node
    cores: int
    """Number of free cores; negative if processes share cores."""
    gpus: int

    def suits(self, spec: JobSpec) -> bool:
        """Return whether the machine accepts this kind of role (`Node.servers`)."""
        return self.node.servers is None or self.node.servers != spec.spmd

    def take(self, spec: JobSpec) -> str:
        """Reserve the resources of one worker and return the machine's name."""
        self.gpus -= spec.gpus
        self.cores -= spec.cpus
        return self.node.name


class Ledger:
    """Machines of a run, with the resources that are free on each.

    A role gets as few machines as possible, starting with the machine with the most free resources. This keeps ranks
    that exchange gradients together, and places different roles on different machines. A GPU is never assigned twice.
    Cores are shared only if none are free, first on the least loaded machine.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._free = {node.name: FreeResources(node, node.cores, node.gpus) for node in nodes}

    @property
    def nodes(self) -> dict[str, Node]:
        """Machines by name."""
        return {name: free.node for name, free in self._free.items()}

    def add(self, node: Node) -> None:
        """Add a new or returned machine, with all its resources free."""
        self._free[node.name] = FreeResources(node, node.cores, node.gpus)

    def drop(self, name: str) -> None:
        """Remove a lost machine, together with the reservations on it."""
        self._free.pop(name, None)

    def allocate(
        self, spec: JobSpec, number: int, share_with: Sequence[str] = (), only: Collection[str] = ()
    ) -> list[str]:
        """Reserve resources for `number` additional workers of a role.

        Args:
            spec: the role.
            number: number of workers.
            share_with: machines of the workers of another role, if this role shares their devices; else empty.
            only: names of the allowed machines; empty for all.

        Returns:
            the machine name of each worker; workers of one machine are adjacent.

        Raises:
            LaunchError: the workers do not fit; the message lists the free GPUs. Nothing is reserved then.
        """
        if share_with:
            return [share_with[index * len(share_with) // number] for index in range(number)]
        suitable = [
            machine for name, machine in self._free.items() if machine.suits(spec) and (not only or name in only)
        ]
        free_gpus = {machine.node.name: machine.gpus for machine in suitable}
        names: list[str] = []
        for machine in sorted(suitable, key=lambda machine: (-machine.gpus if spec.gpus else 0, -machine.cores)):
            while len(names) < number and (machine.gpus >= spec.gpus if spec.gpus else machine.cores >= spec.cpus):
                names.append(machine.take(spec))
        loads = [] if spec.gpus else [(-machine.cores, position) for position, machine in enumerate(suitable)]
        heapify(loads)
        while len(names) < number and loads:  # workers share cores
            position = loads[0][1]
            names.append(suitable[position].take(spec))
            heapreplace(loads, (-suitable[position].cores, position))
        if len(names) < number:
            self.release(spec, names)
            listing = ", ".join(f"{name} {gpus}" for name, gpus in free_gpus.items()) or "no machine"
            raise LaunchError(
                f"role {spec.role!r}: {number} workers of {spec.gpus} GPUs do not fit (each needs a single machine); "
                f"{sum(free_gpus.values())} GPUs are free ({listing}). Use a smaller allocation, or more machines."
            )
        positions = {name: -position for position, name in enumerate(reversed(names))}
        return sorted(names, key=positions.__getitem__)

    def release(self, spec: JobSpec, places: Sequence[str]) -> None:
        """Free the resources of one worker of a role on each named machine. Lost machines are ignored."""
        for name in places:
            if name in self._free and not spec.colocated_with:
                self._free[name].gpus += spec.gpus
                self._free[name].cores += spec.cpus
