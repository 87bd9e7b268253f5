"""How fast servers and trainers are and how long answers get: given, measured in a run, or assumed, and which of these
is told with every number."""

from __future__ import annotations

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
    "decode_seconds": "s, of a server's pass over its answers, whatever their number",
    "decode_seconds_per_answer": "s, more for each answer",
    "decode_seconds_per_context_token": "s, more for each token of their prompts and of what is written",
    "prefill_tokens_per_s": "tokens/s, in which one server reads prompts",
    "max_running": "answers, of one server at the same time",
    "episode_seconds": "s, of an episode beside its answers: tools, rewards",
    "train_tokens_per_s": "tokens/s, of one trainer device: log-probs and update",
    "publish_seconds": "s, from the update to the commit on all servers",
    "other_seconds": "s, of a step beside waiting, training and publishing",
    "prompt_tokens": "tokens, of a prompt, mean",
    "answer_tokens": "tokens, of an answer, mean",
    "answer_sigma": "-, of the logarithm of that number; 0: all are as long",
    "rejected_fraction": "fraction of groups, that are rejected and replaced",
}
"""What a plan must know, in which unit, and of what it speaks."""

SAMPLES = 4096
"""Lengths that stand for their distribution."""


@dataclass(frozen=True)
class Known:
    """One number, and where it is from."""

    value: float
    source: str


@dataclass(frozen=True)
class Rates:
    """What a simulation takes; see `NEEDED` for the meaning of each."""

    decode_seconds: float
    decode_seconds_per_answer: float
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
    """Tokens of an answer: a sample of their distribution, in random order."""

    @property
    def tokens_per_answer(self) -> float:
        """Mean tokens of a row: prompt and answer."""
        return self.prompt_tokens + sum(self.lengths) / len(self.lengths)


@dataclass(frozen=True)
class Device:
    """A GPU by its data sheet."""

    flops: float
    """Dense bfloat16 operations per second."""
    bandwidth: float
    """Bytes per second from its memory."""
    memory: float
    """Bytes of it."""


DEVICES = {
    "H100": Device(989e12, 3.35e12, 80 * 2**30),
    "H800": Device(989e12, 3.35e12, 80 * 2**30),
    "H200": Device(989e12, 4.8e12, 141 * 2**30),
    "A100": Device(312e12, 2.04e12, 80 * 2**30),
    "L40S": Device(362e12, 0.864e12, 48 * 2**30),
    "L4": Device(121e12, 0.3e12, 24 * 2**30),
}
"""From NVIDIA's data sheets: the SXM form where there are several."""

SHARE_OF_BANDWIDTH, SHARE_OF_FLOPS_READING, SHARE_OF_FLOPS_TRAINING = 0.6, 0.5, 0.4
"""Of what a data sheet says, what decoding, reading prompts and training come to where nothing was measured."""


def read_rates(file: Path) -> dict[str, Known]:
    """The rates of a YAML file: keys of `NEEDED`, or `decode: {answers: tokens per second}` of one server in place of
    the three of `decode_seconds`.

    Raises:
        ConfigError: it is not such a file.
    """
    try:
        found = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--rates {file}: expected a YAML file of rates, found: {error}") from error
    require(isinstance(found, dict), f"--rates {file}", f"keys of {', '.join(NEEDED)}", found)
    decode = found.pop("decode", None)
    unknown = sorted(map(str, found.keys() - NEEDED.keys()))
    require(not unknown, f"--rates {file}", f"decode, {', '.join(NEEDED)}", ", ".join(unknown))
    for name, value in found.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
        require(number, f"--rates {file}: {name}", f"a number of {NEEDED[name]}", value)
    rates = {name: float(value) for name, value in found.items()}
    if decode is not None:
        rates["decode_seconds"], rates["decode_seconds_per_answer"] = fit_decode(decode, f"--rates {file}: decode")
        rates.setdefault("decode_seconds_per_context_token", 0.0)  # contained in what was measured
    return {name: Known(value, f"given ({file})") for name, value in rates.items()}


def fit_decode(table: Any, where: str) -> tuple[float, float]:
    """Seconds of a pass, and more per answer, from tokens per second at two or more numbers of answers: the line
    through the seconds of a pass (answers over tokens per second) with the least squares of relative errors.

    Raises:
        ConfigError: the table has not two rates.
    """
    expected = "two or more `answers: tokens per second`, for example {1: 120, 64: 5200}"
    usable = isinstance(table, dict) and len(table) > 1
    usable = usable and all(isinstance(n, int | float) and n > 0 for pair in table.items() for n in pair)
    require(usable, where, expected, table)
    import numpy as np

    answers, tokens = (np.array(column, float) for column in zip(*table.items(), strict=True))
    seconds = answers / tokens
    first, slope = np.polynomial.polynomial.polyfit(answers, seconds, 1, w=1 / seconds)
    if slope < 0:
        return float(np.average(seconds, weights=1 / seconds)), 0.0
    if first < 0:
        return 0.0, float(np.average(seconds / answers))
    return float(first), float(slope)


def lognormal_lengths(mean: float, sigma: float, longest: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths whose logarithm is normal, cut at `longest`, with this mean after the cut; in random order.

    Raises:
        ConfigError: the mean is not between 1 and `longest`.
    """
    require(1 <= mean <= longest, "answer_tokens", f"1 to the longest answer ({longest})", mean)
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
    """Tokens that an answer holds on average while it is written, its prompt too: long ones are written longer."""
    return prompt + sum(length * length for length in lengths) / (2 * sum(lengths))


def sampled(lengths: Sequence[int], seed: int = 0) -> tuple[int, ...]:
    """Measured lengths in random order, `SAMPLES` of them at most."""
    return tuple(random.Random(seed).sample(list(lengths), min(len(lengths), SAMPLES)))


def assumed(name: str, parameters: float, weights: float, cache: float, split: int) -> dict[str, Known]:
    """What a data sheet makes one expect.

    Args:
        name: of the device, one of `DEVICES`.
        parameters: of the model.
        weights: bytes of them as they are served.
        cache: bytes of keys and values of one token.
        split: devices of one server.

    Raises:
        ConfigError: its data sheet is not known.
    """
    require(name in DEVICES, "--gpu", f"one of {', '.join(DEVICES)}", name)
    device = DEVICES[name]
    bandwidth = device.bandwidth * SHARE_OF_BANDWIDTH * split
    reading = device.flops * SHARE_OF_FLOPS_READING * split / (2 * parameters)
    training = device.flops * SHARE_OF_FLOPS_TRAINING / (8 * parameters)
    memory = f"assumed: {SHARE_OF_BANDWIDTH:.0%} of an {name}'s bandwidth"
    pass_through = f"assumed: {SHARE_OF_FLOPS_READING:.0%} of an {name}'s FLOP/s"
    update = f"assumed: {SHARE_OF_FLOPS_TRAINING:.0%} of an {name}'s FLOP/s, 8 for each parameter and token"
    return {
        "decode_seconds": Known(weights / bandwidth, memory),
        "decode_seconds_per_answer": Known(1 / reading, pass_through),
        "decode_seconds_per_context_token": Known(cache / bandwidth, memory),
        "prefill_tokens_per_s": Known(reading, pass_through),
        "train_tokens_per_s": Known(training, update),
    }
