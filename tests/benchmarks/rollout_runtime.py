"""Episodes per second and memory of the rollout runtime with 100,000 episodes outstanding, on one core.

    uv run python tests/benchmarks/rollout_runtime.py

The runtime is `DistRollout` as a trainer uses it: it admits groups of 8, assembles batches of 10,000 sequences and cuts
them into minibatches. 10 batches are outstanding (`max_staleness=9`). A null engine replaces the servers. A completion
is a timer and a list of 16 to 48 token ids; a prompt has 32 tokens. Memory is measured while the engine is paused and
all episodes run. Time is measured after the engine resumes, from the fourth batch on.

Two baselines run 200,000 event loop tasks, at most 100,000 at a time. Each task sleeps once (`tasks`) or calls the null
engine once (`engine`). Each measurement runs three times, in separate processes on one core, one process at a time. The
last line of the output is one JSON object. Its `runtime` entry is the run with the largest CPU time per second. The
entry of each baseline is its run with the median CPU time per task.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Coroutine
from itertools import count
from typing import Any

GROUP = 8
"""Episodes per group."""
STEPS_AHEAD = 10
"""Batches outstanding, `max_staleness + 1`."""
PROMPT = list(range(1, 33))
TOKENS = 32
"""Mean tokens per completion."""
SECONDS, QUICK_SECONDS = 4.0, 0.2
"""Mean seconds per completion, by default and with `--quick`.

With 4 s and 100,000 outstanding episodes, 25,000 could end per second, so the runtime is the bottleneck.
"""
DEADLINE = 600.0
"""Longest measurement, in seconds."""


def make_engine(seconds: float) -> Any:
    """Return a null engine with completions of 16 to 48 tokens that take `seconds` on average."""
    import numpy as np

    from rl_contracts.testing import NullInferenceEngine, NullInferenceEngineConfig

    rng = random.Random(0)
    lengths = [rng.randint(TOKENS // 2, TOKENS * 3 // 2) for _ in range(4096)]
    completions = [np.array([rng.randrange(64) for _ in range(length)]) for length in lengths]
    return NullInferenceEngine(
        NullInferenceEngineConfig(seconds_per_token=seconds / TOKENS, read_weights=False),
        answer=lambda request: completions[(request.seed or 0) % len(completions)],
    )


def measure_runtime(outstanding: int, batches: int, tuned: bool, completion_seconds: float) -> dict[str, float]:
    """Measure memory with all episodes running, and the time of `batches` batches after the first ones."""
    from rl_contracts.batch.trajectory import empty, from_response
    from rl_contracts.config import GenerationConfig
    from rl_contracts.data import ModelRequest
    from rl_contracts.workflow import RolloutWorkflow
    from rl_workflows import DistRollout, RolloutConfig, tune_garbage_collection

    generation = GenerationConfig(max_new_tokens=512, ignore_eos=True)

    class SingleTurn(RolloutWorkflow):
        """One completion; its length is the reward."""

        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            response = await engine.agenerate(ModelRequest(PROMPT, generation))
            return [from_response(response, reward=float(len(response.output_ids)), temperature=1.0)]

    engine = make_engine(completion_seconds)
    groups = outstanding // GROUP // STEPS_AHEAD
    rollout = DistRollout(
        engine,
        SingleTurn(),
        ({"prompt_id": number} for number in count()),
        batch_size=groups,
        config=RolloutConfig(max_staleness=STEPS_AHEAD - 1, group_size=GROUP, stall_timeout=DEADLINE),
        minibatches=4,
    )
    empty()  # imports the modules that batches need
    if tuned:
        tune_garbage_collection()
    base = resident()
    rollout.pause()
    rollout.loop.run(engine.pause(), 10)
    rollout.resume()
    rollout.loop.run(rollout.scheduler.begin_wait(), 10)
    deadline = time.monotonic() + DEADLINE
    while len(rollout.scheduler.episodes.running) < outstanding:
        if time.monotonic() > deadline:
            raise SystemExit(
                f"expected {outstanding} running episodes, found {len(rollout.scheduler.episodes.running)}"
            )
        time.sleep(0.05)
    running = resident()
    rollout.loop.run(engine.resume(), 10)
    for _ in range(3):
        rollout.next_batch()
        rollout.end_step(0)
    began, cpu = time.perf_counter(), time.process_time()
    episodes, outstanding_min = 0, outstanding
    for _ in range(batches):
        episodes += rollout.next_batch().batch_size[0]
        outstanding_min = min(outstanding_min, rollout.scheduler.manager.outstanding * GROUP)
        rollout.end_step(0)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    rollout.destroy()
    return {
        "episodes": episodes,
        "outstanding_min": outstanding_min,
        "episodes_per_s": episodes / seconds,
        "cpu_us_per_episode": 1e6 * cpu / episodes,
        "cpu_fraction": cpu / seconds,
        "base_gib": base / 2**30,
        "all_running_gib": running / 2**30,
        "bytes_per_running_episode": (running - base) / outstanding,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30,
    }


def measure_baseline(outstanding: int, total: int, use_engine: bool) -> dict[str, float]:
    """Measure tasks that sleep once or call the null engine once: `outstanding` at a time, `total` in all."""
    from rl_contracts.config import GenerationConfig
    from rl_contracts.data import ModelRequest
    from rl_contracts.runtime.aio import LoopThread
    from rl_workflows import tune_garbage_collection

    engine, generation = make_engine(1.0), GenerationConfig(max_new_tokens=512, ignore_eos=True)
    rng = random.Random(0)

    def work() -> Coroutine[Any, Any, Any]:
        if use_engine:
            return engine.agenerate(ModelRequest(PROMPT, generation, seed=rng.getrandbits(62)))
        return asyncio.sleep(rng.uniform(0.5, 1.5))

    async def main() -> float:
        loop, tasks = asyncio.get_running_loop(), set()
        ended: asyncio.Future[None] = loop.create_future()
        remaining, to_start = total, total - outstanding

        def start() -> None:
            task = loop.create_task(work())
            tasks.add(task)
            task.add_done_callback(on_done)

        def on_done(task: asyncio.Task[Any]) -> None:
            nonlocal remaining, to_start
            tasks.discard(task)
            remaining -= 1
            if to_start:
                to_start -= 1
                start()
            elif not remaining:
                ended.set_result(None)

        cpu = time.process_time()
        for _ in range(outstanding):
            start()
        await ended
        return time.process_time() - cpu

    tune_garbage_collection()
    with LoopThread("baseline") as thread:
        cpu = thread.run(main(), DEADLINE)
    return {"cpu_us_per_task": 1e6 * cpu / total, "tasks_per_s": total / cpu}


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_part(part: str, outstanding: int, batches: int) -> dict[str, Any]:
    """Run one measurement in a separate process and return its results."""
    command = [sys.executable, __file__, "--part", part, "--outstanding", str(outstanding), "--batches", str(batches)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False, env=environment)
    if result.returncode:
        raise SystemExit(f"{part}: exit code {result.returncode}\n{(result.stdout + result.stderr)[-4000:]}")
    measurements: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    print(f"{part:16s}" + ", ".join(f"{name} {value:.6g}" for name, value in measurements.items()), flush=True)
    return measurements


def median_run(runs: list[dict[str, Any]], key: str) -> dict[str, Any]:
    """Return the run whose `key` is the (lower) median."""
    return sorted(runs, key=lambda run: run[key])[(len(runs) - 1) // 2]


def main() -> None:
    """Run the measurements in turn and print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outstanding", type=int, default=100_000, help="outstanding episodes; a multiple of 80")
    parser.add_argument("--batches", type=int, default=12, help="measured batches per run")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each measurement")
    parser.add_argument(
        "--default-gc", action="store_true", help="also measure with the default garbage collector settings of Python"
    )
    parser.add_argument("--quick", action="store_true", help="few episodes, the runtime only; only checks that it runs")
    # the first core often handles interrupts
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="the core to run on")
    parser.add_argument("--part", choices=["tasks", "engine", "runtime", "runtime-default-gc"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        measurements = measure_runtime(outstanding=800, batches=4, tuned=False, completion_seconds=QUICK_SECONDS)
        print(json.dumps({"benchmark": "rollout_runtime", "outstanding": 800, "runtime": measurements}))
        return
    os.sched_setaffinity(0, {options.core})  # child processes inherit it
    if options.part in ("tasks", "engine"):
        total = 2 * options.outstanding
        print(json.dumps(measure_baseline(options.outstanding, total, use_engine=options.part == "engine")))
        return
    if options.part:
        print(json.dumps(measure_runtime(options.outstanding, options.batches, options.part == "runtime", SECONDS)))
        return
    parts = ["tasks", "engine", "runtime"] + ["runtime-default-gc"] * options.default_gc
    runs: dict[str, list[dict[str, Any]]] = {part: [] for part in parts}
    for _ in range(options.repeats):
        for part in parts:
            runs[part].append(run_part(part, options.outstanding, options.batches))
    result: dict[str, Any] = {"benchmark": "rollout_runtime", "outstanding": options.outstanding, "core": options.core}
    result |= {part: median_run(part_runs, next(iter(part_runs[0]))) for part, part_runs in runs.items()}
    # CPU time of other programs is not a cost of the runtime; all runs are printed above
    result["runtime"] = max(runs["runtime"], key=lambda run: run["cpu_fraction"])
    result["runs"] = [{key: run[key] for key in ("episodes_per_s", "cpu_fraction")} for run in runs["runtime"]]
    for baseline in ("tasks", "engine"):
        ratios = [
            run["cpu_us_per_episode"] / baseline_run["cpu_us_per_task"]
            for run, baseline_run in zip(runs["runtime"], runs[baseline], strict=True)
        ]
        result[f"ratio_to_{baseline}_cpu"] = round(statistics.median(ratios), 2)
    result["load"] = os.getloadavg()[0]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
