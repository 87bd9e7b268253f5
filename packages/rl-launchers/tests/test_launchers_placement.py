"""Which worker goes where."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_contracts.errors import LaunchError
from rl_contracts.scheduler import JobSpec, Node
from rl_launchers.cluster.placement import Ledger


def nodes(number: int, cores: int = 2, gpus: int = 0) -> list[Node]:
    return [Node(f"node{index}", "127.0.0.1", cores, gpus) for index in range(number)]


def role(cpus: int = 1, gpus: int = 0) -> JobSpec:
    return JobSpec("role", ("true",), cpus=cpus, gpus=gpus)


def test_take_ranks_fill_a_machine_before_the_next() -> None:
    assert Ledger(nodes(2, 16, 8)).allocate(role(gpus=1), 12) == ["node0"] * 8 + ["node1"] * 4


def test_take_two_roles_lie_on_different_machines_where_there_are_enough() -> None:
    ledger = Ledger(nodes(4, 2))
    assert ledger.allocate(role(cpus=2), 2) == ["node0", "node1"]
    assert ledger.allocate(role(cpus=2), 2) == ["node2", "node3"]


def test_take_split_server_is_on_one_machine_and_the_arithmetic_is_told() -> None:
    ledger = Ledger(nodes(2, 16, 6))
    assert ledger.allocate(role(gpus=4), 2) == ["node0", "node1"]
    with pytest.raises(LaunchError, match=r"1 workers of 4 GPUs.*free are 4 \(node0 2, node1 2\)"):
        ledger.allocate(role(gpus=4), 1)
    assert ledger.allocate(role(gpus=2), 2) == ["node0", "node1"]


def test_take_beside_another_role_goes_where_that_is() -> None:
    ledger = Ledger(nodes(2, 16, 2))
    servers = ledger.allocate(role(gpus=2), 2)
    assert ledger.allocate(JobSpec("actor", ("true",), count=4, gpus=1, colocated_with="role"), 4, servers) == [
        "node0",
        "node0",
        "node1",
        "node1",
    ]


@given(
    sizes=st.lists(st.tuples(st.integers(0, 8), st.integers(1, 16)), min_size=1, max_size=6),
    roles=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), max_size=6),
)
def test_take_never_gives_a_gpu_twice_and_gives_back_all(
    sizes: list[tuple[int, int]], roles: list[tuple[int, int]]
) -> None:
    machines = [Node(f"node{i}", "h", cores, gpus) for i, (gpus, cores) in enumerate(sizes)]
    ledger, taken = Ledger(machines), []
    for gpus, number in roles:
        spec = role(gpus=gpus)
        try:
            places = ledger.allocate(spec, number)
        except LaunchError:
            continue
        assert len(places) == number
        assert len(set(places)) == sum(a != b for a, b in zip(["", *places], places, strict=False))  # each together
        taken.append((spec, places))
        for machine in machines:
            used = sum(spec.gpus * places.count(machine.name) for spec, places in taken)
            assert used <= machine.gpus
    for spec, places in taken:
        ledger.release(spec, places)
    assert {name: (room.gpus, room.cores) for name, room in ledger._rooms.items()} == {
        machine.name: (machine.gpus, machine.cores) for machine in machines
    }
