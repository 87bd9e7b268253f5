"""The best split of devices between servers and trainers, and the best staleness: each is simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from rl_apps.plan.rates import Rates
from rl_apps.plan.simulation import Outcome, Setup, simulate

STALENESS = (0, 1, 2, 4, 8)
GAIN = 1.01
"""A larger staleness is tried for as long as the one before brought so much."""
AS_GOOD = 0.98
"""Of the best throughput: what reaches it with less staleness is preferred."""
EPISODES = 768
"""Outstanding at least, in a search; larger runs are searched in miniature."""
GROUPS = 16
"""Of a step, at least."""
SPLITS = 10
"""That are tried; where there are more, every so many."""


@dataclass(frozen=True)
class Candidate:
    """A way to use the devices, and what comes of it."""

    setup: Setup
    """At its full size."""
    outcome: Outcome
    """In miniature, where the size says so."""
    size: int
    """The simulated run has one `size`-th of the prompts, servers and trainers."""

    @property
    def tokens_per_s(self) -> float:
        """Of the full size."""
        return self.outcome.tokens_per_s * self.size


def search(
    setup: Setup,
    devices: int,
    server_devices: int,
    replica_devices: int,
    fits: Callable[[int], bool] = lambda replicas: True,
) -> list[Candidate]:
    """Simulate the splits of devices at growing staleness; the best first.

    The trainer's replicas divide the prompts of a step, as a run asks for, and servers have what is left.

    Args:
        setup: what is known of the run.
        devices: of the whole cluster.
        server_devices: of one server.
        replica_devices: of one replica of the trainer.
        fits: whether so many replicas have room for what each rank holds.
    """
    found: list[Candidate] = []
    possible = _splits(setup, devices, server_devices, replica_devices)
    splits = [split for split in possible if fits(split.replicas)]
    for split in splits[:: -(-len(splits) // SPLITS) or 1]:
        best = 0.0
        for staleness in STALENESS:
            candidate = _try(replace(split, max_staleness=staleness))
            found.append(candidate)
            if candidate.tokens_per_s < GAIN * best:
                break
            best = candidate.tokens_per_s
    return sorted(found, key=lambda candidate: -candidate.tokens_per_s)


def preferred(candidates: list[Candidate]) -> Candidate:
    """The one with the least staleness, and then the most tokens, of those that are nearly as fast as the fastest."""
    good = [each for each in candidates if each.tokens_per_s >= AS_GOOD * candidates[0].tokens_per_s]
    return min(good, key=lambda each: (each.setup.max_staleness, -each.tokens_per_s))


def _splits(setup: Setup, devices: int, server_devices: int, replica_devices: int) -> Iterator[Setup]:
    for replicas in range(1, setup.batch_size + 1):
        trainers = replicas * replica_devices
        servers = (devices if setup.shared else devices - trainers) // server_devices
        if setup.batch_size % replicas or servers < 1 or trainers > devices:
            continue
        if setup.shared and trainers < devices:  # all devices do both
            continue
        yield replace(setup, servers=servers, replicas=replicas, trainer_devices=trainers, max_concurrent=None)


def _try(setup: Setup) -> Candidate:
    size = _divisor(setup)
    return Candidate(setup, simulate(miniature(setup, size)), size)


def _divisor(setup: Setup) -> int:
    """By how much a run can be smaller and still have enough groups in a step."""
    least = max(GROUPS, EPISODES // ((setup.max_staleness + 1) * setup.group_size))
    fits = (n for n in range(1, setup.batch_size // least + 1) if setup.batch_size % n == 0)
    return max(fits, default=1)


def miniature(setup: Setup, size: int) -> Setup:
    """A run of one `size`-th: as many prompts for each server and each trainer, and for each replica where that can be.
    Servers that do not divide are fewer and as much faster. The slowest of fewer answers is less slow, so what waits
    for it, at little staleness, looks better than it is."""
    if size == 1:
        return setup
    batch, servers = setup.batch_size // size, max(1, round(setup.servers / size))
    replicas = max(n for n in range(1, batch + 1) if batch % n == 0 and n <= max(1.0, setup.replicas / size))
    return replace(
        setup,
        rates=_faster(setup.rates, setup.servers / size / servers),
        batch_size=batch,
        servers=servers,
        replicas=replicas,
        trainer_devices=setup.trainer_devices / size,
    )


def _faster(rates: Rates, factor: float) -> Rates:
    """A server that does the work of so many in the same time: with so many times the answers, a pass takes as long."""
    return replace(
        rates,
        decode_seconds_per_answer=rates.decode_seconds_per_answer / factor,
        decode_seconds_per_context_token=rates.decode_seconds_per_context_token / factor,
        prefill_tokens_per_s=rates.prefill_tokens_per_s * factor,
        max_running=max(1, round(rates.max_running * factor)),
    )
