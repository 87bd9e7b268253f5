"""Plan AReaL's published speed-ups over its synchronous variant from the paper's setup.

    uv run python tests/benchmarks/areal_speedups.py

The paper (arXiv 2505.24298, version 5) trains R1-distilled Qwen models of 1.5B and 7B with staleness up to 8. Its
table 1 compares 250 steps with the synchronous variant: 41.0 and 14.8 hours for 1.5B, 57.7 and 25.4 hours for 7B. This
script simulates both variants like `rl plan`: the rollout runtime on a simulated clock, with rates. `PUBLISHED` lists
the values from the paper with their source, `ASSUMED` the values that the paper does not state. Nothing is fitted to
the speed-ups. The script then changes the assumed values one at a time in a scaled-down setup. The last line is one
JSON object.
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
    """A model of table 1, with sizes from its config.json."""

    parameters: float
    matmul_parameters: float
    """Parameters without the input embedding."""
    layers: int
    heads: int
    kv_heads: int
    nodes: int
    synchronous_hours: float
    asynchronous_hours: float
    tflops: float
    """TFLOP/s per GPU in training with dynamic batching (figure 6a), for the nearest published model size."""
    head_size: int = 128

    @property
    def published(self) -> float:
        """Published speed-up of the asynchronous variant."""
        return self.synchronous_hours / self.asynchronous_hours

    @property
    def kv_bytes_per_token(self) -> int:
        """KV cache bytes per token."""
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
    "GPUs": "table 1: 16 and 24 nodes; section 7.1: 8 H800 per node",
    "split": "section 7.1: three quarters of the GPUs generate",
    "max_staleness": "section 7.1: 8 for mathematics",
    "prompts, completions per prompt, longest completion": "table 3: 512, 16, 27,648 tokens",
    "at an update": "section 4.1: generation is interrupted, and the KV cache is recomputed",
    "rollout controller": "section 4.1: one, so one data-parallel leader",
    "FLOP/s in training": "figure 6a: 427 TFLOP/s (1B) and 455 TFLOP/s (7B) per GPU",
    "mean tokens per completion": "derived: 356.6k tokens/s at staleness 4 (figure 5c), times the seconds per step of "
    "1.5B (table 1), divided by 8,192 completions",
}
"""Values from the paper, with their source."""
ASSUMED = {
    "length_sigma": "log-normal completion lengths, sigma of the logarithm 0.6, the default of `rl plan`",
    "mean length of 7B": "the same as for 1.5B",
    "prompt_tokens": "512, half of the longest",
    "decode": "time per decode pass: `rl plan --gpu H800`, 60 % of the bandwidth and 50 % of the FLOP/s",
    "devices per server": "1",
    "KV cache": "0.85 of 80 GiB minus the weights",
    "publish_seconds": "5; other_seconds 1, the default of `rl plan`",
    "synchronous variant": "the same split with staleness 0",
}
"""Values that the paper does not state, as assumed here."""


def mean_length() -> float:
    """Return the mean tokens per completion, derived as `PUBLISHED` states."""
    return EFFECTIVE_TOKENS_PER_S * MODELS["1.5B"].asynchronous_hours * 3600 / STEPS / (PROMPTS * COMPLETIONS)


def setup_of(model: Model, staleness: int, **changes: float) -> Setup:
    """Return the paper's setup.

    Args:
        staleness: 0 for the synchronous variant.
        changes: `length_sigma`, `publish_seconds`, or `extra_decode_seconds`, which adds to the time per decode pass.
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
    """Return the FLOPs per token of the update and of the log-probs before it.

    Both need 8 FLOPs per matmul parameter. Attention adds 8 per layer, head dimension and token of the sequence: 16 per
    attended token, and a token attends to half of the sequence on average.
    """
    attended = sum(length * length for length in lengths) / sum(lengths)
    return 8 * model.matmul_parameters + 8 * model.layers * model.heads * model.head_size * attended


def speed_up(model: Model, size: int = 1, **changes: float) -> dict[str, Any]:
    """Simulate both variants, scaled down by `size`."""
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
"""Variations of the assumed values."""


def main() -> None:
    """Simulate both models and print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="scaled down and without variations; only checks that it runs"
    )
    options = parser.parse_args()
    for title, entries in (("published", PUBLISHED), ("assumed", ASSUMED)):
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
            print(f"{name}, scaled down: {scaled_down}", flush=True)
        result[name] = row
    seconds = round(time.monotonic() - began, 1)
    print(json.dumps({"benchmark": "areal_speedups", "seconds": seconds, "load": os.getloadavg()[0]} | result))


if __name__ == "__main__":
    main()
