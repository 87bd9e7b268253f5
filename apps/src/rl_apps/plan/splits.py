"""Splits of the devices between servers and trainer: those that fit, and the reasons why others are left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from rl_apps.plan.estimate import Case, Estimator
from rl_apps.plan.memory import SERVER_DEVICE, DeviceMemory
from rl_apps.settings.device_layout import Layout, layout_of
from rl_contracts.allocation import Component
from rl_contracts.errors import ConfigError

SAVINGS = ("actor.engine.gradient_checkpointing=true", "actor.engine.sync_every_micro_batch=true")
"""Settings that save memory of the trainer, cheapest in time first."""
LEVELS = tuple(SAVINGS[:number] for number in range(len(SAVINGS) + 1))
"""No savings, the first one, and so on."""
SERVERS, TRAINER = "vllm", "fsdp"
"""Default backends of a search on GPUs."""
SHARES = (0.7, 0.6, 0.5, 0.4, 0.3)
"""Fractions of a shared device's memory to try for the server."""
POWERS = (1, 2, 4, 8)
"""Ranks to try for a server, and context-parallel ranks to try for a trainer replica."""

type Alternative = tuple[tuple[str, ...], Layout]
"""Settings to change, and a layout."""


@dataclass(frozen=True)
class LeftOut:
    """Split that is not simulated."""

    allocation: str
    trainer_devices: int
    kind: str
    """`batch`, `memory` or `rejected`."""
    reason: str
    memory: DeviceMemory | None = None
    """Device whose memory is too small."""


@dataclass(frozen=True)
class Splits:
    """Splits of the devices."""

    cases: dict[str, Case] = field(default_factory=dict)
    """Splits that fit, by allocation."""
    changes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Settings that a split changes, by allocation."""
    left_out: list[LeftOut] = field(default_factory=list)


def given_splits(estimator: Estimator, devices: int) -> Splits:
    """Return the splits in which a server and a trainer replica have as many devices as in the given allocation."""
    layout = estimator.run().layout
    return _first_fits(estimator, ([((), each)] for each in layouts(layout, devices)))


def free_splits(estimator: Estimator, devices: int, per_node: int) -> Splits:
    """Return the splits of all devices, each with the sizes and the least savings of memory with which it fits.

    Args:
        estimator: estimator of the run.
        devices: number of devices.
        per_node: number of devices of a machine, which a server does not exceed.
    """
    options = [_shared_alternatives(estimator, devices)] if devices == per_node else []
    base = _base("+")
    size = server_size(estimator, base, per_node)
    for trainers in range(1, devices - size + 1):
        sizes = [_layout(estimator, "+", devices - trainers, size, trainers, context) for context in POWERS]
        options.append([((base, *level), layout) for layout in sizes if layout for level in LEVELS])
    return _first_fits(estimator, options)


def layouts(layout: Layout, devices: int) -> Iterator[Layout]:
    """Yield the layouts of the devices with other numbers of servers and trainer replicas.

    Numbers of replicas whose ranks do not divide into expert groups are left out.
    """
    assert layout.rollout is not None
    server, replica = layout.rollout.strategy.model_size, layout.actor.strategy.model_size
    for replicas in range(1, devices // replica + 1):
        trainers = replicas * replica
        servers = (devices if layout.shared else devices - trainers) // server
        if servers >= 1 and not (layout.shared and trainers < devices):
            try:
                actor = resized(layout.actor, data=replicas)
            except ConfigError:
                continue
            yield replace(layout, rollout=resized(layout.rollout, data=servers), actor=actor)


def server_size(estimator: Estimator, base: str, most: int) -> int:
    """Return the smallest number of devices of a server that hold the weights and a completion, at most `most`."""
    sizes = [size for size in POWERS if size <= most]
    for size in sizes:
        layout = _layout(estimator, "+", size, size, 1, 1)
        try:
            case = estimator.case((base,), layout)
        except ConfigError:
            continue
        if all(memory.fits for memory in case.memory if memory.owner == SERVER_DEVICE):
            return size
    return sizes[-1]


def _base(sign: str) -> str:
    return f"allocation={SERVERS}:d1{sign}{TRAINER}:d1"


def _shared_alternatives(estimator: Estimator, devices: int) -> list[Alternative]:
    """Return the layouts in which trainer and servers share all devices, with less and less memory for the servers."""
    base = _base("|")
    is_set = any(text.startswith("rollout.server.memory_share=") for text in estimator.inputs.settings)
    shares = [()] if is_set else [(f"rollout.server.memory_share={share}",) for share in SHARES]
    sizes = [
        layout
        for server in POWERS
        for context in POWERS
        if (layout := _layout(estimator, "|", devices, server, devices, context))
    ]
    return [((base, *level, *share), layout) for layout in sizes for level in LEVELS for share in shares]


def _layout(
    estimator: Estimator, sign: str, server_devices: int, server: int, trainer_devices: int, context: int
) -> Layout | None:
    """Return a layout of the default backends, or None if the sizes do not divide the devices or the batch."""
    if server_devices < server or trainer_devices % context or (sign == "|" and server_devices % server):
        return None
    replicas = trainer_devices // context
    text = f"{SERVERS}:d{server_devices // server}t{server}{sign}{TRAINER}:d{replicas}c{context}"
    return layout_of(text, estimator.inputs.app.servers)


def resized(component: Component, **sizes: int) -> Component:
    """Return a component with other sizes of its parallel layout."""
    return replace(component, strategy=replace(component.strategy, **sizes))


def _first_fits(estimator: Estimator, options: Iterable[Sequence[Alternative]]) -> Splits:
    """Take the first alternative of each option that fits; leave out the option if none does."""
    found = Splits()
    for alternatives in options:
        reason: LeftOut | None = None
        for changes, layout in alternatives:
            result = _try(estimator, changes, layout)
            if isinstance(result, Case):
                found.cases[result.allocation] = result
                found.changes[result.allocation] = changes
                reason = None
                break
            reason = result if reason is None or result.kind == "memory" else reason
        if reason is not None:
            found.left_out.append(reason)
    return found


def _try(estimator: Estimator, changes: tuple[str, ...], layout: Layout) -> Case | LeftOut:
    """Estimate a layout and return it if it fits, otherwise the reason."""
    batch, replicas = estimator.run().config.data.batch_size, layout.actor.strategy.data
    allocation, trainers = f"{layout.rollout}{'|' if layout.shared else '+'}{layout.actor}", layout.actor.world_size
    if batch % replicas:
        text = f"{replicas} replicas do not divide data.batch_size={batch}"
        return LeftOut(allocation, trainers, "batch", text)
    try:
        case = estimator.case(changes, layout)
    except ConfigError as error:
        return LeftOut(allocation, trainers, "rejected", str(error).split(". ")[0])
    if case.too_large:
        return LeftOut(allocation, trainers, "memory", str(case.too_large[0]), case.too_large[0])
    return case
