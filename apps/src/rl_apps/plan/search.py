"""Find the best split of the devices and the best staleness by simulating each candidate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rl_apps.plan.rates import Rates
from rl_apps.plan.simulation import Outcome, Setup, simulate

STALENESS = (0, 1, 2, 4, 8)
"""Values of `rollout.max_staleness` to try, in this order."""
GAIN = 1.01
"""Minimum throughput factor over the previous staleness. Below it, the search does not try larger values."""
AS_GOOD = 0.98
"""Fraction of the best throughput at which a candidate with less staleness is preferred."""
EPISODES = 768
"""Minimum number of outstanding episodes of a miniature: a simulation with fewer prompts, servers and trainers."""
GROUPS = 16
"""Minimum number of groups per step of a miniature."""
SPLITS = 10
"""Maximum number of splits to try. If there are more, evenly spaced ones are tried."""


@dataclass(frozen=True)
class Candidate:
    """Split of the devices and a staleness, with the simulated outcome."""

    allocation: str
    setup: Setup
    """Set-up at full size."""
    outcome: Outcome
    """Outcome of the simulated run, which is a miniature if `size` is above 1."""
    size: int
    """Divisor of the miniature: it has 1/`size` of the prompts, servers and trainers."""

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens per second at full size."""
        return self.outcome.tokens_per_s * self.size


def search(setups: Mapping[str, Setup]) -> list[Candidate]:
    """Simulate splits at increasing staleness; return the candidates, the fastest first.

    Args:
        setups: set-up of each split by its allocation. If there are more than `SPLITS`, evenly spaced ones are tried.
    """
    candidates: list[Candidate] = []
    splits = list(setups.items())
    for allocation, setup in splits[:: -(-len(splits) // SPLITS) or 1]:
        best = 0.0
        for staleness in STALENESS:
            candidate = _try(allocation, replace(setup, max_staleness=staleness, max_concurrent=None))
            candidates.append(candidate)
            if candidate.tokens_per_s < GAIN * best:
                break
            best = candidate.tokens_per_s
    return sorted(candidates, key=lambda candidate: -candidate.tokens_per_s)


def preferred(candidates: list[Candidate]) -> Candidate:
    """Return the candidate with the least staleness among the candidates that are nearly as fast as the fastest."""
    good = [each for each in candidates if each.tokens_per_s >= AS_GOOD * candidates[0].tokens_per_s]
    return min(good, key=lambda each: (each.setup.max_staleness, -each.tokens_per_s))


def _try(allocation: str, setup: Setup) -> Candidate:
    size = _divisor(setup)
    return Candidate(allocation, setup, simulate(miniature(setup, size)), size)


def _divisor(setup: Setup) -> int:
    """Return the largest divisor of the prompts per step that leaves enough groups per step for a simulation."""
    least = max(GROUPS, EPISODES // ((setup.max_staleness + 1) * setup.group_size))
    fits = (n for n in range(1, setup.batch_size // least + 1) if setup.batch_size % n == 0)
    return max(fits, default=1)


def miniature(setup: Setup, size: int) -> Setup:
    """Return a set-up with 1/`size` of the prompts, servers and trainer devices.

    The prompts per server and per trainer device stay the same, and those per replica if divisibility allows. If the
    number of servers is not divisible, the rounded number of servers is used, with speeds scaled to the same total.
    A miniature is too fast at low staleness, because the longest of fewer completions is shorter.
    """
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
    """Scale the rates of a server so that `factor` times as many completions take the same time per pass."""
    return replace(
        rates,
        decode_seconds_per_completion=rates.decode_seconds_per_completion / factor,
        decode_seconds_per_context_token=rates.decode_seconds_per_context_token / factor,
        prefill_tokens_per_s=rates.prefill_tokens_per_s * factor,
        max_running=max(1, round(rates.max_running * factor)),
    )
