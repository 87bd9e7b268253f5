"""Progress of a run: a live view in a terminal (`rl_monitor.live`), otherwise a line per step."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_contracts.runtime.json_lines import LineReader
from rl_contracts.runtime.run_files import read_stage
from rl_contracts.runtime.terminal import leave_pipe

if TYPE_CHECKING:
    from rich.console import Console

    from rl_monitor.live import Screen

__all__ = ["GRPO_COLUMNS", "PREFERENCE_COLUMNS", "SFT_COLUMNS", "RunProgress"]

GRPO_COLUMNS: dict[str, tuple[str, str]] = {
    "reward": ("reward/mean", ".3f"),
    "accuracy": ("eval/accuracy", ".3f"),
    "held-out reward": ("eval/reward", ".3f"),
    "length": ("length/mean", ".1f"),
    "stale": ("staleness/mean", ".2f"),
    "gap": ("gap/mean_abs", ".1e"),
    "gen tok/s": ("throughput/generated_tokens_per_s", ".0f"),
    "train tok/s": ("throughput/trained_tokens_per_s", ".0f"),
}
"""Columns of a step's line: label to (metric, format)."""

SFT_COLUMNS: dict[str, tuple[str, str]] = {
    "loss": ("loss/train", ".4f"),
    "eval loss": ("loss/eval", ".4f"),
    "accuracy": ("eval/accuracy", ".3f"),
    "held-out reward": ("eval/reward", ".3f"),
    "grad norm": ("grad_norm", ".2f"),
    "lr": ("lr", ".1e"),
    "tok/s": ("throughput/trained_tokens_per_s", ".0f"),
}

PREFERENCE_COLUMNS: dict[str, tuple[str, str]] = {
    "loss": ("loss/train", ".4f"),
    "accuracy": ("pair/accuracy", ".3f"),
    "margin": ("pair/margin", ".3f"),
    "eval loss": ("loss/eval", ".4f"),
    "eval accuracy": ("eval/accuracy", ".3f"),
    "grad norm": ("grad_norm", ".2f"),
    "tok/s": ("throughput/trained_tokens_per_s", ".0f"),
}

STAGES = ("rollout_wait", "train", "publish", "gap")

STAGE_TEXTS = {
    "rollout_wait": "waiting for the first batch",
    "train": "training",
    "publish": "sending the weights to the servers",
    "gap": "comparing log-probs of servers and trainer",
    "sleep": "switching the devices between servers and trainers",
    "save": "saving a checkpoint",
    "recover": "saving a recovery checkpoint",
    "evaluate": "evaluating",
}
"""Description of each stage of a trainer, see `rl_contracts.runtime.run_files`."""

CUT_OFF = 0.2
"""Fraction of truncated completions from which a step gives a warning."""


METRICS: dict[str, tuple[str, str]] = {
    "reward": ("reward/mean", ".3f"),
    "accuracy": ("eval/accuracy", ".3f"),
    "held-out reward": ("eval/reward", ".3f"),
    "loss": ("loss/train", ".4f"),
    "eval loss": ("loss/eval", ".4f"),
    "pair accuracy": ("pair/accuracy", ".3f"),
    "margin": ("pair/margin", ".3f"),
    "length": ("length/mean", ".1f"),
    "truncated": ("truncated/fraction", ".1%"),
    "stale": ("staleness/mean", ".2f"),
    "gap": ("gap/mean_abs", ".1e"),
    "entropy": ("entropy/mean", ".3f"),
    "grad norm": ("grad_norm", ".2f"),
    "lr": ("lr", ".1e"),
    "gen tok/s": ("throughput/generated_tokens_per_s", ".0f"),
    "train tok/s": ("throughput/trained_tokens_per_s", ".0f"),
}
"""Metrics of the live view, in the form of `GRPO_COLUMNS`. The view omits metrics that a run does not record."""


class RunProgress:
    """Follow a run's metrics file: with a live view in a terminal (`rl_monitor.live`), otherwise with a line per step.
    Call `tick` often; use as a context manager.

    Args:
        metrics: the run's `metrics.jsonl`.
        total_steps: steps of the run.
        columns: metrics of a step's line; the view shows `METRICS` too.
        console: output.
        from_the_start: whether to print the steps that the file already holds.
    """

    def __init__(
        self,
        metrics: Path,
        total_steps: int,
        columns: dict[str, tuple[str, str]],
        console: Console | None = None,
        from_the_start: bool = False,
    ) -> None:
        from rich.console import Console

        self.console = console or Console(highlight=False)
        self.console.on_broken_pipe = leave_pipe  # type: ignore[assignment, method-assign]  # the run continues without output
        self.columns, self.total_steps = columns, total_steps
        self._metrics, self._reader = metrics, LineReader(metrics)
        self._warned: Counter[str] = Counter()
        self._last_stage = ""
        self._screen: Screen | None = None
        redraws = not self.console.is_dumb_terminal and "JPY_PARENT_PID" not in os.environ  # a cell keeps every frame
        if self.console.is_terminal and redraws and self.console.file.isatty():
            from rl_monitor.live import RunView, Screen

            column_metrics = {name for name, _ in columns.values()}
            metrics_shown = columns | {
                label: entry for label, entry in METRICS.items() if entry[0] not in column_metrics
            }
            self._screen = Screen(
                RunView(str(metrics.parent), total_steps, metrics_shown), metrics.parent, self.console
            )
        if not from_the_start and self._screen is None:
            self.rewind()  # skip the records that exist already

    def __enter__(self) -> RunProgress:
        if self._screen:
            self._screen.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.tick()
        finally:
            self._reader.close()
            if self._screen:
                self._screen.__exit__()

    def print_message(self, stage: str) -> None:
        """Show the current stage."""
        if self._screen:
            self._screen.view.stage = stage
        elif stage != self._last_stage:
            self.console.print(stage, soft_wrap=True, markup=False)
        self._last_stage = stage

    def rewind(self) -> None:
        """Start over: records were removed from the file and will be written again."""
        self._reader.close()
        self._reader = LineReader(self._metrics, skip=self._screen is None)
        if self._screen:  # the view shows curves over all steps
            self._screen.view.records.clear()
            self._warned.clear()
            self._show_records()

    def tick(self) -> None:
        """Show the records appended since the last call."""
        if self._reader.replaced():
            self.rewind()
        self._show_records()
        if self._screen:
            if stage := describe_stage(self._metrics.parent):
                self.print_message(stage)
            elif self._screen.view.records:
                self.print_message("training")
            self._screen.update_completion()

    def _show_records(self) -> None:
        for record in self._reader.read():
            if self._screen:
                self._screen.view.add(record)
            else:
                self.console.print(step_line(record, self.columns, self.total_steps), soft_wrap=True)
            for kind, warning in warnings_of(record).items():
                self._warn(kind, warning, record["step"])

    def _warn(self, kind: str, warning: str, step: int) -> None:
        """Show a warning.

        The live view shows the newest warning of each kind. Without it, occurrences 1, 2, 4, 8 and so on are printed.
        """
        self._warned[kind] += 1
        times = self._warned[kind]
        repeats = f" (also in {times - 1} earlier step{'s' * (times > 2)})" if times > 1 else ""
        if self._screen:
            self._screen.view.warn(kind, f"step {step}: {warning}{repeats}")
        elif times & (times - 1) == 0:
            self.console.print(f"warning: {warning}{repeats}", soft_wrap=True)


def describe_stage(run_dir: Path) -> str:
    """Return the stage that a run shows, with its progress and seconds; empty between stages."""
    stage = read_stage(run_dir)
    if stage is None:
        return ""
    text = STAGE_TEXTS.get(stage["stage"], stage["stage"])
    progress = ", {} of {}".format(*stage["progress"]) if stage["progress"] else ""
    return f"{text}{progress}, {max(0.0, time.time() - stage['since']):.0f} s"


def step_line(record: dict[str, Any], columns: dict[str, tuple[str, str]], total_steps: int) -> str:
    """Format a record as one line, without the columns that have no value."""
    parts = [f"step {record['step']:>{len(str(total_steps))}}/{total_steps}"]
    for label, (name, form) in columns.items():
        is_duplicate = name == "eval/reward" and record.get("eval/accuracy") is not None
        if record.get(name) is not None and not is_duplicate:
            parts.append(f"{label} {record[name]:{form}}")
    seconds = record.get("time/step")
    if seconds:
        durations = {s.removeprefix("rollout_"): record[f"time/{s}"] for s in STAGES if f"time/{s}" in record}
        fractions = [f"{stage} {duration / seconds:.0%}" for stage, duration in durations.items()]
        parts.append(f"{seconds:.2f} s ({', '.join(fractions)})")
    if record.get("applied", 1) < 1:
        why = "loss or gradients not finite" if "grad_norm" in record else "no gradient"
        parts.append(f"NOT APPLIED: {1 - record['applied']:.0%} ({why})")
    return "  ".join(parts)


def warnings_of(record: dict[str, Any]) -> dict[str, str]:
    """Return the warnings of a step, by kind."""
    warnings = {}
    cut, failed = record.get("truncated/fraction") or 0, record.get("groups/failed") or 0
    equal, singletons = record.get("groups/zero_variance") or 0, record.get("groups/singleton") or 0
    if cut >= CUT_OFF:
        warnings["cut"] = (
            f"{cut:.0%} of the completions were truncated; raise rollout.generation.max_new_tokens, data.max_length or "
            "the context length of the servers"
        )
    if equal and equal + singletons >= record["groups/trained"]:
        warnings["equal"] = (
            f"every group had identical rewards ({equal:.0f} groups), so this step had no gradient; see "
            "rollout.dynamic_sampling"
        )
    if record.get("grad_norm") == 0 and "equal" not in warnings:
        warnings["gradient"] = "the gradient is exactly 0: check that a custom loss is not detached"
    if failed:
        warnings["failed"] = f"{failed:.0f} group(s) failed and were replaced; see the trainers' logs"
    if record.get("applied", 1) < 1:
        warnings["skipped"] = "optimizer steps were skipped, so their batches were not learned"
    return warnings
