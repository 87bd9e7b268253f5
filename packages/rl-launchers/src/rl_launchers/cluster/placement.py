"""Which worker of a role runs on which machine: arithmetic only."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace

from rl_contracts.errors import LaunchError
from rl_contracts.scheduler import JobSpec, Node


def used_nodes(nodes: Sequence[Node], number: int = 0, cores: int = 0, gpus: int = 0) -> list[Node]:
    """What a run uses of machines: the first `number`, and of each so many cores and GPUs; 0: what there is."""
    return [replace(node, cores=cores or node.cores, gpus=gpus or node.gpus) for node in nodes[: number or len(nodes)]]


@dataclass
class FreeResources:
    """What is free on a machine."""

    node: Node
    cores: int
    """May be less than 0: processes share cores where there are fewer than threads."""
    gpus: int

    def suits(self, spec: JobSpec) -> bool:
        """Whether the machine is for such roles."""
        return self.node.servers is None or self.node.servers != spec.spmd

    def take(self, spec: JobSpec) -> str:
        """Give what a worker needs, and say the machine's name."""
        self.gpus -= spec.gpus
        self.cores -= spec.cpus
        return self.node.name


class Ledger:
    """The machines, and what of them is taken.

    A role takes as few machines as it can, beginning with that which has most to spare, so that ranks that exchange
    gradients stay together, and roles that do not go elsewhere. GPUs are never given twice. Cores are where it cannot
    be avoided, those of the least loaded machine first.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._rooms = {node.name: FreeResources(node, node.cores, node.gpus) for node in nodes}

    @property
    def nodes(self) -> dict[str, Node]:
        """The machines, by name."""
        return {name: room.node for name, room in self._rooms.items()}

    def add(self, node: Node) -> None:
        """A machine that is new, or back; nothing of it is taken."""
        self._rooms[node.name] = FreeResources(node, node.cores, node.gpus)

    def drop(self, name: str) -> None:
        """A machine that is lost, with all that was on it."""
        self._rooms.pop(name, None)

    def allocate(self, spec: JobSpec, number: int, beside: Sequence[str] = (), only: Collection[str] = ()) -> list[str]:
        """Places for `number` further workers of a role.

        Args:
            spec: the role.
            number: of workers.
            beside: for a role that uses the devices of another: where that one's workers are.
            only: machines among which it may choose; empty: all.

        Returns:
            the name of a machine for each worker; those of one machine stand together.

        Raises:
            LaunchError: there is no room; the arithmetic. Nothing is taken then.
        """
        if beside:
            return [beside[index * len(beside) // number] for index in range(number)]
        able = [room for name, room in self._rooms.items() if room.suits(spec) and (not only or name in only)]
        free = {room.node.name: room.gpus for room in able}
        places: list[str] = []
        for room in sorted(able, key=lambda room: (-room.gpus if spec.gpus else 0, -room.cores)):
            while len(places) < number and (room.gpus >= spec.gpus if spec.gpus else room.cores >= spec.cpus):
                places.append(room.take(spec))
        loads = [] if spec.gpus else [(-room.cores, order) for order, room in enumerate(able)]
        heapify(loads)
        while len(places) < number and loads:  # cores are shared
            order = loads[0][1]
            places.append(able[order].take(spec))
            heapreplace(loads, (-able[order].cores, order))
        if len(places) < number:
            self.release(spec, places)
            has = ", ".join(f"{name} {gpus}" for name, gpus in free.items()) or "no machine is left"
            raise LaunchError(
                f"role {spec.role!r}: expected room for {number} workers of {spec.gpus} GPUs, each worker's on one "
                f"machine; free are {sum(free.values())} ({has}). Use a smaller allocation, or more machines."
            )
        first = {name: -order for order, name in enumerate(reversed(places))}
        return sorted(places, key=first.__getitem__)

    def release(self, spec: JobSpec, places: Sequence[str]) -> None:
        """Free what workers of a role had; machines that are lost are fine."""
        for name in places:
            if name in self._rooms and not spec.colocated_with:
                self._rooms[name].gpus += spec.gpus
                self._rooms[name].cores += spec.cpus
