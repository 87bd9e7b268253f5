"""Measure rates and completion lengths from `metrics.jsonl` and `rollouts/` of a run."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from rl_apps.plan.rates import Sourced, sampled
from rl_apps.plan.simulation import Setup, simulate
from rl_contracts.errors import DataError
from rl_contracts.runtime.json_lines import json_lines

FIRST = 2
"""Number of steps to skip at the start of a run, when servers and caches are cold."""
ROUNDS = 16
"""Number of simulations in the search for the seconds of a pass and of an episode."""
NEEDED = ("time/step", "time/rollout_wait", "time/train", "time/publish", "tokens", "sequences", "length/mean")
UNLIMITED = 1e12
"""Tokens per second of an operation whose time is already contained in another rate."""


def measured_steps(run: Path) -> list[dict[str, Any]]:
    """Return the records of the steps of a run without its first `FIRST` steps.

    Raises:
        DataError: `metrics.jsonl` is missing or has fewer than two such steps.
    """
    try:
        records = list(json_lines(run / "metrics.jsonl"))
    except (OSError, ValueError) as error:
        raise DataError(f"--run {run}: expected a run directory with a metrics.jsonl file, found: {error}") from error
    steps = [record for record in records if all(record.get(name) is not None for name in NEEDED)][FIRST:]
    if len(steps) < 2:
        raise DataError(
            f"--run {run}: expected at least {FIRST + 2} steps with {', '.join(NEEDED)}, found {len(steps) + FIRST}. "
            f"The first {FIRST} steps do not count. Use a longer run."
        )
    return steps


def measured_lengths(run: Path) -> list[int]:
    """Return the number of tokens of each completion in `rollouts/`; empty if the run did not save tokens."""
    lengths: list[int] = []
    for file in sorted((run / "rollouts").glob("step_*.jsonl")):
        lengths += [len(line["token_ids"]) for line in json_lines(file) if line.get("token_ids")]
    return lengths


def measured_rates(run: Path, trainers: int) -> tuple[dict[str, Sourced], tuple[int, ...]]:
    """Return the rates measured from the steps of a run, and the completion lengths.

    `measured_servers` measures the remaining rates of the servers.

    Args:
        run: directory of the run.
        trainers: number of trainer ranks.

    Raises:
        DataError: see `measured_steps`.
    """
    steps, lengths, source = measured_steps(run), measured_lengths(run), f"measured ({run.name})"

    def average(name: str) -> float:
        return mean(step[name] for step in steps)

    parts = ("time/rollout_wait", "time/train", "time/publish")
    completion_tokens = average("length/mean")
    groups = [sum(step.get(f"groups/{outcome}") or 0.0 for step in steps) for outcome in ("rejected", "accepted")]
    values = {
        "train_tokens_per_s": average("tokens") / average("time/train") / trainers,
        "publish_seconds": average("time/publish"),
        "other_seconds": max(average("time/step") - sum(map(average, parts)), 0.0),
        "prompt_tokens": max(average("tokens") / average("sequences") - completion_tokens, 1.0),
        "answer_tokens": mean(lengths) if lengths else completion_tokens,
        "rejected_fraction": groups[0] / sum(groups) if sum(groups) else 0.0,
        "prefill_tokens_per_s": UNLIMITED,
        "decode_seconds_per_completion": 0.0,
        "decode_seconds_per_context_token": 0.0,
    }
    rates = {name: Sourced(value, source) for name, value in values.items()}
    for name in ("prefill_tokens_per_s", "decode_seconds_per_completion", "decode_seconds_per_context_token"):
        rates[name] = Sourced(values[name], "contained in the measured decode_seconds")
    if not lengths:
        del rates["answer_tokens"]
        rates["answer_tokens"] = Sourced(completion_tokens, f"{source}: length/mean, since rollouts/ has no tokens")
    return rates, sampled(lengths) if lengths else ()


def measured_servers(run: Path, setup: Setup) -> dict[str, Sourced]:
    """Return the seconds of a decoding pass of a server, and the seconds that an episode spends outside generation.

    The run records the busy seconds of its servers and the tokens that they generated. A pass generates one token for
    each running completion, so its duration is the busy time per token times the number of running completions. That
    number comes from a simulation of the same run with this pass duration. If the simulated trainer waits less than
    the real one, the difference is attributed to the rest of an episode: turns, tools, rewards and network.

    Args:
        run: directory of the run.
        setup: set-up of the run; its `decode_seconds` and `episode_seconds` are ignored.

    Raises:
        DataError: the metrics of the run lack the busy seconds or generated tokens of its servers.
    """
    steps, source = measured_steps(run), f"measured ({run.name})"
    names = ("server/busy_seconds", "server/generated_tokens")
    counter_steps = [step for step in steps if all(step.get(name) is not None for name in names)]
    # After a resume the counters of the servers restart at 0.
    pairs = [(one, two) for one, two in pairwise(counter_steps) if all(one[name] <= two[name] for name in names)]
    busy, tokens = (sum(two[name] - one[name] for one, two in pairs) for name in names)
    if not (busy > 0 and tokens > 0):
        raise DataError(
            f"--run {run}: expected increasing counters {' and '.join(names)} in metrics.jsonl, found none. "
            "Set `decode` in the file of --rates."
        )
    wait = mean(step["time/rollout_wait"] for step in steps)
    seconds, episode_seconds, most = (
        busy / tokens,
        0.0,
        (setup.max_staleness + 1) * mean(step["time/step"] for step in steps),
    )
    least = 0.0
    for _ in range(ROUNDS):
        rates = replace(setup.rates, decode_seconds=seconds, episode_seconds=episode_seconds)
        outcome = simulate(replace(setup, rates=rates))
        seconds = busy / tokens * max(outcome.running, 1.0)
        least, most = (episode_seconds, most) if outcome.wait_seconds < wait else (least, episode_seconds)
        episode_seconds = (least + most) / 2
    return {
        "decode_seconds": Sourced(
            seconds, f"{source}: {busy / tokens:.3g} s per token, {outcome.running:.1f} running completions"
        ),
        "episode_seconds": Sourced(episode_seconds, f"{source}: fitted to a trainer wait of {wait:.2f} s per step"),
    }
