"""Sample efficiency of `gsm8k-grpo` and of TRL's GRPOTrainer on the demo's problems; used by `grpo_step.py`.

Both start from the same warmed-up model and use the same hyperparameters. `gsm8k-grpo` is asynchronous with the demo's
staleness, TRL is on-policy. Every few steps both evaluate the same held-out problems greedily. The result is the number
of training completions until the accuracy reaches the goal, interpolated between two evaluations.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from rl_apps.embedded.prepare import EmbeddedRecipe, prepare_embedded
from rl_apps.programs.gsm8k_grpo import APP
from rl_apps.settings.data import first_rows, load_rows
from rl_datasets import PromptLoader

HERE = Path(__file__).resolve().parent
GOAL = 0.80
"""Accuracy to reach."""
EVERY = 5
"""Steps between two evaluations."""
HELD_OUT = 256
"""Problems per evaluation."""
STEPS = 90
"""Maximum number of steps of a run that does not reach the goal."""


def samples_to_goal(curve: list[tuple[int, float]], per_step: int) -> float | None:
    """Return the completions at which a curve of (step, accuracy) first reaches the goal, or None."""
    last_step, last = curve[0]
    for step, accuracy in curve:
        if accuracy >= GOAL:
            if step == last_step:
                return float(step * per_step)
            return (last_step + (step - last_step) * (GOAL - last) / (accuracy - last)) * per_step
        last_step, last = step, accuracy
    return None


def settings(seed: int) -> Any:
    """Return the config of the demo."""
    return APP.config([f"seed={seed}"])


def run_rl(seed: int, directory: Path, run: Callable[[list[str]], str]) -> list[tuple[int, float]]:
    """Run `gsm8k-grpo` and return its curve of (step, accuracy)."""
    overrides = {
        "run_dir": directory,
        "seed": seed,
        "total_steps": STEPS,
        "evaluation.every": EVERY,
        "evaluation.examples": HELD_OUT,
    }
    command = [sys.executable, "-c", "from rl_apps.cli.driver import main; main('gsm8k-grpo')"]
    run([*command, *(f"{key}={value}" for key, value in overrides.items())])
    records = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [(r["step"], r["eval/accuracy"]) for r in records if r.get("eval/accuracy") is not None]


def run_trl(seed: int, directory: Path, run: Callable[[list[str]], str], threads: int) -> list[tuple[int, float]]:
    """Run TRL on the prompts of `run_rl`, in the same order, and return its curve of (step, accuracy)."""
    config = settings(seed)
    directory.mkdir(parents=True)
    prompts = PromptLoader(load_rows(config.data, "train", "rl", seed), seed=seed)
    optimizer, algorithm, generation = config.actor.optimizer, config.algorithm, config.rollout.generation
    job = {
        "model": str(prepare_embedded(seed, EmbeddedRecipe())),
        "rows": list(islice(prompts, STEPS * config.data.batch_size)),
        "held_out": first_rows(load_rows(config.data, "test", "rl", seed), HELD_OUT),
        "directory": str(directory),
        "threads": threads,
        "seed": seed,
        "prompts": config.data.batch_size,
        "group": config.rollout.group_size,
        "steps": STEPS,
        "every": EVERY,
        "goal": GOAL,
        "max_new_tokens": generation.max_new_tokens,
        "temperature": generation.temperature,
        "lr": optimizer.lr,
        "warmup_steps": optimizer.warmup_steps,
        "beta2": optimizer.beta2,
        "weight_decay": optimizer.weight_decay,
        "clip_low": algorithm.loss.clip_low,
        "clip_high": algorithm.loss.clip_high,
    }
    path = directory / "job.json"
    path.write_text(json.dumps(job, default=str))
    output = run([sys.executable, str(HERE / "grpo_samples_trl.py"), str(path)])
    curve = json.loads(output.strip().splitlines()[-1])["curve"]
    return [(int(step), float(accuracy)) for step, accuracy in curve]


def measure(seeds: int, directory: Path, run: Callable[[list[str]], str], threads: int) -> dict[str, Any]:
    """Run `gsm8k-grpo` and TRL for each seed; return the completions to the goal, and the ratio of the medians."""
    config = settings(1)
    per_step = config.data.batch_size * config.rollout.group_size
    completions: dict[str, list[float | None]] = {"rl": [], "trl": []}
    for seed in range(1, seeds + 1):
        completions["rl"].append(samples_to_goal(run_rl(seed, directory / f"samples-rl-{seed}", run), per_step))
        completions["trl"].append(
            samples_to_goal(run_trl(seed, directory / f"samples-trl-{seed}", run, threads), per_step)
        )
        print(
            f"seed {seed}: completions to {GOAL}: rl {completions['rl'][-1]}, trl {completions['trl'][-1]}",
            flush=True,
        )
    # a run that does not reach the goal counts as the slowest
    medians = {
        side: statistics.median(float("inf") if count is None else count for count in counts)
        for side, counts in completions.items()
    }
    return {
        "goal": GOAL,
        "completions": {
            side: [None if count is None else round(count) for count in counts] for side, counts in completions.items()
        },
        "ratio": round(medians["rl"] / medians["trl"], 3) if medians["rl"] < float("inf") else None,
    }
