"""`rl plan`: predict memory, batch counts, tokens per second and the best device split of a config on a cluster."""

from __future__ import annotations

from dataclasses import dataclass

from rl_apps.plan.advice import Advice, advise
from rl_apps.plan.estimate import Case, Estimator, estimator_of
from rl_apps.plan.inputs import Inputs
from rl_apps.plan.search import Candidate, preferred, search
from rl_apps.plan.simulation import Outcome, simulate
from rl_apps.plan.splits import Splits, free_splits, given_splits
from rl_contracts.config import require
from rl_contracts.errors import ConfigError


@dataclass(frozen=True)
class Plan:
    """Results of a plan."""

    inputs: Inputs
    """Inputs of the planned layout."""
    case: Case
    """The given layout, or the best one if the settings have no allocation."""
    outcome: Outcome | None
    """Simulated outcome of the layout; None if it does not fit."""
    advice: Advice | None
    """Smallest change with which the layout fits; None if it fits."""
    splits: Splits
    candidates: list[Candidate]
    """Simulated splits, the fastest first."""
    devices: int
    """Number of devices of the splits."""
    command: str
    """Command line of the best split; empty if there is none."""


def plan(inputs: Inputs, splits: bool = True) -> Plan:
    """Plan a run.

    Args:
        inputs: inputs of the plan.
        splits: whether to try other splits of the devices.

    Raises:
        ConfigError: the settings cannot be planned, or a rate is unknown.
        DataError: see `measured_steps` and `measured_servers`.
        ModelError: see `read_sizes`.
    """
    estimator = estimator_of(inputs)
    if splits and inputs.gpu and not inputs.has_allocation:
        return _plan_devices(estimator)
    case = estimator.case()
    devices = _devices(case)
    found = given_splits(estimator, devices) if splits else Splits()
    candidates = search({name: each.setup for name, each in found.cases.items()})
    return _result(estimator, found, candidates, devices)


def _plan_devices(estimator: Estimator) -> Plan:
    """Plan the best allocation of the given devices.

    Raises:
        ConfigError: no layout is possible.
    """
    cluster = estimator.run().config.cluster
    per_node = cluster.devices or 1
    devices = max(cluster.nodes, 1) * per_node
    found = free_splits(estimator, devices, per_node)
    candidates = search({name: case.setup for name, case in found.cases.items()})
    if candidates:
        return _result(_with_best(estimator, found, candidates), found, candidates, devices)
    too_large = [split for split in found.left_out if split.memory]
    if not too_large:
        raise ConfigError(f"rl plan: no allocation of {devices} devices is possible: {found.left_out[0].reason}")
    nearest = min(too_large, key=lambda split: split.memory.total if split.memory else 0.0)
    return _result(estimator.with_settings(f"allocation={nearest.allocation}"), found, candidates, devices)


def _with_best(estimator: Estimator, found: Splits, candidates: list[Candidate]) -> Estimator:
    """Return the estimator with the settings of the best split."""
    best = preferred(candidates)
    staleness = best.setup.max_staleness
    changed = (
        () if staleness == estimator.run().config.rollout.max_staleness else (f"rollout.max_staleness={staleness}",)
    )
    return estimator.with_settings(*found.changes[best.allocation], f"allocation={best.allocation}", *changed)


def _result(estimator: Estimator, found: Splits, candidates: list[Candidate], devices: int) -> Plan:
    """Return the plan of the layout in the settings, with advice if it does not fit."""
    case = estimator.case()
    command = _with_best(estimator, found, candidates).inputs.command() if candidates else ""
    if case.too_large:
        return Plan(estimator.inputs, case, None, advise(estimator, case, devices), found, candidates, devices, command)
    return Plan(estimator.inputs, case, simulate(case.setup), None, found, candidates, devices, command)


def _devices(case: Case) -> int:
    """Return the number of devices of the cluster in the settings, or else of the allocation."""
    cluster, layout = case.run.config.cluster, case.run.layout
    assert layout.rollout is not None
    per_role = [layout.actor.world_size, layout.rollout.world_size]
    needed = max(per_role) if layout.shared else sum(per_role)
    available = max(cluster.nodes, 1) * cluster.devices or needed
    require(available >= needed, "cluster.nodes * cluster.devices", f"at least {needed}, for the allocation", available)
    return available
