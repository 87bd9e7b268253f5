"""Compare a step of asynchronous training with training alone, generation alone and synchronous training.

    uv run python tests/benchmarks/async_overlap.py

A step is the one of `grpo_step.py`: 64 completions and one optimizer step. A repetition consists of four consecutive
runs, each with a server process and a trainer process:

- `asynchronous`: `gsm8k-grpo` with the value of `--max-staleness`, by default 1.
- `training`: the trainer alone, on the batches saved by the asynchronous run; it publishes to an idle server.
- `generation`: the server alone; the client takes the batches and does not train.
- `synchronous`: as `asynchronous`, with `max_staleness` 0, so that server and trainer alternate.

Seconds are means over the measured steps. The last line is one JSON object. `overlap` is the asynchronous step divided
by the longer of `training` and `generation`; 1 is the limit. `speed_up` is the synchronous step divided by the
asynchronous one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from grpo_step import HERE, Job, make_model, run_command, run_rl
from imposed_lengths import CASES


def run_alone(mode: str, job: Job, recorded: Path) -> float:
    """Return the seconds per step of one side, with the config and the batches of a recorded run."""
    command = [sys.executable, str(HERE / "async_overlap_alone.py"), mode, str(recorded), str(job.warmup)]
    return float(json.loads(run_command(command).strip().splitlines()[-1])["seconds"])


def measure(job: Job, directory: Path, staleness: int, quick: bool) -> dict[str, float]:
    """Return the seconds per step of each run of one repetition; with `quick`, of the asynchronous run only."""

    def command(name: str, staleness: int) -> float:
        settings = {"rollout.max_staleness": staleness, "checkpoint.save_batches": True}
        return run_rl(job, directory / name, settings)["seconds"] / job.steps

    seconds = {"asynchronous": command("asynchronous", staleness)}
    if quick:
        return seconds
    # directly after the run it is compared with, because the speed of a machine may drift
    seconds["training"] = run_alone("training", job, directory / "asynchronous")
    seconds["generation"] = run_alone("generation", job, directory / "asynchronous")
    return seconds | {"synchronous": command("synchronous", 0)}


def main() -> None:
    """Measure; print a line per repetition and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24, help="measured steps per run")
    parser.add_argument("--warmup", type=int, default=3, help="unmeasured steps before them")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions of the four runs")
    parser.add_argument("--case", choices=[*CASES], default="uniform", help="completion lengths")
    parser.add_argument("--max-staleness", type=int, default=1, help="max_staleness of the asynchronous run")
    parser.add_argument(
        "--quick", action="store_true", help="small model, two steps, asynchronous run only; only checks that it runs"
    )
    options = parser.parse_args()
    sizes: dict[str, int] = {}
    layers, hidden = 4, 128
    if options.quick:
        layers, hidden = 1, 32
        options.steps, options.warmup, options.repeats = 2, 1, 1
        sizes = {"prompts": 2, "group": 4}
    runs: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as temporary:
        model = make_model(Path(temporary) / "models", layers, hidden)
        job = Job(options.case, model, options.warmup, options.steps, **sizes)
        for repeat in range(options.repeats):
            runs.append(measure(job, Path(temporary) / str(repeat), options.max_staleness, options.quick))
            line = ", ".join(f"{name} {value:.3f}" for name, value in runs[-1].items())
            print(f"seconds per step: {line}; load {os.getloadavg()[0]:.1f}", flush=True)
    result: dict[str, Any] = {
        "benchmark": "async_overlap",
        "case": options.case,
        "max_staleness": options.max_staleness,
        "layers": layers,
        "hidden": hidden,
        "cores": os.cpu_count(),
        "seconds_per_step": {name: round(statistics.median(run[name] for run in runs), 4) for name in runs[0]},
    }
    if not options.quick:
        overlap = [run["asynchronous"] / max(run["training"], run["generation"]) for run in runs]
        speed_up = statistics.median(run["synchronous"] / run["asynchronous"] for run in runs)
        result["overlap"], result["speed_up"] = round(statistics.median(overlap), 3), round(speed_up, 3)
        result["overlap_runs"] = [round(value, 3) for value in overlap]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
