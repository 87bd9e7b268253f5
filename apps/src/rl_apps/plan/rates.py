"""Rates of servers and trainers, and completion lengths, each with its source: given, measured or assumed."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import yaml

from rl_contracts.config import require
from rl_contracts.errors import ConfigError

NEEDED = {
    "decode_seconds": "s, fixed time of a decoding pass of a server",
    "decode_seconds_per_completion": "s, additional time of a pass per running completion",
    "decode_seconds_per_context_token": "s, additional time of a pass per token in the running contexts",
    "prefill_tokens_per_s": "tokens/s, prompt tokens of one server",
    "max_running": "completions, maximum that one server runs at once",
    "episode_seconds": "s, time of an episode outside generation: tools, rewards",
    "train_tokens_per_s": "tokens/s, one trainer device: log-probs and update",
    "publish_seconds": "s, from the update to the commit on all servers",
    "publish_gb_per_s": "GB/s, weights from the trainer to the servers; gives publish_seconds",
    "other_seconds": "s, time of a step outside waiting, training and publishing",
    "prompt_tokens": "tokens, mean of a prompt",
    "answer_tokens": "tokens, mean of a completion",
    "answer_sigma": "-, standard deviation of the logarithm of completion lengths; 0 for equal lengths",
    "rejected_fraction": "fraction of groups, rejected and replaced",
}
"""Rates that a plan needs, each with its unit and meaning."""

DERIVED = ("answer_tokens", "answer_sigma", "publish_gb_per_s")
"""Rates from which others are computed: the completion lengths, and the seconds to publish."""

SAMPLES = 4096
"""Maximum number of sampled lengths that represent a distribution."""


@dataclass(frozen=True)
class Sourced:
    """Value with its source."""

    value: float
    source: str


@dataclass(frozen=True)
class Rates:
    """Rates of a simulation; `NEEDED` explains each."""

    decode_seconds: float
    decode_seconds_per_completion: float
    decode_seconds_per_context_token: float
    prefill_tokens_per_s: float
    max_running: float
    episode_seconds: float
    train_tokens_per_s: float
    publish_seconds: float
    other_seconds: float
    prompt_tokens: float
    rejected_fraction: float
    lengths: tuple[int, ...]
    """Sample of completion lengths in tokens, in random order."""

    @property
    def tokens_per_completion(self) -> float:
        """Mean number of tokens of a sequence, prompt and completion."""
        return self.prompt_tokens + sum(self.lengths) / len(self.lengths)


@dataclass(frozen=True)
class Device:
    """Values of the data sheet of a GPU."""

    flops: float
    """Dense bfloat16 floating-point operations per second."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    memory: float
    """Memory in bytes that CUDA reports, which is less than on the data sheet; 80 GiB is rounded up."""


DEVICES = {
    "H100": Device(989e12, 3.35e12, 80 * 2**30),
    "H800": Device(989e12, 3.35e12, 80 * 2**30),
    "H200": Device(989e12, 4.8e12, 139.8 * 2**30),
    "A100": Device(312e12, 2.04e12, 80 * 2**30),
    "L40S": Device(362e12, 0.864e12, 44.4 * 2**30),
    "L4": Device(121e12, 0.3e12, 22 * 2**30),
}
"""Devices by name, with values from NVIDIA's data sheets, of the SXM version if there are several."""

SHARE_OF_BANDWIDTH, SHARE_OF_FLOPS_READING, SHARE_OF_FLOPS_TRAINING = 0.6, 0.5, 0.4
"""Assumed fractions of the data sheet's bandwidth (decoding) and FLOP/s (prefill, training)."""

ROUTE_GB_PER_S = {"shm": 5.0, "ipc": 5.0, "disk": 1.0, "broadcast": 5.0}
"""Assumed GB/s of each publish route. One rank sends, and each server computes checksums."""
PUBLISH_OVERHEAD = 0.1
"""Assumed seconds of the requests and the pause of a publication."""
FLOPS_PER_TOKEN, FLOPS_RECOMPUTED = 8, 2
"""FLOPs per parameter and trained token (log-probs, forward, backward), and with gradient checkpointing in addition."""


def read_rates(file: Path) -> dict[str, Sourced]:
    """Return the rates of a YAML file.

    The file has the keys of `NEEDED`. A table `decode: {running completions: tokens per second}` of one server may
    replace the three rates `decode_seconds*`.

    Raises:
        ConfigError: the file is not valid YAML, or a key or value is invalid.
    """
    try:
        values = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--rates {file}: expected a YAML file of rates, found: {error}") from error
    require(isinstance(values, dict), f"--rates {file}", f"keys of {', '.join(NEEDED)}", values)
    decode = values.pop("decode", None)
    unknown = sorted(map(str, values.keys() - NEEDED.keys()))
    require(not unknown, f"--rates {file}", f"decode, {', '.join(NEEDED)}", ", ".join(unknown))
    for name, value in values.items():
        is_valid = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
        require(is_valid, f"--rates {file}: {name}", f"a number of {NEEDED[name]}", value)
    rates = {name: float(value) for name, value in values.items()}
    if decode is not None:
        rates["decode_seconds"], rates["decode_seconds_per_completion"] = fit_decode(decode, f"--rates {file}: decode")
        rates.setdefault("decode_seconds_per_context_token", 0.0)  # contained in the measured rates of `decode`
    return {name: Sourced(value, f"given ({file})") for name, value in rates.items()}


def fit_decode(table: Any, where: str) -> tuple[float, float]:
    """Return the fixed seconds of a decoding pass and the additional seconds per running completion.

    A pass with `n` running completions takes `n` divided by the tokens per second. The function fits a line to these
    times by least squares of the relative errors. If a coefficient would be negative, it is set to 0.

    Args:
        table: maps numbers of running completions to tokens per second.
        where: name of the table in the error message.

    Raises:
        ConfigError: the table has fewer than two entries, or an entry that is not a positive number.
    """
    expected = "two or more entries `running completions: tokens per second`, for example {1: 120, 64: 5200}"
    is_valid = isinstance(table, dict) and len(table) > 1
    is_valid = is_valid and all(isinstance(n, int | float) and n > 0 for pair in table.items() for n in pair)
    require(is_valid, where, expected, table)
    import numpy as np

    running, tokens = (np.array(column, float) for column in zip(*table.items(), strict=True))
    seconds = running / tokens
    first, slope = np.polynomial.polynomial.polyfit(running, seconds, 1, w=1 / seconds)
    if slope < 0:
        return float(np.average(seconds, weights=1 / seconds)), 0.0
    if first < 0:
        return 0.0, float(np.average(seconds / running))
    return float(first), float(slope)


@functools.cache
def lognormal_lengths(mean: float, sigma: float, longest: int, seed: int = 0) -> tuple[int, ...]:
    """Return log-normal lengths, capped at `longest`, in random order.

    Args:
        mean: mean of the capped lengths.
        sigma: standard deviation of the logarithm of the lengths before the cap.
        longest: maximum length.
        seed: seed of the order.

    Raises:
        ConfigError: the mean is not between 1 and `longest`.
    """
    require(1 <= mean <= longest, "answer_tokens", f"1 to {longest}, the maximum completion length", mean)
    quantiles = [NormalDist().inv_cdf((index + 0.5) / SAMPLES) for index in range(SAMPLES)]

    def cut(middle: float) -> list[float]:
        return [min(math.exp(middle + sigma * quantile), longest) for quantile in quantiles]

    low, high = 0.0 - 4 * sigma, math.log(longest) + 4 * sigma
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(cut(middle)) / SAMPLES < mean else (low, middle)
    lengths = [max(1, round(length)) for length in cut(high)]
    random.Random(seed).shuffle(lengths)
    return tuple(lengths)


def tokens_in_flight(prompt: float, lengths: Sequence[int]) -> float:
    """Return the mean context length of a running completion, prompt included.

    A long completion runs for more passes, so it has more weight in the mean.
    """
    return prompt + sum(length * length for length in lengths) / (2 * sum(lengths))


def sampled(lengths: Sequence[int], seed: int = 0) -> tuple[int, ...]:
    """Return at most `SAMPLES` of the measured lengths, in random order."""
    return tuple(random.Random(seed).sample(list(lengths), min(len(lengths), SAMPLES)))


def assumed(
    name: str, parameters: float, weights: float, cache: float, split: int, flops: int = FLOPS_PER_TOKEN
) -> dict[str, Sourced]:
    """Return the rates that a data sheet suggests.

    Args:
        name: name of the device, one of `DEVICES`.
        parameters: number of parameters that each token uses.
        weights: bytes of the served weights.
        cache: bytes of the KV cache per token.
        split: number of devices per server.
        flops: FLOPs per parameter and trained token.

    Raises:
        ConfigError: the device is not in `DEVICES`.
    """
    require(name in DEVICES, "--gpu", f"one of {', '.join(DEVICES)}", name)
    device = DEVICES[name]
    bandwidth = device.bandwidth * SHARE_OF_BANDWIDTH * split
    prefill = device.flops * SHARE_OF_FLOPS_READING * split / (2 * parameters)
    training = device.flops * SHARE_OF_FLOPS_TRAINING / (flops * parameters)
    memory = f"assumed: {SHARE_OF_BANDWIDTH:.0%} of an {name}'s bandwidth"
    pass_through = f"assumed: {SHARE_OF_FLOPS_READING:.0%} of an {name}'s FLOP/s"
    update = f"assumed: {SHARE_OF_FLOPS_TRAINING:.0%} of an {name}'s FLOP/s, {flops} FLOPs per parameter and token"
    return {
        "decode_seconds": Sourced(weights / bandwidth, memory),
        "decode_seconds_per_completion": Sourced(1 / prefill, pass_through),
        "decode_seconds_per_context_token": Sourced(cache / bandwidth, memory),
        "prefill_tokens_per_s": Sourced(prefill, pass_through),
        "train_tokens_per_s": Sourced(training, update),
    }


def assumed_publish(size: float, route: str, given: Sourced | None) -> Sourced:
    """Return the seconds of a publication: bytes divided by the speed of the route, and an overhead.

    Args:
        size: bytes of the published weights.
        route: route of the weights.
        given: GB/s of the route, or None for the value of `ROUTE_GB_PER_S`.
    """
    speed = given or Sourced(ROUTE_GB_PER_S[route], "assumed")
    formula = f"{size / 1e9:.3g} GB / ({speed.value:g} GB/s over {route}) + {PUBLISH_OVERHEAD} s"
    return Sourced(size / 1e9 / speed.value + PUBLISH_OVERHEAD, f"{speed.source}: {formula}")
