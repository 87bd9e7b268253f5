"""AReaL's published speed-ups over its synchronous variant, planned from the paper's set-up.

    uv run python tests/benchmarks/areal_speedups.py

The paper (arXiv 2505.24298, version 5) trains R1-distilled Qwen models of 1.5B and 7B with staleness up to 8, and
compares the hours of 250 steps with those of its synchronous variant: 41.0 against 14.8, and 57.7 against 25.4 (table
1). Here both are simulated as `rl plan` does it: the rollout runtime on a simulated clock, with rates. `PUBLISHED` is
what the paper says and where; `ASSUMED` is what it does not say, and what is taken instead. Nothing is fitted to the
speed-ups. Then the missing numbers are changed one at a time, in miniature. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass
from typing import Any

from rl_apps.plan.rates import DEVICES, Rates, assumed, lognormal_lengths, tokens_in_flight
from rl_apps.plan.search import miniature
from rl_apps.plan.simulation import Setup, simulate

STEPS = 250
TOLERANCE = 0.15
BYTES_PER_VALUE = 2


@dataclass(frozen=True)
class Model:
    """A model of table 1, and its sizes by its config.json."""

    parameters: float
    matmul_parameters: float
    """Of these, all but the input embedding."""
    layers: int
    heads: int
    kv_heads: int
    nodes: int
    synchronous_hours: float
    asynchronous_hours: float
    tflops: float
    """Of a GPU in training, with dynamic batching (figure 6a); of the size that is nearest."""
    head_size: int = 128

    @property
    def published(self) -> float:
        """The speed-up."""
        return self.synchronous_hours / self.asynchronous_hours

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_size * BYTES_PER_VALUE


MODELS = {
    "1.5B": Model(1.777e9, 1.543e9, 28, 12, 2, 16, 41.0, 14.8, 427.4),
    "7B": Model(7.616e9, 7.071e9, 28, 28, 4, 24, 57.7, 25.4, 454.7),
}
PROMPTS, COMPLETIONS, LONGEST, STALENESS = 512, 16, 27_648, 8
SERVER_FRACTION = 0.75
EFFECTIVE_TOKENS_PER_S = 356.6e3
PUBLISHED = {
    "hours of 250 steps": "table 1: 41.0 and 14.8 (1.5B), 57.7 and 25.4 (7B)",
    "GPUs": "table 1: 16 and 24 nodes; section 7.1: of 8 H800",
    "split": "section 7.1: three quarters of the devices generate",
    "max_staleness": "section 7.1: 8 for mathematics",
    "prompts, answers of each, longest answer": "table 3: 512, 16, 27,648 tokens",
    "at an update": "section 4.1: generation is interrupted, and keys and values are computed anew",
    "rollout controller": "section 4.1: one, so one rollout head",
    "FLOP/s in training": "figure 6a: 427 TFLOP/s (1B) and 455 TFLOP/s (7B) of a GPU",
    "tokens of an answer, mean": "derived: figure 5c's 356.6k tokens/s at staleness 4, times the seconds of a step of "
    "1.5B in table 1, over 8,192 answers",
}
"""What the paper says, and where."""
ASSUMED = {
    "length_sigma": "how lengths are distributed: log-normal, sigma of the logarithm 0.6, as `rl plan` assumes",
    "mean length of 7B": "the same as of 1.5B",
    "prompt_tokens": "512, half of the longest",
    "decode": "time of a decoding pass: `rl plan --gpu H800`, 60 % of the bandwidth and 50 % of the FLOP/s",
    "devices of a server": "1",
    "share of memory for keys and values": "0.85 of 80 GiB less the weights",
    "publish_seconds": "5, as `rl plan` assumes; other_seconds 1",
    "the synchronous variant": "the same split with staleness 0",
}
"""What it does not say, and what is taken."""


def mean_length() -> float:
    """See `PUBLISHED`."""
    return EFFECTIVE_TOKENS_PER_S * MODELS["1.5B"].asynchronous_hours * 3600 / STEPS / (PROMPTS * COMPLETIONS)


def setup_of(model: Model, staleness: int, **changes: float) -> Setup:
    """The set-up of the paper.

    Args:
        model: which.
        staleness: 0 for the synchronous variant.
        missing: other values of `length_sigma`, `extra_decode_seconds` (beside what the data sheet gives) or `publish_seconds`.
    """
    lengths = lognormal_lengths(mean_length(), changes.get("length_sigma", 0.6), LONGEST)
    weights, prompt, gpus = BYTES_PER_VALUE * model.parameters, 512.0, 8 * model.nodes
    rates = {
        name: rate.value
        for name, rate in assumed("H800", model.parameters, weights, model.kv_bytes_per_token, 1).items()
    }
    rates["decode_seconds"] += changes.get("extra_decode_seconds", 0.0)
    rates["train_tokens_per_s"] = 1e12 * model.tflops / flops_per_token(model, lengths)
    kv_cache_bytes = 0.85 * DEVICES["H800"].memory - weights
    return Setup(
        Rates(
            **rates,
            max_running=kv_cache_bytes // (model.kv_bytes_per_token * tokens_in_flight(prompt, lengths)),
            episode_seconds=0.0,
            publish_seconds=changes.get("publish_seconds", 5.0),
            other_seconds=1.0,
            prompt_tokens=prompt,
            rejected_fraction=0.0,
            lengths=lengths,
        ),
        PROMPTS,
        COMPLETIONS,
        staleness,
        servers=round(gpus * SERVER_FRACTION),
        replicas=1,
        trainer_devices=gpus - round(gpus * SERVER_FRACTION),
        longest=LONGEST,
        interrupt="recompute",
    )


def flops_per_token(model: Model, lengths: tuple[int, ...]) -> float:
    """Of the update, and of the log-probs before it: 6 and 2 for each parameter that a token is multiplied by, and for
    each token that attention looks at, half of the row's length on average, twice over heads and layers."""
    attended = sum(length * length for length in lengths) / sum(lengths)
    return 8 * model.matmul_parameters + 8 * model.layers * model.heads * model.head_size * attended


def speed_up(model: Model, size: int = 1, **changes: float) -> dict[str, Any]:
    """Both variants, at one `size`-th."""
    hours, limits = [], []
    for staleness in (0, STALENESS):
        plan = simulate(miniature(setup_of(model, staleness, **changes), size))
        hours.append(plan.step_seconds * STEPS / 3600)
        limits.append(plan.limit)
    ratio = hours[0] / hours[1]
    return {
        "speed_up": round(ratio, 2),
        "published": round(model.published, 2),
        "error": round(ratio / model.published - 1, 3),
        "hours": {"synchronous": round(hours[0], 1), "asynchronous": round(hours[1], 1)},
        "limits": {"synchronous": limits[0], "asynchronous": limits[1]},
    }


CHANGES = (
    {"length_sigma": 0.3},
    {"length_sigma": 1.2},
    {"extra_decode_seconds": 0.006},
    {"publish_seconds": 20.0},
)
"""Of what is missing."""


def main() -> None:
    """Simulate both models, and print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="in miniature and nothing changed, to see that it runs")
    options = parser.parse_args()
    for title, entries in (("published", PUBLISHED), ("missing, and taken instead", ASSUMED)):
        print(title, *(f"  {name}: {text}" for name, text in entries.items()), sep="\n")
    began, result = time.monotonic(), {}
    for name, model in MODELS.items():
        row = speed_up(model, 32 if options.quick else 1)
        row["within_tolerance"] = abs(row["error"]) <= TOLERANCE
        print(f"{name}: {row}", flush=True)
        if not options.quick:
            scaled_down = {"baseline": speed_up(model, 8)["speed_up"]}
            for change in CHANGES:
                ((setting, value),) = change.items()
                scaled_down[f"{setting}={value:g}"] = speed_up(model, 8, **change)["speed_up"]
            row["scaled_down"] = scaled_down
            print(f"{name}, in miniature: {scaled_down}", flush=True)
        result[name] = row
    seconds = round(time.monotonic() - began, 1)
    print(json.dumps({"benchmark": "areal_speedups", "seconds": seconds, "load": os.getloadavg()[0]} | result))


if __name__ == "__main__":
    main()
