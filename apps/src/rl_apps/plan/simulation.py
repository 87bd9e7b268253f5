"""Simulate a run on a simulated clock, with the real rollout runtime and with servers and a trainer given by rates.

This module contains no scheduling. As in a run, one `rl_workflows.RolloutScheduler` for each data-parallel replica
decides on admission, look-ahead, groups and batches.
"""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from rl_apps.plan.rates import Rates
from rl_apps.plan.simulated_servers import SimulatedServers
from rl_contracts.batch.trajectory import Trajectory
from rl_contracts.config import GenerationConfig
from rl_contracts.data import ModelRequest
from rl_contracts.inference import InferenceEngine
from rl_contracts.testing import SimulatedClock
from rl_contracts.workflow import RolloutWorkflow
from rl_workflows import RolloutConfig, RolloutScheduler, StalenessManager
from rl_workflows.rollout.config import groups_per_replica

NEVER = 1e12
"""Stall timeout in simulated seconds, longer than any regular wait."""

COUNTED = 512
"""Minimum number of completions in the means of a simulation."""

ONE_TOKEN = (np.zeros(1, np.int64), np.ones(1, bool), np.zeros(1, np.float32), np.zeros(1, np.int32))
"""Arrays of the trajectory of every completion. Its real number of tokens is in `info`."""


@dataclass(frozen=True)
class Setup:
    """Set-up of a simulated run."""

    rates: Rates
    batch_size: int
    """Prompts per step."""
    group_size: int
    max_staleness: int
    servers: int
    replicas: int
    """Number of trainer replicas. Each has a data-parallel leader with a rollout scheduler."""
    trainer_devices: float
    max_concurrent: int | None = None
    longest: int = 1 << 30
    """Maximum number of tokens of a completion."""
    interrupt: str = "keep"
    shared: bool = False
    """True if servers and trainer share devices, so that the servers sleep during training."""

    @property
    def in_flight(self) -> int:
        """Maximum number of outstanding completions."""
        return (self.max_staleness + 1) * self.batch_size * self.group_size


@dataclass(frozen=True)
class Outcome:
    """Means over the steps after the warm-up."""

    step_seconds: float
    wait_seconds: float
    """Seconds that the trainer waits for a batch."""
    train_seconds: float
    publish_seconds: float
    trained_tokens: float
    """Trained tokens per step, including prompts."""
    generated_tokens: float
    """Generated tokens per step, including tokens of rejected groups."""
    servers_busy: float
    """Fraction of the time in which a server generates."""
    running: float
    """Mean number of completions that a busy server runs at once."""
    staleness: float
    most_in_flight: int
    episodes: int
    """Number of episodes of all simulated steps, including the warm-up."""

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens per second of the whole step."""
        return self.trained_tokens / self.step_seconds

    @property
    def limit(self) -> str:
        """Stage that limits the speed, with the idle fraction of the trainer or of the servers."""
        idle, waits = 1 - self.servers_busy, self.wait_seconds / self.step_seconds
        if waits >= idle:
            return f"generation (trainer idle {waits:.0%})"
        stage = "training" if self.train_seconds >= self.publish_seconds else "publishing"
        return f"{stage} (servers idle {idle:.0%})"


class OneCompletion(RolloutWorkflow):
    """Workflow with one completion per episode.

    The trajectory has one dummy token; its `info` has the simulated number of tokens.
    """

    def __init__(self, rates: Rates, clock: SimulatedClock) -> None:
        self._request = ModelRequest([0] * max(round(rates.prompt_tokens), 1), GenerationConfig(max_new_tokens=1 << 30))
        self._seconds, self._clock = rates.episode_seconds, clock

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Trajectory]:
        response = await engine.agenerate(self._request)
        if self._seconds:
            await self._clock.sleep(self._seconds)
        tokens = len(self._request.input_ids) + response.output_ids[0]
        return [Trajectory(*ONE_TOKEN, info={"tokens": tokens})]


def simulate(setup: Setup, steps: int = 0, warm_up: int = 0) -> Outcome:
    """Simulate the steps of a set-up.

    Args:
        setup: set-up of the run.
        steps: number of measured steps; 0 for at least `max_staleness + 2` steps and at least `COUNTED` completions.
        warm_up: number of steps before the measured ones; 0 for `max_staleness + 1`, after which the first burst of
            prompts is over.

    Raises:
        ConfigError: the number of prompts per step is not divisible by the number of replicas.
        StalledError: the runtime waits for an event that never occurs.
    """
    clock = SimulatedClock()
    warm_up = warm_up or setup.max_staleness + 1
    steps = steps or max(setup.max_staleness + 2, math.ceil(COUNTED / (setup.batch_size * setup.group_size)))
    with _without_garbage_collector():
        return clock.run(_train(setup, clock, steps, warm_up))


@contextmanager
def _without_garbage_collector() -> Iterator[None]:
    """Disable the garbage collector, which would dominate the time. The runtime creates no reference cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def heads_of(setup: Setup, fleet: SimulatedServers, clock: SimulatedClock) -> list[RolloutScheduler]:
    """Return the rollout schedulers of a run, one per replica as in `rl_workflows.DistRollout`."""
    config = RolloutConfig(max_staleness=setup.max_staleness, group_size=setup.group_size, stall_timeout=NEVER)
    groups_per_step = groups_per_replica(setup.batch_size, setup.replicas, "data.batch_size")
    concurrent = setup.max_concurrent
    if concurrent is not None:
        concurrent = groups_per_replica(concurrent, setup.replicas, "rollout.max_concurrent")
    workflow, stride = OneCompletion(setup.rates, clock), setup.replicas
    return [
        RolloutScheduler(
            fleet,
            workflow,
            ({"prompt_id": number} for number in count(replica, stride)),
            StalenessManager(groups_per_step, setup.max_staleness, concurrent, first_id=replica, id_stride=stride),
            config,
            clock,
            _rejecting(setup.rates.rejected_fraction),
        )
        for replica in range(setup.replicas)
    ]


def _rejecting(fraction: float) -> Any:
    """Return a filter that rejects this fraction of the groups, or None for 0.

    It rejects the same prompts in every set-up.
    """
    if not fraction:
        return None
    return lambda group: (group[0].prompt_id * 0.6180339887) % 1.0 >= fraction


async def _train(setup: Setup, clock: SimulatedClock, steps: int, warm_up: int) -> Outcome:
    fleet = SimulatedServers(setup.servers, setup.rates, setup.longest, clock)
    schedulers = heads_of(setup, fleet, clock)
    rates, seconds = setup.rates, {"wait": 0.0, "train": 0.0, "publish": 0.0}
    trained = ages = most = episodes = 0
    began, before = 0.0, _totals(fleet)
    for version in range(1, warm_up + steps + 1):
        if version == warm_up + 1:
            began, before = clock.now(), _totals(fleet)
            seconds, trained, ages = dict.fromkeys(seconds, 0.0), 0, 0
        start = clock.now()
        for scheduler in schedulers:
            await scheduler.begin_wait()
        await asyncio.gather(*(scheduler.fill() for scheduler in schedulers))
        seconds["wait"] += clock.now() - start
        most = max(most, sum(scheduler.manager.outstanding for scheduler in schedulers) * setup.group_size)
        groups = [group for scheduler in schedulers for group in await scheduler.take()]
        tokens = sum(trajectory.info["tokens"] for group in groups for trajectory in group.trajectories)
        trained, episodes = trained + tokens, episodes + len(groups) * setup.group_size
        ages += sum(version - 1 - group.ticket.start for group in groups)
        train = tokens / (rates.train_tokens_per_s * setup.trainer_devices)
        if setup.shared:
            fleet.sleep_for(train)
        await clock.sleep(train)
        await fleet.publish(version, rates.publish_seconds, setup.interrupt)
        await clock.sleep(rates.other_seconds)
        seconds["train"] += train
        seconds["publish"] += rates.publish_seconds
        for scheduler in schedulers:
            await scheduler.end_step(version)
    elapsed = clock.now() - began
    busy, generated, running_seconds = (end - start for end, start in zip(_totals(fleet), before, strict=True))
    for scheduler in schedulers:
        await scheduler.close()
    return Outcome(
        step_seconds=elapsed / steps,
        wait_seconds=seconds["wait"] / steps,
        train_seconds=seconds["train"] / steps,
        publish_seconds=seconds["publish"] / steps,
        trained_tokens=trained / steps,
        generated_tokens=generated / steps,
        servers_busy=busy / (setup.servers * elapsed),
        running=running_seconds / busy if busy else 0.0,
        staleness=ages / (steps * setup.batch_size),
        most_in_flight=most,
        episodes=episodes,
    )


def _totals(fleet: SimulatedServers) -> Sequence[float]:
    """Return the busy seconds, the generated tokens and the generation seconds of completions, summed over servers."""
    servers = [server.totals() for server in fleet.fleet]
    return [sum(values) for values in zip(*servers, strict=True)]
