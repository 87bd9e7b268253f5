"""Throughput and staleness of asynchronous training for several `max_staleness`, measured and simulated.

    uv run python tests/benchmarks/staleness_sweep.py

Completions take log-normal times on a null engine with 48 decode slots. A trainer takes 40 ms per step of 8 groups of 4
completions and publishes a version after every step. `measured` is `DistRollout` on the real clock, with its event loop
in a thread and a trainer that sleeps. `simulated` is its scheduler on the simulated clock, where computation takes no
time. Both request the same prompts with the same seeds, so completions have the same lengths. The script writes
docs/images/staleness.svg. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from svg_lines import Line, Panel, render

from rl_contracts.batch.trajectory import Trajectory, from_response
from rl_contracts.config import GenerationConfig
from rl_contracts.data import ModelRequest, WeightUpdateMeta
from rl_contracts.inference import InferenceEngine
from rl_contracts.runtime.clock import Clock
from rl_contracts.testing import NullInferenceEngine, NullInferenceEngineConfig, SimulatedClock
from rl_contracts.workflow import RolloutWorkflow
from rl_workflows import DistRollout, RolloutConfig, RolloutScheduler, StalenessManager
from rl_workflows.rollout.batches import assemble

PLOT = Path(__file__).resolve().parents[2] / "docs" / "images" / "staleness.svg"
SWEEP = (0, 1, 2, 4, 8)
BATCH, GROUP = 8, 4
"""Groups per step, and completions per group."""
COMPLETION_SECONDS, SIGMA = 0.05, 1.0
"""Mean seconds per completion, and sigma of the logarithm."""
DECODE_SLOTS = 48
"""Concurrent completions of the server."""
TRAIN_SECONDS, COMMIT_SECONDS = 0.04, 0.002
TOKENS = 32
WARMUP = 5
"""Unmeasured steps at the start."""


@dataclass(frozen=True)
class Step:
    """Times of one step in seconds, and its staleness in versions."""

    seconds: float
    waited: float
    staleness: float
    staleness_max: float


class SingleTurn(RolloutWorkflow):
    """One completion per episode."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Trajectory]:
        response = await engine.agenerate(
            ModelRequest([1 + data["prompt_id"] % 60], GenerationConfig(max_new_tokens=1 << 16))
        )
        return [from_response(response, reward=1.0, temperature=1.0)]


def make_engine(clock: Clock | None) -> NullInferenceEngine:
    """Return a null engine whose completions take log-normal times."""
    config = NullInferenceEngineConfig(
        mean_tokens=TOKENS,
        sigma=SIGMA,
        seconds_per_token=COMPLETION_SECONDS / TOKENS,
        commit_seconds=COMMIT_SECONDS,
        max_running=DECODE_SLOTS,
        read_weights=False,
    )
    return NullInferenceEngine(config, clock=clock)


def rollout_config(max_staleness: int) -> RolloutConfig:
    """Return the rollout settings of both runs."""
    return RolloutConfig(max_staleness=max_staleness, group_size=GROUP, stall_timeout=60.0)


def prompts() -> Iterator[dict[str, Any]]:
    """Return an infinite iterator of prompts."""
    return ({"prompt_id": number} for number in count())


async def publish(engine: NullInferenceEngine, version: int) -> None:
    """Stage and commit a version."""
    await engine.stage_weights(WeightUpdateMeta("shm", version))
    await engine.commit_weights(version)


def step_of(began: float, filled: float, ended: float, stats: dict[str, float | None]) -> Step:
    """Return a step from its start, the arrival of its batch, its end, and the runtime's metrics."""
    mean, largest = stats["groups/staleness_mean"], stats["groups/staleness_max"]
    assert mean is not None
    assert largest is not None
    return Step(ended - began, filled - began, mean, largest)


def measure(max_staleness: int, steps: int) -> list[Step]:
    """Run the steps with the runtime on the real clock."""
    engine = make_engine(None)
    rollout = DistRollout(engine, SingleTurn(), prompts(), batch_size=BATCH, config=rollout_config(max_staleness))
    done = []
    try:
        for version in range(1, steps + 1):
            began = time.monotonic()
            rollout.next_batch()
            filled = time.monotonic()
            time.sleep(TRAIN_SECONDS)
            rollout.loop.run(publish(engine, version), 10)
            rollout.end_step(version)
            done.append(step_of(began, filled, time.monotonic(), rollout.stats().results()))
    finally:
        rollout.destroy()
    return done


def simulate(max_staleness: int, steps: int) -> list[Step]:
    """Run the same steps on the simulated clock."""
    clock, config = SimulatedClock(), rollout_config(max_staleness)
    engine = make_engine(clock)
    scheduler = RolloutScheduler(engine, SingleTurn(), prompts(), StalenessManager(BATCH, max_staleness), config, clock)

    async def train() -> list[Step]:
        done = []
        for version in range(1, steps + 1):
            began = clock.now()
            await scheduler.begin_wait()
            await scheduler.fill()
            filled = clock.now()
            assemble(await scheduler.take(), version - 1)
            await clock.sleep(TRAIN_SECONDS)
            await publish(engine, version)
            await scheduler.end_step(version)
            done.append(step_of(began, filled, clock.now(), (await scheduler.stats()).results()))
        await scheduler.close()
        return done

    return clock.run(train())


def summarize(steps: list[Step]) -> dict[str, float]:
    """Return throughput, idle fraction and staleness over the steps after the warm-up."""
    counted = steps[min(WARMUP, len(steps) // 2) :]
    seconds = sum(step.seconds for step in counted)
    return {
        "groups_per_s": round(BATCH * len(counted) / seconds, 2),
        "trainer_idle_fraction": round(sum(step.waited for step in counted) / seconds, 3),
        "staleness_mean": round(statistics.mean(step.staleness for step in counted), 3),
        "staleness_max": max(step.staleness_max for step in counted),
    }


def plot(measured: dict[int, dict[str, float]], simulated: dict[int, dict[str, float]]) -> str:
    """Plot throughput, idle fraction and staleness over `max_staleness`; return the SVG."""

    def line(label: str, rows: dict[int, dict[str, float]], key: str, color: int) -> Line:
        return Line(label, [rows[bound][key] for bound in rows], color, dashed=rows is simulated)

    panels = [
        Panel(
            "groups per second",
            [line("measured", measured, "groups_per_s", 0), line("simulated", simulated, "groups_per_s", 1)],
        ),
        Panel(
            "fraction of the time in which the trainer waits",
            [
                line("measured", measured, "trainer_idle_fraction", 0),
                line("simulated", simulated, "trainer_idle_fraction", 1),
            ],
        ),
        Panel(
            "staleness of the trained groups, in versions",
            [
                line("mean, measured", measured, "staleness_mean", 0),
                line("mean, simulated", simulated, "staleness_mean", 1),
                line("largest, measured", measured, "staleness_max", 2),
            ],
        ),
    ]
    return render(panels, [str(bound) for bound in measured], "max_staleness")


def main() -> None:
    """Run the sweep; write the plot and print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=45, help="steps per run; the first five are not measured")
    parser.add_argument("--svg", type=Path, help="file of the plot; default: docs/images/staleness.svg")
    parser.add_argument("--quick", action="store_true", help="few steps, two values, no plot; only checks that it runs")
    options = parser.parse_args()
    if options.quick:
        options.steps = 6
    measured: dict[int, dict[str, float]] = {}
    simulated: dict[int, dict[str, float]] = {}
    for bound in SWEEP[:2] if options.quick else SWEEP:
        simulated[bound] = summarize(simulate(bound, options.steps))
        measured[bound] = summarize(measure(bound, options.steps))
        print(f"max_staleness {bound}: measured {measured[bound]}, simulated {simulated[bound]}", flush=True)
    path = options.svg or (None if options.quick else PLOT)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(plot(measured, simulated))
    result = {"benchmark": "staleness_sweep", "steps": options.steps, "load": os.getloadavg()[0]}
    print(json.dumps(result | {"measured": measured, "simulated": simulated}))


if __name__ == "__main__":
    main()
