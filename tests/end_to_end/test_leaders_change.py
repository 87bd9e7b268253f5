"""Data, heads and admission together, on a simulated clock: runs that are saved and go on with other numbers of heads.

Heads and loader are the real ones; servers are simulated. Each life of a run is saved at a random moment, goes on for a
while, and is killed. What it did after its last save is lost, as it is on the disk of a real run. In the end the
lineage must hold every prompt of every epoch once.
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
"""Groups per step, over all heads."""


@dataclass
class Run:
    """A run over all of its lives."""

    rows: int
    epochs: int
    eta: int
    refused: float
    """Fraction of the first head's answers that its workflow rejects, so that it takes more prompts than the others."""
    rng: random.Random
    clock: SimulatedClock = field(default_factory=SimulatedClock)
    version: int = 0
    account: Counter[tuple[int, int]] = field(default_factory=Counter)
    """(epoch, prompt) of groups that were trained on or rejected, in the surviving lineage."""
    groups: list[int] = field(default_factory=list)
    """Ids of those that were trained on."""
    seeds: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """Of each (epoch, prompt, sample) that was ever asked for, in lost branches too."""
    saved: dict[str, Any] = field(default_factory=dict)


class Answers(RolloutWorkflow):
    """One answer of a prompt; notes what its seed made of it."""

    def __init__(self, run: Run, refused: float) -> None:
        self.run, self.refused = run, refused

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        response = await engine.agenerate(ModelRequest([1 + data["prompt_id"]], GenerationConfig(max_new_tokens=64)))
        episode = current_episode()
        assert episode is not None
        first = response.output_ids[0]  # which the seed decides
        assert self.run.seeds.setdefault((data["epoch"], data["prompt_id"], episode.sample), first) == first
        if self.run.rng.random() < self.refused:
            return None
        return [from_response(response, reward=1.0, temperature=1.0)]


def start(run: Run, count: int, concurrent: int | None) -> list[RolloutScheduler]:
    """The heads of a life, with servers at the run's version."""
    config = NullInferenceEngineConfig(mean_tokens=6, sigma=1.5, seconds_per_token=0.2, read_weights=False)
    engine = NullInferenceEngine(config, ServeSpec(version=run.version), clock=run.clock)
    settings = RolloutConfig(max_staleness=run.eta, group_size=2, stall_timeout=1e6)
    heads = []
    for rank in range(count):
        loader = PromptLoader([{}] * run.rows, seed=5, epochs=run.epochs, num_shards=count, shard=rank)
        ids = {"first_id": rank, "id_stride": count}
        manager = StalenessManager(BATCH // count, run.eta, concurrent, version=run.version, **ids)
        heads.append(
            RolloutScheduler(engine, Answers(run, 0 if rank else run.refused), loader, manager, settings, run.clock)
        )
    for head in heads:
        _keep_account(run, head)
    return heads


def _keep_account(run: Run, head: RolloutScheduler) -> None:
    book = head._record_group

    def booked(group: Any) -> None:
        if group.rejected is not None:
            run.account[group.prompt["epoch"], group.prompt["prompt_id"]] += 1
        book(group)

    head._record_group = booked  # type: ignore[method-assign]


async def live(run: Run, count: int, steps: int | None = None, concurrent: int | None = None) -> None:
    """One life: so many steps, one of which is saved, or to the end of the data; with so many groups on each head."""
    heads = start(run, count, concurrent)
    states = [json.loads(text) | {"tensors": tensors} for text, tensors in run.saved.get("heads", ())]
    for rank, head in enumerate(heads if states else ()):
        await head.load_states([state | {"groups": groups_from_state(state)} for state in states], rank, count)
    saved_at = None if steps is None else run.rng.randrange(steps)
    step = 0
    while steps is None or step < steps:
        for head in heads:
            await head.begin_wait()
        sizes = [await head.fill() for head in heads]
        if not sum(size or 0 for size in sizes):
            break
        for head in heads:
            groups = await head.take()
            assert all(run.version - group.ticket.start <= run.eta for group in groups)
            assemble(groups, run.version)  # compares the tokens' versions
            run.account.update((group.prompt["epoch"], group.prompt["prompt_id"]) for group in groups)
            run.groups += [group.ticket.group_id for group in groups]
        await run.clock.sleep(run.rng.expovariate(0.2))
        run.version += run.rng.random() < 0.9
        if run.version > heads[0].engine.version:
            await heads[0].engine.stage_weights(WeightUpdateMeta("shm", run.version))
            await heads[0].engine.commit_weights(run.version)
        for head in heads:
            await head.end_step(run.version)
            await run.clock.sleep(run.rng.choice([0.0, run.rng.expovariate(0.5)]))
        if step == saved_at:
            await save(run, heads)
        step += 1
    for head in heads:
        await head.close()


async def save(run: Run, heads: list[RolloutScheduler]) -> None:
    """A recover point."""
    states = []
    for head in heads:
        state = await head.state_dict()
        state |= groups_to_state(state.pop("groups"))
        tensors = state.pop("tensors")
        states.append((json.dumps(state), tensors))
    run.saved = {"heads": states, "version": run.version, "account": run.account.copy(), "groups": list(run.groups)}


def back_to_the_save(run: Run) -> None:
    """A kill: what came after the last recover point is lost."""
    run.version = run.saved.get("version", 0)
    run.account = run.saved.get("account", Counter()).copy()
    run.groups = list(run.saved.get("groups", ()))


@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(6, 40),
    epochs=st.integers(1, 3),
    eta=st.integers(0, 3),
    refused=st.sampled_from([0.0, 0.6]),
    lives=st.lists(
        st.tuples(st.sampled_from([1, 2, 3, 4, 6]), st.integers(1, 4), st.sampled_from([None, 2])),
        min_size=1,
        max_size=5,
    ),
    last=st.sampled_from([1, 2, 3]),
)
@settings(max_examples=60, deadline=None)
def test_run_with_any_numbers_of_heads_uses_every_prompt_of_every_epoch_once(
    seed: int,
    rows: int,
    epochs: int,
    eta: int,
    refused: float,
    lives: list[tuple[int, int, int | None]],
    last: int,
) -> None:
    run = Run(rows, epochs, eta, refused, random.Random(seed))
    for life in lives:
        run.clock.run(live(run, *life))
        back_to_the_save(run)

    run.clock.run(live(run, last))

    assert run.account == dict.fromkeys(((epoch, row) for epoch in range(epochs) for row in range(rows)), 1)
    assert len(run.groups) == len(set(run.groups))
