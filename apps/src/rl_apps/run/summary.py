"""The final summary of a run: metrics before and after, its files, and a next command."""

from __future__ import annotations

import shlex
from collections import defaultdict
from itertools import batched
from pathlib import Path
from typing import Any

from rl_apps.settings.command_line import setting
from rl_apps.settings.config import GRPOConfig, RunConfig
from rl_apps.settings.data import GENERATED, held_out_rows, load_rows
from rl_apps.settings.model import EMBEDDED
from rl_contracts.runtime.json_lines import json_lines
from rl_contracts.runtime.run_files import REPORT_FILE, steps_in
from rl_launchers import uv_parent

METRICS = {
    "loss/train": "Training loss",
    "loss/eval": "Held-out loss",
    "eval/accuracy": "Held-out accuracy",
    "eval/reward": "Held-out reward",
}
"""Metrics of the summary: name in metrics.jsonl, and label."""


def after_grpo(config: GRPOConfig, run_dir: Path, command: str = "gsm8k-grpo") -> list[str]:
    """Return the summary: accuracy before and after (by verb for generated problems), files and a next command."""
    records = read_metrics(run_dir)
    steps, version = _last(records, "step"), _last(records, "version")
    lines = ["", f"GRPO finished {steps:.0f} step{'s' * (steps != 1)} (weights version {version:.0f})."]
    name = answers_name(records)
    measured = [(r["step"], r[name]) for r in records if r.get(name) is not None]
    if measured:
        temperature = config.evaluation.temperature
        sampling = f"temperature {temperature:g}" if temperature else "greedy"
        lines.append(
            f"{METRICS[name]} ({sampling}{_evaluated(run_dir, measured[-1][0])}): "
            f"{_change([value for _, value in measured])}"
        )
        if len(measured) >= 2 and config.data.name == GENERATED and name == "eval/accuracy":
            lines += by_verb(config, run_dir, measured[0][0], measured[-1][0])
    lines += _set_lines(config, records)
    rewards = [r["reward/mean"] for r in records if r.get("reward/mean") is not None]
    if rewards and not any(rewards):
        lines.append(
            "No completion had a reward, so the model learned nothing. Start from a model that is sometimes right "
            "(train it with gsm8k-sft or rl sft), or allow longer completions (rollout.generation.max_new_tokens)."
        )
    stale = [r["staleness/max"] for r in records if r.get("staleness/max") is not None]
    if stale:
        lines.append(f"Maximum staleness: {max(stale):.0f} version{'s' * (max(stale) != 1)}.")
    if unused := sum(r.get("groups/left_over") or 0 for r in records):
        lines.append(f"{unused:.0f} prompts were not used, because one data-parallel rank had exhausted its data.")
    lines += files(run_dir)
    if config.rollout.max_staleness and config.total_steps != 0:
        run = _relative(run_dir)
        lines.append(
            f"Try next: {_program()} {command} --config {shlex.quote(f'{run}/config.yaml')} "
            f"{_setting('run_dir', f'{run}-on-policy')} rollout.max_staleness=0"
        )
    return lines


def after_sft(config: RunConfig, run_dir: Path, command: str = "gsm8k-grpo") -> list[str]:
    """Return the summary of an SFT run, and a command that continues with GRPO."""
    path = Path(config.data.path).expanduser()
    settings = {"data.name": config.data.name}
    if config.data.path:
        settings["data.path"] = _relative(path) if path.exists() else config.data.path  # otherwise a hub id
    settings |= {f"data.columns.{expected}": actual for expected, actual in config.data.columns.items()}
    checkpoint = last_checkpoint(run_dir)
    settings["model.path"] = _relative(checkpoint) if checkpoint else "CHECKPOINT"
    if config.recipe == EMBEDDED:
        settings["recipe"] = EMBEDDED
    arguments = " ".join(_setting(name, value) for name, value in settings.items())
    return [*after_any(config, run_dir), f"Try next: {_program()} {command} {arguments}"]


def after_any(config: RunConfig, run_dir: Path) -> list[str]:
    """Return losses and accuracy before and after, and the files."""
    records, lines = read_metrics(run_dir), [""]
    for name in ("loss/train", "loss/eval", answers_name(records)):
        values = [r[name] for r in records if r.get(name) is not None]
        if len(values) >= 2:
            change = f" ({values[-1] / values[0] - 1:+.0%})" if name.startswith("loss/") else ""
            lines.append(f"{METRICS[name]}: {values[0]:.4f} -> {values[-1]:.4f}{change}")
    return [*lines, *_set_lines(config, records), *files(run_dir)]


def _set_lines(config: RunConfig, records: list[dict[str, Any]]) -> list[str]:
    """Return the accuracy or reward on each named evaluation set, before and after."""
    lines = []
    for name in getattr(config.evaluation, "sets", {}):
        metric = answers_name(records, f"eval/{name}")
        values = [record[metric] for record in records if record.get(metric) is not None]
        lines += [f"Held-out {metric.rpartition('/')[2]} of {name}: {_change(values)}"] if values else []
    return lines


def _change(values: list[float]) -> str:
    """Return the first and the last value as text, or a single value."""
    return " -> ".join(f"{value:.3f}" for value in values[:1] + values[1:][-1:])


def answers_name(records: list[dict[str, Any]], prefix: str = "eval") -> str:
    """Return the metric of held-out completions: `eval/accuracy`, or `eval/reward` if rewards are not all 0 or 1."""
    reward, accuracy = f"{prefix}/reward", f"{prefix}/accuracy"
    graded = any(r.get(reward) is not None and r.get(accuracy) is None for r in records)
    return reward if graded else accuracy


def files(run_dir: Path) -> list[str]:
    """Return the lines that name the files of a run."""
    checkpoint = last_checkpoint(run_dir)
    return [
        "",
        f"Run directory: {run_dir} (metrics.jsonl, checkpoints/, logs/, config.yaml)",
        *([f"Report: {report}"] if (report := run_dir / REPORT_FILE).exists() else []),
        f"Model: {checkpoint}" if checkpoint else "Model: no checkpoint was written",
    ]


def _evaluated(run_dir: Path, step: int) -> str:
    """Return the number of evaluated problems as text, or "" if their completions were not stored."""
    files = (run_dir / "rollouts").glob(f"eval_step_{step}-*.jsonl")
    problems = {record["prompt_id"] for path in files for record in json_lines(path)}
    return f", {len(problems)} problems" if problems else ""


def by_verb(config: GRPOConfig, run_dir: Path, first: int, last: int) -> list[str]:
    """Return the held-out accuracy before and after, by verb."""
    from rl_apps.embedded.warmup import TAUGHT_VERBS

    rows = held_out_rows(load_rows(config.data, "test", "rl", config.seed), config.evaluation.examples)
    before, after = (accuracy_by("verbs", rows, run_dir, step) for step in (first, last))
    lines = ["Accuracy by verb:"]
    for kind, chosen in (
        ("taught in the warm-up", TAUGHT_VERBS),
        ("learned from the reward", set(before) - TAUGHT_VERBS),
    ):
        changes = [f"{verb} {before[verb]:.2f} -> {after[verb]:.2f}" for verb in sorted(chosen & set(before))]
        lines += [f"  {kind}:"] if changes else []
        lines += ["    " + ", ".join(part) for part in batched(changes, 3)]  # at most 80 columns
    return lines


def accuracy_by(key: str, rows: list[dict[str, Any]], run_dir: Path, step: int) -> dict[str, float]:
    """Return the accuracy of the evaluated examples by each tag in their list `key`."""
    correct: dict[str, list[float]] = defaultdict(list)
    examples = {row["prompt_id"]: row for row in rows}
    for path in sorted((run_dir / "rollouts").glob(f"eval_step_{step}-*.jsonl")):
        for record in json_lines(path):
            for tag in examples[record["prompt_id"]][key]:
                correct[tag].append(float(record["reward"] >= 1))
    return {tag: sum(values) / len(values) for tag, values in correct.items()}


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return all metrics records of a run."""
    return list(json_lines(run_dir / "metrics.jsonl"))


def last_checkpoint(run_dir: Path) -> Path | None:
    """Return the newest checkpoint, or None."""
    directory = run_dir / "checkpoints"
    steps = steps_in(directory)
    return directory / f"step_{steps[-1]}" if steps else None


def _program() -> str:
    """Return `rl` as the user types it: with uv, if uv started this command."""
    return "uv run --package rl-apps rl" if uv_parent() else "rl"


def _relative(path: Path) -> str:
    """Return a path, relative to the current directory if it is below it."""
    path = path.resolve()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _setting(name: str, value: str) -> str:
    return shlex.quote(setting(name, value))


def _last(records: list[dict[str, Any]], name: str) -> float:
    return next((r[name] for r in reversed(records) if r.get(name) is not None), 0)
