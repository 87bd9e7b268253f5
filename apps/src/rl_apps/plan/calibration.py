"""Rates and lengths from what a run has written: its `metrics.jsonl` and `rollouts/`."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from rl_apps.plan.rates import Known, sampled
from rl_apps.plan.simulation import Setup, simulate
from rl_contracts.errors import DataError
from rl_contracts.runtime.json_lines import json_lines

FIRST = 2
"""Steps at the start of a run that are not counted: servers and caches are cold."""
ROUNDS = 16
"""Simulations by which what only a simulation can say is found."""
NEEDED = ("time/step", "time/rollout_wait", "time/train", "time/publish", "tokens", "rows", "length/mean")
UNLIMITED = 1e12
"""Tokens per second of what is contained in another rate already."""


def measured_steps(run: Path) -> list[dict[str, Any]]:
    """The records of the steps of a run that count.

    Raises:
        DataError: it has not enough of them.
    """
    try:
        records = list(json_lines(run / "metrics.jsonl"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"--run {run}: expected the directory of a run, with its metrics.jsonl, found: {error}"
        ) from error
    steps = [record for record in records if all(record.get(name) is not None for name in NEEDED)][FIRST:]
    if len(steps) < 2:
        raise DataError(
            f"--run {run}: expected at least {FIRST + 2} steps with {', '.join(NEEDED)}, found {len(steps) + FIRST} "
            "(the first ones do not count). Let it run longer."
        )
    return steps


def measured_lengths(run: Path) -> list[int]:
    """Tokens of the answers in a run's `rollouts/`; none where it kept no tokens."""
    lengths: list[int] = []
    for file in sorted((run / "rollouts").glob("step_*.jsonl")):
        lengths += [len(line["token_ids"]) for line in json_lines(file) if line.get("token_ids")]
    return lengths


def measured_rates(run: Path, trainers: int) -> tuple[dict[str, Known], tuple[int, ...]]:
    """What a run's steps say of all but its servers, and the lengths of its answers.

    Args:
        run: its directory.
        trainers: its trainer's ranks.
    """
    steps, lengths, source = measured_steps(run), measured_lengths(run), f"measured ({run.name})"

    def average(name: str) -> float:
        return mean(step[name] for step in steps)

    parts = ("time/rollout_wait", "time/train", "time/publish")
    answer = average("length/mean")
    groups = [sum(step.get(f"groups/{ending}") or 0.0 for step in steps) for ending in ("rejected", "accepted")]
    found = {
        "train_tokens_per_s": average("tokens") / average("time/train") / trainers,
        "publish_seconds": average("time/publish"),
        "other_seconds": max(average("time/step") - sum(map(average, parts)), 0.0),
        "prompt_tokens": max(average("tokens") / average("rows") - answer, 1.0),
        "answer_tokens": mean(lengths) if lengths else answer,
        "rejected_fraction": groups[0] / sum(groups) if sum(groups) else 0.0,
        "prefill_tokens_per_s": UNLIMITED,
        "decode_seconds_per_answer": 0.0,
        "decode_seconds_per_context_token": 0.0,
    }
    known = {name: Known(value, source) for name, value in found.items()}
    for name in ("prefill_tokens_per_s", "decode_seconds_per_answer", "decode_seconds_per_context_token"):
        known[name] = Known(found[name], "contained in decode_seconds, as measured")
    if not lengths:
        del known["answer_tokens"]
        known["answer_tokens"] = Known(answer, f"{source}, as length/mean; rollouts/ has no tokens")
    return known, sampled(lengths) if lengths else ()


def measured_servers(run: Path, setup: Setup) -> dict[str, Known]:
    """Seconds of a pass of a server over its answers, and of an episode beside them.

    A run says for how long its servers were busy and how many tokens came of it. A pass gives each running answer one,
    so its time is that of a token, in a busy server, times the answers that run; and how many run is said by the
    simulation of this same run with such a pass. What the trainer then waits less than it did is put down to what
    episodes do beside answering: turns, tools, rewards, and the way to the servers.

    Args:
        run: its directory.
        setup: the run, with any two.

    Raises:
        DataError: its servers do not say how long they were busy.
    """
    steps, source = measured_steps(run), f"measured ({run.name})"
    names = ("server/busy_seconds", "server/generated_tokens")
    told = [step for step in steps if all(step.get(name) is not None for name in names)]
    # where a run went on, its servers began to count anew
    pairs = [(one, two) for one, two in pairwise(told) if all(one[name] <= two[name] for name in names)]
    busy, tokens = (sum(two[name] - one[name] for one, two in pairs) for name in names)
    if not (busy > 0 and tokens > 0):
        raise DataError(
            f"--run {run}: expected {' and '.join(names)} that grow; its servers do not say them. Give `decode` in "
            "--rates."
        )
    wait = mean(step["time/rollout_wait"] for step in steps)
    seconds, beside, most = busy / tokens, 0.0, (setup.max_staleness + 1) * mean(step["time/step"] for step in steps)
    least = 0.0
    for _ in range(ROUNDS):
        rates = replace(setup.rates, decode_seconds=seconds, episode_seconds=beside)
        outcome = simulate(replace(setup, rates=rates))
        seconds = busy / tokens * max(outcome.running, 1.0)
        least, most = (beside, most) if outcome.wait_seconds < wait else (least, beside)
        beside = (least + most) / 2
    return {
        "decode_seconds": Known(seconds, f"{source}: {busy / tokens:.3g} s a token, {outcome.running:.1f} answers"),
        "episode_seconds": Known(beside, f"{source}: with it the trainer waits {wait:.2f} s a step, as it did"),
    }
