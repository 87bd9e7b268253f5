"""Which worker of a role runs on which machine: arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl_contracts.errors import LaunchError
from rl_contracts.scheduler import JobSpec, Node


@dataclass
class Room:
    """What is free on a machine."""

    node: Node
    cores: int
    """May be less than 0: processes share cores where there are fewer than threads."""
    gpus: int

    def suits(self, spec: JobSpec) -> bool:
        """Whether the machine is for such roles."""
        return self.node.servers is None or self.node.servers != spec.spmd


class Ledger:
    """The machines, and what of them is taken.

    A role takes as few machines as it can, beginning with that which has most to spare, so that ranks that exchange
    gradients stay together, and roles that do not go elsewhere. GPUs are never given twice. Cores are where it cannot
    be avoided, those of the least loaded machine first.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._rooms = {node.name: Room(node, node.cores, node.gpus) for node in nodes}

    @property
    def nodes(self) -> dict[str, Node]:
        """The machines, by name."""
        return {name: room.node for name, room in self._rooms.items()}

    def add(self, node: Node) -> None:
        """A machine that is new, or back; nothing of it is taken."""
        self._rooms[node.name] = Room(node, node.cores, node.gpus)

    def drop(self, name: str) -> None:
        """A machine that is lost, with all that was on it."""
        self._rooms.pop(name, None)

    def take(self, spec: JobSpec, number: int, beside: Sequence[str] = ()) -> list[str]:
        """Places for `number` further workers of a role.

        Args:
            spec: the role.
            number: of workers.
            beside: for a role that uses the devices of another: where that one's workers are.

        Returns:
            the name of a machine for each worker; those of one machine stand together.

        Raises:
            LaunchError: there is no room; the arithmetic. Nothing is taken then.
        """
        if beside:
            return [beside[index * len(beside) // number] for index in range(number)]
        free = {name: room.gpus for name, room in self._rooms.items() if room.suits(spec)}
        places: list[str] = []
        while len(places) < number:
            name = self._next(spec, places)
            if name is None:
                self.give_back(spec, places)
                has = ", ".join(f"{name} {gpus}" for name, gpus in free.items()) or "no machine is left"
                raise LaunchError(
                    f"role {spec.role!r}: expected room for {number} workers of {spec.gpus} GPUs, each worker's on one "
                    f"machine; free are {sum(free.values())} ({has}). Use a smaller allocation, or more machines."
                )
            places.append(name)
            self._rooms[name].gpus -= spec.gpus
            self._rooms[name].cores -= spec.cpus
        return sorted(places, key=places.index)

    def give_back(self, spec: JobSpec, places: Sequence[str]) -> None:
        """Free what workers of a role had; machines that are lost are fine."""
        for name in places:
            if name in self._rooms and not spec.beside:
                self._rooms[name].gpus += spec.gpus
                self._rooms[name].cores += spec.cpus

    def _next(self, spec: JobSpec, places: Sequence[str]) -> str | None:
        """Where the next worker goes, after `places` of the same role."""
        able = [room for room in self._rooms.values() if room.gpus >= spec.gpus and room.suits(spec)]
        roomy = able if spec.gpus else [room for room in able if room.cores >= spec.cpus]
        last = places[-1] if places and roomy else ""

        def desire(room: Room) -> tuple[bool, int, int]:
            return room.node.name == last, room.gpus if spec.gpus else 0, room.cores

        return max(roomy or able, key=desire).node.name if able else None
