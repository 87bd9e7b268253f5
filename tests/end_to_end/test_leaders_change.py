"""Runs that resume with another number of data-parallel leaders train on every prompt of every epoch once.

Leaders and data loader are real; servers and clock are simulated. Each attempt of a run saves a recovery checkpoint
after a random step, continues and is killed. The next attempt resumes from the checkpoint, without the later steps.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rl_contracts.batch.trajectory import from_response
from rl_contracts.config import GenerationConfig
from rl_contracts.data import ModelRequest, ServeSpec, WeightUpdateMeta
from rl_contracts.testing import NullInferenceEngine, NullInferenceEngineConfig, SimulatedClock
from rl_contracts.workflow import RolloutWorkflow
from rl_datasets import PromptLoader
from rl_workflows import RolloutConfig, RolloutScheduler, StalenessManager
from rl_workflows.rollout.batches import assemble, groups_from_state, groups_to_state
from rl_workflows.rollout.episode import current_episode

BATCH = 12
"""Groups per step, over all leaders."""


@dataclass
class Run:
    """State of a run over all its attempts."""

    examples: int
    epochs: int
    max_staleness: int
    rejected_fraction: float
    """Fraction of the episodes that the first leader rejects, so that it takes more prompts than the others."""
    rng: random.Random
    clock: SimulatedClock = field(default_factory=SimulatedClock)
    version: int = 0
    outcomes: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Number of trained or rejected groups per (epoch, prompt), without lost steps."""
    groups: list[int] = field(default_factory=list)
    """Ids of the trained groups."""
    first_tokens: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """First sampled token per (epoch, prompt, sample), with lost steps. It depends only on the seed of the episode."""
    saved: dict[str, Any] = field(default_factory=dict)


class SeedCheckWorkflow(RolloutWorkflow):
    """Generate one completion and check that repeated episodes sample the same first token."""

    def __init__(self, run: Run, rejected_fraction: float) -> None:
        self.run, self.rejected_fraction = run, rejected_fraction

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        response = await engine.agenerate(ModelRequest([1 + data["prompt_id"]], GenerationConfig(max_new_tokens=64)))
        episode = current_episode()
        assert episode is not None
        first = response.output_ids[0]
        assert self.run.first_tokens.setdefault((data["epoch"], data["prompt_id"], episode.sample), first) == first
        if self.run.rng.random() < self.rejected_fraction:
            return None
        return [from_response(response, reward=1.0, temperature=1.0)]


def start(run: Run, count: int, concurrent: int | None) -> list[RolloutScheduler]:
    """Build the leaders of an attempt, with servers at the version of the run."""
    config = NullInferenceEngineConfig(mean_tokens=6, sigma=1.5, seconds_per_token=0.2, read_weights=False)
    engine = NullInferenceEngine(config, ServeSpec(version=run.version), clock=run.clock)
    settings = RolloutConfig(max_staleness=run.max_staleness, group_size=2, stall_timeout=1e6)
    leaders = []
    for rank in range(count):
        loader = PromptLoader([{}] * run.examples, seed=5, epochs=run.epochs, num_shards=count, shard=rank)
        ids = {"first_id": rank, "id_stride": count}
        manager = StalenessManager(BATCH // count, run.max_staleness, concurrent, version=run.version, **ids)
        workflow = SeedCheckWorkflow(run, 0 if rank else run.rejected_fraction)
        leaders.append(RolloutScheduler(engine, workflow, loader, manager, settings, run.clock))
    for leader in leaders:
        _count_rejected(run, leader)
    return leaders


def _count_rejected(run: Run, leader: RolloutScheduler) -> None:
    record_group = leader._record_group

    def on_group(group: Any) -> None:
        if group.rejected is not None:
            run.outcomes[group.prompt["epoch"], group.prompt["prompt_id"]] += 1
        record_group(group)

    leader._record_group = on_group  # type: ignore[method-assign]


async def run_attempt(run: Run, count: int, steps: int | None = None, concurrent: int | None = None) -> None:
    """Take `steps` steps and save after one of them, or without `steps` continue until the data is exhausted.

    Args:
        run: state of the run.
        count: number of leaders.
        steps: number of steps.
        concurrent: maximum number of running groups per leader.
    """
    leaders = start(run, count, concurrent)
    states = [json.loads(text) | {"tensors": tensors} for text, tensors in run.saved.get("leaders", ())]
    for rank, leader in enumerate(leaders if states else ()):
        await leader.load_states([state | {"groups": groups_from_state(state)} for state in states], rank, count)
    saved_at = None if steps is None else run.rng.randrange(steps)
    step = 0
    while steps is None or step < steps:
        for leader in leaders:
            await leader.begin_wait()
        sizes = [await leader.fill() for leader in leaders]
        if not sum(size or 0 for size in sizes):
            break
        for leader in leaders:
            groups = await leader.take()
            assert all(run.version - group.ticket.start <= run.max_staleness for group in groups)
            assemble(groups, run.version)  # checks the versions of the tokens
            run.outcomes.update((group.prompt["epoch"], group.prompt["prompt_id"]) for group in groups)
            run.groups += [group.ticket.group_id for group in groups]
        await run.clock.sleep(run.rng.expovariate(0.2))
        run.version += run.rng.random() < 0.9
        if run.version > leaders[0].engine.version:
            await leaders[0].engine.stage_weights(WeightUpdateMeta("shm", run.version))
            await leaders[0].engine.commit_weights(run.version)
        for leader in leaders:
            await leader.end_step(run.version)
            await run.clock.sleep(run.rng.choice([0.0, run.rng.expovariate(0.5)]))
        if step == saved_at:
            await save(run, leaders)
        step += 1
    for leader in leaders:
        await leader.close()


async def save(run: Run, leaders: list[RolloutScheduler]) -> None:
    """Save a recovery checkpoint."""
    states = []
    for leader in leaders:
        state = await leader.state_dict()
        state |= groups_to_state(state.pop("groups"))
        tensors = state.pop("tensors")
        states.append((json.dumps(state), tensors))
    run.saved = {"leaders": states, "version": run.version, "outcomes": run.outcomes.copy(), "groups": list(run.groups)}


def kill(run: Run) -> None:
    """Discard the state after the last recovery checkpoint."""
    run.version = run.saved.get("version", 0)
    run.outcomes = run.saved.get("outcomes", Counter()).copy()
    run.groups = list(run.saved.get("groups", ()))


@given(
    seed=st.integers(0, 2**32),
    examples=st.integers(6, 40),
    epochs=st.integers(1, 3),
    max_staleness=st.integers(0, 3),
    rejected_fraction=st.sampled_from([0.0, 0.6]),
    attempts=st.lists(
        st.tuples(st.sampled_from([1, 2, 3, 4, 6]), st.integers(1, 4), st.sampled_from([None, 2])),
        min_size=1,
        max_size=5,
    ),
    last_count=st.sampled_from([1, 2, 3]),
)
@settings(max_examples=60, deadline=None)
def test_run_with_changing_leader_count_trains_every_prompt_once(
    seed: int,
    examples: int,
    epochs: int,
    max_staleness: int,
    rejected_fraction: float,
    attempts: list[tuple[int, int, int | None]],
    last_count: int,
) -> None:
    run = Run(examples, epochs, max_staleness, rejected_fraction, random.Random(seed))
    for attempt in attempts:
        run.clock.run(run_attempt(run, *attempt))
        kill(run)

    run.clock.run(run_attempt(run, last_count))

    assert run.outcomes == dict.fromkeys(((epoch, prompt) for epoch in range(epochs) for prompt in range(examples)), 1)
    assert len(run.groups) == len(set(run.groups))
