"""Summary of a run at the top of its page: model, data, algorithm, held-out metrics before and after, time, host."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Context
from typing import Any

from rl_monitor.report.curves import is_number

_EXAMPLES = re.compile(r"(eval(?:/[^/]+)?)/examples")
"""Metric that each evaluation set records."""
_DIGITS = Context(prec=4, rounding=ROUND_HALF_UP)
"""Rounding of the page's script, so that a value is the same in all its tables."""


def summary_of(
    records: Sequence[dict[str, Any]], settings: dict[str, Any], commands: Sequence[dict[str, Any]]
) -> dict[str, str]:
    """Return the facts of a run by label, without those that its files do not contain.

    Args:
        records: records of `metrics.jsonl`.
        settings: settings by dotted name.
        commands: commands that started or resumed the run, oldest first; see `rl_monitor.report.facts`.
    """

    def text(form: str, *names: str) -> str:
        values = [settings.get(name) for name in names]
        return "" if None in values or "" in values else form.format(*values)

    training = {
        "Batch": text("{} examples", "data.batch_size") + text(" x {} completions", "rollout.group_size"),
        "Learning rate": text("{}, {}", "actor.optimizer.lr", "actor.optimizer.schedule"),
    }
    facts = {
        "Model": text("{}", "model.path"),
        "Data": f"{text('{}', 'data.name')} {text('{}', 'data.path')}".strip(),
        "Algorithm": text("{}", "experiment")
        + text(": {} advantages, {} loss", "algorithm.advantage.kind", "algorithm.loss.kind"),
        **(training if settings.get("total_steps") != 0 else {}),
        **_held_out(records),
        **_change(records, "Held-out loss", "loss/eval"),
        **_change(records, "Training reward", "reward/mean"),
        **_change(records, "Training loss", "loss/train"),
        "Training time": _training_time(records),
        "Host": str(commands[-1].get("host", "")) if commands else "",
        "Allocation": text("{}", "allocation"),
    }
    return {label: fact for label, fact in facts.items() if fact}


def _held_out(records: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the change of each evaluation set: its accuracy, or its reward if rewards other than 0 and 1 occurred."""
    names = dict.fromkeys(name for record in records for name in record)
    facts: dict[str, str] = {}
    for prefix in dict.fromkeys(["eval", *(match[1] for match in map(_EXAMPLES.fullmatch, names) if match)]):
        accuracy, reward = f"{prefix}/accuracy", f"{prefix}/reward"
        graded = any(is_number(record.get(reward)) and not is_number(record.get(accuracy)) for record in records)
        name = "reward" if graded else "accuracy"
        evaluation_set = prefix.removeprefix("eval").replace("/", ", ", 1)
        facts |= _change(records, f"Held-out {name}{evaluation_set}", f"{prefix}/{name}")
    return facts


def _change(records: Sequence[dict[str, Any]], label: str, metric: str) -> dict[str, str]:
    """Return the first and the last value of a metric with their steps; empty without values."""
    values = [(record["step"], record[metric]) for record in records if is_number(record.get(metric))]
    if not values:
        return {}
    (first_step, first), (last_step, last) = values[0], values[-1]
    before, after = (f"{float(_DIGITS.create_decimal(value)):.4g}" for value in (first, last))
    if first_step == last_step:
        return {label: f"{after} (step {last_step})"}
    return {label: f"{before} → {after} (steps {first_step} and {last_step})"}


def _training_time(records: Sequence[dict[str, Any]]) -> str:
    """Return the duration of all steps and of the evaluations between them; empty without timed steps."""
    timed = [record for record in records if is_number(record.get("time/step"))]
    seconds = sum(record["time/step"] + (record.get("time/evaluate") or 0) for record in timed)
    return f"{seconds / 60:.1f} minutes for {len(timed)} step{'s' * (len(timed) > 1)}" if timed else ""
