"""Assignment of workers to machines."""

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


def test_allocate_ranks_fill_one_machine_before_the_next() -> None:
    assert Ledger(nodes(2, 16, 8)).allocate(role(gpus=1), 12) == ["node0"] * 8 + ["node1"] * 4


def test_allocate_two_roles_get_different_machines_if_enough() -> None:
    ledger = Ledger(nodes(4, 2))
    assert ledger.allocate(role(cpus=2), 2) == ["node0", "node1"]
    assert ledger.allocate(role(cpus=2), 2) == ["node2", "node3"]


def test_allocate_server_larger_than_free_machine_lists_free_gpus() -> None:
    ledger = Ledger(nodes(2, 16, 6))
    assert ledger.allocate(role(gpus=4), 2) == ["node0", "node1"]
    with pytest.raises(LaunchError, match=r"1 workers of 4 GPUs.*4 GPUs are free \(node0 2, node1 2\)"):
        ledger.allocate(role(gpus=4), 1)
    assert ledger.allocate(role(gpus=2), 2) == ["node0", "node1"]


def test_allocate_colocated_role_gets_machines_of_other_role() -> None:
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
def test_allocate_and_release_never_assign_a_gpu_twice(
    sizes: list[tuple[int, int]], roles: list[tuple[int, int]]
) -> None:
    machines = [Node(f"node{i}", "h", cores, gpus) for i, (gpus, cores) in enumerate(sizes)]
    ledger, allocations = Ledger(machines), []
    for gpus, number in roles:
        spec = role(gpus=gpus)
        try:
            places = ledger.allocate(spec, number)
        except LaunchError:
            continue
        assert len(places) == number
        # workers of a machine are adjacent
        assert len(set(places)) == sum(a != b for a, b in zip(["", *places], places, strict=False))
        allocations.append((spec, places))
        for machine in machines:
            used = sum(spec.gpus * places.count(machine.name) for spec, places in allocations)
            assert used <= machine.gpus
    for spec, places in allocations:
        ledger.release(spec, places)
    assert {name: (free.gpus, free.cores) for name, free in ledger._free.items()} == {
        machine.name: (machine.gpus, machine.cores) for machine in machines
    }
