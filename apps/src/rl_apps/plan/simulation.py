"""A run on a simulated clock: the rollout runtime itself, with servers and a trainer that take the time of their rates.

Nothing here schedules. Admission, look-ahead, groups and batches are those of `rl_workflows.RolloutScheduler`, one for
each data-parallel replica, as in a run.
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
"""Seconds after which a simulated wait counts as a stall."""

COUNTED = 512
"""Answers, at least, that a simulation's means are of."""

ONE_TOKEN = (np.zeros(1, np.int64), np.ones(1, bool), np.zeros(1, np.float32), np.zeros(1, np.int32))
"""The row of every answer; how long it would be is in its `info`."""


@dataclass(frozen=True)
class Setup:
    """What is simulated."""

    rates: Rates
    batch_size: int
    """Prompts per step."""
    group_size: int
    max_staleness: int
    servers: int
    replicas: int
    """Of the trainer; each has a rollout head."""
    trainer_devices: float
    max_concurrent: int | None = None
    longest: int = 1 << 30
    """Tokens of an answer at most."""
    interrupt: str = "keep"
    shared: bool = False
    """Servers sleep while the trainer learns, on the same devices."""

    @property
    def in_flight(self) -> int:
        """Answers that may be outstanding."""
        return (self.max_staleness + 1) * self.batch_size * self.group_size


@dataclass(frozen=True)
class Outcome:
    """Means over the steps that count."""

    step_seconds: float
    wait_seconds: float
    """The trainer's for a batch."""
    train_seconds: float
    publish_seconds: float
    trained_tokens: float
    """Of a step, prompts too."""
    generated_tokens: float
    """In the seconds of a step, whatever becomes of them."""
    servers_busy: float
    """Fraction of the time in which a server had something to generate."""
    running: float
    """Answers that a busy server generates at once."""
    staleness: float
    most_in_flight: int
    episodes: int
    """In all that was simulated."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens trained on, over all that a step takes."""
        return self.trained_tokens / self.step_seconds

    @property
    def limit(self) -> str:
        """Who waits for whom."""
        idle, waits = 1 - self.servers_busy, self.wait_seconds / self.step_seconds
        return f"trainer idle {waits:.0%}" if waits >= idle else f"servers idle {idle:.0%}"


class Answers(RolloutWorkflow):
    """One answer; its row holds no tokens but says how many there would be."""

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
    """Run the steps of a set-up.

    Args:
        setup: what runs.
        steps: that count; 0: enough for each place of the staleness bound to be used once, and for `COUNTED` answers.
        warm_up: steps before those; 0: until the first burst of prompts is over.

    Raises:
        ConfigError: the prompts of a step do not divide over the replicas.
        StalledError: the runtime waits for something that never comes.
    """
    clock = SimulatedClock()
    warm_up = warm_up or setup.max_staleness + 1
    steps = steps or max(setup.max_staleness + 2, math.ceil(COUNTED / (setup.batch_size * setup.group_size)))
    with _no_collector():
        return clock.run(_train(setup, clock, steps, warm_up))


@contextmanager
def _no_collector() -> Iterator[None]:
    """The runtime makes no reference cycles, and looking for them costs more than all else."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def heads_of(setup: Setup, fleet: SimulatedServers, clock: SimulatedClock) -> list[RolloutScheduler]:
    """The rollout heads of a run, as `rl_workflows.DistRollout` makes one on each replica."""
    config = RolloutConfig(
        max_staleness=setup.max_staleness, group_size=setup.group_size, stall_timeout=NEVER, trainer_timeout=NEVER
    )
    share = groups_per_replica(setup.batch_size, setup.replicas, "data.batch_size")
    concurrent = setup.max_concurrent
    if concurrent is not None:
        concurrent = groups_per_replica(concurrent, setup.replicas, "rollout.max_concurrent")
    workflow, stride = Answers(setup.rates, clock), setup.replicas
    return [
        RolloutScheduler(
            fleet,
            workflow,
            ({"prompt_id": number} for number in count(head, stride)),
            StalenessManager(share, setup.max_staleness, concurrent, first_id=head, id_stride=stride),
            config,
            clock,
            _rejecting(setup.rates.rejected_fraction),
        )
        for head in range(setup.replicas)
    ]


def _rejecting(fraction: float) -> Any:
    """A filter that rejects this fraction of the groups, the same prompts in every set-up; None where it is none."""
    if not fraction:
        return None
    return lambda answers: (answers[0].prompt_id * 0.6180339887) % 1.0 >= fraction


async def _train(setup: Setup, clock: SimulatedClock, steps: int, warm_up: int) -> Outcome:
    fleet = SimulatedServers(setup.servers, setup.rates, setup.longest, clock)
    heads = heads_of(setup, fleet, clock)
    rates, seconds = setup.rates, {"wait": 0.0, "train": 0.0, "publish": 0.0}
    trained = ages = most = episodes = 0
    began, before = 0.0, _totals(fleet)
    for version in range(1, warm_up + steps + 1):
        if version == warm_up + 1:
            began, before = clock.now(), _totals(fleet)
            seconds, trained, ages = dict.fromkeys(seconds, 0.0), 0, 0
        start = clock.now()
        for head in heads:
            await head.begin_wait()
        await asyncio.gather(*(head.fill() for head in heads))
        seconds["wait"] += clock.now() - start
        most = max(most, sum(head.manager.outstanding for head in heads) * setup.group_size)
        groups = [group for head in heads for group in await head.take()]
        tokens = sum(answer.info["tokens"] for group in groups for answer in group.trajectories)
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
        for head in heads:
            await head.end_step(version)
    elapsed = clock.now() - began
    busy, generated, per_answer = (now - then for now, then in zip(_totals(fleet), before, strict=True))
    for head in heads:
        await head.close()
    return Outcome(
        step_seconds=elapsed / steps,
        wait_seconds=seconds["wait"] / steps,
        train_seconds=seconds["train"] / steps,
        publish_seconds=seconds["publish"] / steps,
        trained_tokens=trained / steps,
        generated_tokens=generated / steps,
        servers_busy=busy / (setup.servers * elapsed),
        running=per_answer / busy if busy else 0.0,
        staleness=ages / (steps * setup.batch_size),
        most_in_flight=most,
        episodes=episodes,
    )


def _totals(fleet: SimulatedServers) -> Sequence[float]:
    """Seconds in which servers were busy, tokens that they generated, and the seconds that these took each answer."""
    servers = [server.so_far() for server in fleet.fleet]
    return [sum(values) for values in zip(*servers, strict=True)]
