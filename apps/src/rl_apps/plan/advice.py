"""Find the smallest change of the settings with which a layout fits into the memory of the devices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rl_apps.plan.estimate import Case, Estimator
from rl_apps.plan.splits import POWERS, SAVINGS, SHARES, layouts, resized
from rl_apps.settings.device_layout import Layout
from rl_contracts.errors import ConfigError

MOST_DEVICES = 4096
"""Maximum number of devices to propose."""
SHARE_COST = 1
"""Rank of the cost of less memory for a server on shared devices."""


@dataclass(frozen=True)
class Advice:
    """Change with which a layout fits."""

    settings: tuple[str, ...]
    """Settings to add; empty if no change helps."""
    devices: int = 0
    """Number of devices, if the available ones are too few; otherwise 0."""
    case: Case | None = None
    """The layout with the change."""


@dataclass(frozen=True)
class Change:
    """Change of settings or of the layout."""

    cost: int
    """Rank of the cost in speed; the cheapest has the least."""
    settings: tuple[str, ...] = ()
    layout: Layout | None = None


def advise(estimator: Estimator, case: Case, devices: int) -> Advice:
    """Return the fewest changes, at most three, with which a layout fits, or else the number of devices needed.

    Args:
        estimator: estimator of the run.
        case: the layout that does not fit.
        devices: number of available devices.
    """
    changes = sorted(_changes(estimator, case, devices), key=lambda change: change.cost)
    for change in changes:
        if advice := _advice(estimator, (change,)):
            return advice
    if _may_fit(estimator, changes):
        for number in (2, 3):
            groups = [group for group in itertools.combinations(changes, number) if _combine(group)]
            for group in sorted(groups, key=lambda group: sum(change.cost for change in group)):
                if advice := _advice(estimator, group):
                    return advice
    return _with_more_devices(estimator, case, devices)


def _advice(estimator: Estimator, changes: Sequence[Change]) -> Advice | None:
    """Return the advice to make these changes, if the run then fits."""
    settings = tuple(text for change in changes for text in change.settings)
    layout = next((change.layout for change in changes if change.layout), None)
    if (case := _fits(estimator, settings, layout)) is None:
        return None
    return Advice((f"allocation={case.allocation}", *settings) if layout else settings, 0, case)


def _may_fit(estimator: Estimator, changes: Sequence[Change]) -> bool:
    """Whether the run fits with all changes of the trainer together, so that several changes may be enough."""
    shares = [change.settings for change in changes if change.cost == SHARE_COST] or [()]
    values = {text.partition("=")[0]: text for change in changes for text in change.settings}
    values.pop("rollout.server.memory_share", None)
    settings = tuple(text for text in values.values() if _is_valid(estimator, text))
    if not _is_valid(estimator, *settings):
        return True
    layouts = [None, *(change.layout for change in changes if change.layout)]
    return any(_fits(estimator, (*settings, *share), layout) for share in shares for layout in layouts)


def _changes(estimator: Estimator, case: Case, devices: int) -> Iterator[Change]:
    """Yield the changes to try, each with the rank of its cost."""
    config = case.run.config
    yield from (Change(SHARE_COST, (text,)) for text in _smaller_shares(case))
    yield Change(2, (SAVINGS[0],))
    yield from (Change(3, layout=layout) for layout in _other_layouts(case, devices, context=False))
    yield Change(4, (SAVINGS[1],))
    yield Change(5, ("model.dtype=bfloat16",))
    yield from (Change(6, layout=layout) for layout in _other_layouts(case, devices, context=True))
    longest = config.rollout.generation.max_new_tokens + case.rates["prompt_tokens"].value
    for divisor in (2, 4):
        tokens = config.actor.micro_batch.max_tokens // divisor
        if tokens >= longest:
            yield Change(7, (f"actor.micro_batch.max_tokens={tokens}",))
    yield Change(8, ("actor.engine.offload=true",))


def _smaller_shares(case: Case) -> Iterator[str]:
    """Yield smaller fractions of a shared device for the server."""
    share = getattr(case.run.config.rollout.server, "memory_share", 0.0)
    if case.run.layout.shared:
        yield from (f"rollout.server.memory_share={smaller}" for smaller in SHARES if smaller < share)


def _other_layouts(case: Case, devices: int, context: bool) -> list[Layout]:
    """Return the layouts of the same devices with larger shards, the most similar ones first.

    Args:
        context: whether the sequences are split over more ranks, or the model over more ranks.
    """
    layout = case.run.layout
    assert layout.rollout is not None
    server, actor = layout.rollout.strategy, layout.actor.strategy
    found = []
    for tensor, factor in itertools.product(POWERS, POWERS[1:] if context else POWERS[:1]):
        sized = replace(
            layout,
            rollout=resized(layout.rollout, tensor=server.tensor * tensor),
            actor=resized(layout.actor, context=actor.context * factor),
        )
        found += [(tensor, factor, each) for each in layouts(sized, devices)]

    def distance(entry: tuple[int, int, Layout]) -> tuple[int, int, int]:
        tensor, factor, other = entry
        moved = abs(other.actor.world_size - layout.actor.world_size)
        return (tensor > 1) + (moved > 0), moved, tensor * factor

    batch = case.setup.batch_size
    nearest = [each for *_, each in sorted(found, key=distance)]
    return [each for each in nearest if each != layout and batch % each.actor.strategy.data == 0]


def _combine(changes: Sequence[Change]) -> bool:
    """Whether changes are independent."""
    names = [text.partition("=")[0] for change in changes for text in change.settings]
    return len(set(names)) == len(names) and sum(change.layout is not None for change in changes) <= 1


def _fits(estimator: Estimator, settings: tuple[str, ...], layout: Layout | None) -> Case | None:
    """Estimate a layout and return it if it is valid and fits."""
    try:
        case = estimator.case(settings, layout)
    except ConfigError:  # the engine has no such setting, or rejects it here
        return None
    return None if case.too_large else case


def _with_more_devices(estimator: Estimator, case: Case, devices: int) -> Advice:
    """Return the least number of devices, in powers of two times the available ones, and how to use them."""
    layout, shares = case.run.layout, [(text,) for text in _smaller_shares(case)]
    savings = tuple(text for text in SAVINGS if _is_valid(estimator, text))
    while devices < MOST_DEVICES:
        devices *= 2
        for larger in _larger(layout, devices):
            for share in ((), *shares):
                if found := _fits(estimator, (*savings, *share), larger):
                    return Advice((f"allocation={found.allocation}", *savings, *share), devices, found)
    return Advice(())


def _larger(layout: Layout, devices: int) -> Iterator[Layout]:
    """Yield layouts of the devices, half of them for each role, or all if they are shared."""
    assert layout.rollout is not None
    each = devices if layout.shared else devices // 2
    for tensor, context in itertools.product(POWERS, POWERS):
        if each % tensor == each % context == 0:
            rollout = resized(layout.rollout, data=each // tensor, tensor=tensor)
            yield replace(layout, rollout=rollout, actor=resized(layout.actor, data=each // context, context=context))


def _is_valid(estimator: Estimator, *settings: str) -> bool:
    """Whether the components of the run accept settings."""
    try:
        estimator.case(settings)
    except ConfigError:
        return False
    return True
