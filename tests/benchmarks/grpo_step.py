"""Completions and tokens per second of the whole GRPO loop on a CPU, compared with TRL's GRPOTrainer.

    uv run python tests/benchmarks/grpo_step.py --peer trl

A step consists of 64 completions, 8 for each of 8 prompts, and one optimizer step on a random float32 Qwen3 of 4 layers
of width 128. Lengths are imposed: `uniform` is 64 tokens each, `long_tail` is log-normal with a mean of about 54 and a
maximum of 256. `rl` is the command `gsm8k-grpo` with its defaults: asynchronous, with a server, a trainer and a reward
process, all checks and all files of a run. Its times come from `metrics.jsonl`. The peer is one process with a thread
per core, or with one thread if a trial shows that this is faster, as on a busy machine. The sides run in turn, never at
the same time. With a peer, the script also runs `grpo_samples` at the end. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import grpo_samples
from imposed_lengths import CASES, WORKFLOWS

HERE = Path(__file__).resolve().parent
DEADLINE = 1800.0
"""Longest run of a side, in seconds."""
LENGTH_TOLERANCE = 0.05
"""Largest accepted relative difference of the mean lengths; the order of the prompts differs slightly."""


@dataclass(frozen=True)
class Job:
    """Settings of a run, the same for both sides."""

    case: str
    """Key of `imposed_lengths.CASES`."""
    model: str
    """Directory in Hugging Face format."""
    warmup: int
    """Unmeasured steps at the start."""
    steps: int
    """Measured steps."""
    prompts: int = 8
    """Prompts per step."""
    group: int = 8
    """Completions per prompt."""
    lr: float = 1e-5
    """Constant learning rate of AdamW."""
    weight_decay: float = 0.01
    beta2: float = 0.95
    seed: int = 1


def make_model(directory: Path, layers: int, hidden: int) -> str:
    """Create a random float32 model with a tokenizer trained on the questions; return its path."""
    from rl_apps.embedded.prepare import ModelShape, ScratchRecipe, prepare_from_scratch
    from rl_datasets.word_problems import WordProblems

    shape = ModelShape(
        hidden_size=hidden, layers=layers, heads=4, head_dim=32, intermediate_size=3 * hidden, max_length=1024
    )
    texts = [row["messages"][0]["content"] for row in WordProblems(seed=1, size=2048)]
    return str(prepare_from_scratch(texts, 1, ScratchRecipe(shape=shape), directory))


def run_rl(job: Job, directory: Path, extra: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run `gsm8k-grpo` with `extra` settings; return totals and stage means over the measured steps."""
    workflow = WORKFLOWS[job.case]
    overrides = {
        "run_dir": directory,
        "seed": job.seed,
        "total_steps": job.warmup + job.steps,
        "model.path": job.model,
        "recipe": "embedded",
        "data.batch_size": job.prompts,
        "rollout.group_size": job.group,
        "rollout.workflow": f"{workflow.__module__}:{workflow.__name__}",
        "rollout.reward": f"{workflow.__module__}:even_fraction",
        "actor.optimizer.lr": job.lr,
        "actor.optimizer.weight_decay": job.weight_decay,
        "actor.optimizer.beta2": job.beta2,
        "evaluation.examples": 0,
        "rollout.trial_episode": False,  # the trial episode takes seconds and is not part of a step
        **(extra or {}),
    }
    command = [sys.executable, "-c", "from rl_apps.cli.driver import main; raise SystemExit(main('gsm8k-grpo'))"]
    run_command([*command, *(f"{key}={value}" for key, value in overrides.items())])
    return read_measurements(job, directory)


def read_measurements(job: Job, directory: Path) -> dict[str, Any]:
    """Read totals and stage means over the measured steps from `metrics.jsonl` of a run."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    records = [r for r in map(json.loads, lines) if r["step"] > job.warmup]
    if len(records) != job.steps:
        raise SystemExit(f"expected {job.steps} measured steps, found {len(records)} in {directory}")
    mean = {
        name.removeprefix("time/"): statistics.mean(r.get(name, 0.0) for r in records)
        for name in ("time/rollout_wait", "time/train", "time/publish", "time/gap", "staleness/mean")
    }
    return {
        "seconds": sum(r["time/step"] for r in records),
        "completions": sum(r["sequences"] for r in records),
        "tokens": sum(r["length/mean"] * r["sequences"] for r in records),
        "step": {name: round(value, 4) for name, value in mean.items()},
    }


def run_trl(job: Job, directory: Path, threads: int) -> dict[str, Any]:
    """Run TRL on the same prompts in the same order; return totals over the measured steps."""
    from rl_datasets import PromptLoader
    from rl_datasets.word_problems import WordProblems

    directory.mkdir(parents=True)
    prompts = PromptLoader(WordProblems(seed=job.seed), seed=job.seed)
    rows = list(islice(prompts, (job.warmup + job.steps) * job.prompts))
    path = directory / "job.json"
    extra = {"rows": rows, "directory": str(directory), "threads": threads}
    path.write_text(json.dumps(asdict(job) | extra))
    output = run_command([sys.executable, str(HERE / "grpo_step_trl.py"), str(path)])
    measurements: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return measurements


def fastest_thread_count(job: Job, directory: Path) -> int:
    """Return the number of threads with which the peer is faster now: one, or one per core."""
    counts = sorted({1, os.cpu_count() or 1})
    if len(counts) == 1:
        return 1
    return min(counts, key=lambda count: run_trl(job, directory / f"trial-{count}", count)["seconds"])


def run_command(command: list[str]) -> str:
    """Run a command and return its standard output."""
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false"}
    # a thread limit of this process would slow the peer down; the launcher sets the limits of gsm8k-grpo
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        environment.pop(name, None)
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE, check=False)
    if result.returncode:
        raise SystemExit(
            f"{' '.join(command[:3])}: exit code {result.returncode}\n{(result.stdout + result.stderr)[-4000:]}"
        )
    return result.stdout


def rates(measurements: dict[str, Any]) -> dict[str, Any]:
    """Return rates and mean length of a run, and its stage means if it has them."""
    seconds = measurements["seconds"]
    return {
        "completions_per_s": round(measurements["completions"] / seconds, 2),
        "tokens_per_s": round(measurements["tokens"] / seconds, 1),
        "mean_tokens": round(measurements["tokens"] / measurements["completions"], 2),
        **({"step": measurements["step"]} if "step" in measurements else {}),
    }


def median_run(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median run by completions per second; add `runs`, the rates of all runs."""
    ordered = sorted(runs, key=lambda run: run["completions_per_s"])
    return ordered[(len(ordered) - 1) // 2] | {"runs": [run["completions_per_s"] for run in runs]}


def measure(job: Job, repeats: int, peer: str | None, peer_threads: int, directory: Path) -> dict[str, Any]:
    """Run both sides in turn, `repeats` times."""
    sides: dict[str, Callable[[Job, Path], dict[str, Any]]] = {"rl": run_rl}
    if peer == "trl":
        sides["trl"] = partial(run_trl, threads=peer_threads)
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for repeat in range(repeats):
        for side, run in sides.items():
            measurements = rates(run(job, directory / f"{job.case}-{side}-{repeat}"))
            runs[side].append(measurements)
            load = os.getloadavg()[0]
            print(
                f"{job.case:10s} {side:4s} {measurements['completions_per_s']:8.1f} completions/s "
                f"{measurements['tokens_per_s']:9.0f} tokens/s, mean length {measurements['mean_tokens']:.1f}, "
                f"load {load:.1f}" + (f", {measurements['step']}" if "step" in measurements else ""),
                flush=True,
            )
    result: dict[str, Any] = {side: median_run(side_runs) for side, side_runs in runs.items()}
    if "trl" in runs:
        result["trl"]["threads"] = peer_threads
        pairs = list(zip(runs["rl"], runs["trl"], strict=True))
        result["ratio"] = {
            name: round(statistics.median(own_run[name] / peer_run[name] for own_run, peer_run in pairs), 3)
            for name in ("completions_per_s", "tokens_per_s")
        }
        for own_run, peer_run in pairs:
            if job.steps >= 8 and abs(own_run["mean_tokens"] / peer_run["mean_tokens"] - 1) > LENGTH_TOLERANCE:
                raise SystemExit(f"expected equal mean lengths on both sides, found {own_run} and {peer_run}")
    return result


def main() -> None:
    """Measure; print a line per run and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=["trl"], help="also measure this library and print the ratios")
    parser.add_argument("--peer-threads", type=int, default=0, help="threads of the peer; 0: the fastest")
    parser.add_argument("--steps", type=int, default=12, help="measured steps per run")
    parser.add_argument("--warmup", type=int, default=3, help="unmeasured steps before them")
    parser.add_argument("--repeats", type=int, default=3, help="runs per side")
    parser.add_argument("--case", choices=[*CASES], help="only this case")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of the sample-efficiency comparison; 0: skip it")
    parser.add_argument(
        "--quick", action="store_true", help="small model, two steps, one case; only checks that it runs"
    )
    parser.add_argument("--keep", type=Path, help="parent of the run directories; by default temporary")
    options = parser.parse_args()
    sizes: dict[str, int] = {}
    layers, hidden = 4, 128
    if options.quick:
        layers, hidden = 1, 32
        options.steps, options.warmup, options.repeats, options.seeds = 2, 1, 1, 0
        sizes = {"prompts": 2, "group": 4}
        options.case = options.case or "uniform"
    with tempfile.TemporaryDirectory() as temporary:
        root = options.keep or Path(temporary)
        model = make_model(root / "models", layers, hidden)
        result: dict[str, Any] = {"benchmark": "grpo_step", "layers": layers, "hidden": hidden, "cores": os.cpu_count()}
        threads = options.peer_threads
        if options.peer and not threads:
            threads = fastest_thread_count(Job("uniform", model, 1, 1 if options.quick else 4, **sizes), root)
            print(f"trl runs with {threads} thread(s)", flush=True)
        for case in [options.case] if options.case else CASES:
            job = Job(case, model, options.warmup, options.steps, **sizes)
            result[case] = measure(job, options.repeats, options.peer, threads, root)
        if options.peer and options.seeds:
            result["samples"] = grpo_samples.measure(options.seeds, root, run_command, threads)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
