"""Expected memory of a trainer and time of a step, before the first step."""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from rl_apps.plan.memory import read_sizes
from rl_apps.run.app import App, Run
from rl_apps.run.chat_template import load_tokenizer
from rl_apps.run.directory import step_seconds
from rl_apps.run.sequence_lengths import lengths_of
from rl_apps.settings.data import load_rows
from rl_contracts.engine import TrainEngineConfig
from rl_contracts.models.sizes import ModelSizes

GIB = 2**30
MEASURED_ROWS = 32
"""Maximum number of examples whose lengths are measured."""
PROCESS_BYTES = 0.7 * GIB
"""Memory of a process on the CPU that has loaded torch and transformers."""
PROBE_SECONDS = 0.2
"""Seconds for which the speed of a matrix product is measured."""
PROBE_ROWS = 256
"""Rows of that product."""
LONG_SECONDS = 10.0
"""Shortest step whose time is estimated. The time of shorter steps depends on more than matrix products."""
TRAINED_FLOPS, LOGPROB_FLOPS, GENERATED_FLOPS = 6, 2, 2
"""Floating-point operations per parameter and token in forward and backward, in log-probs, and in generation."""


@dataclass(frozen=True)
class StepTokens:
    """Tokens of one step, if all completions have the maximum length."""

    sequences: int
    per_sequence: float
    generated: int
    """Generated tokens of a sequence; 0 without completions."""

    @property
    def total(self) -> float:
        """Tokens of all sequences, prompts included."""
        return self.sequences * self.per_sequence


def expectation(app: App, run: Run[Any], cores: int) -> str:
    """Return a sentence with the expected memory of a trainer rank; empty if its engine gives no estimate.

    The sentence also has the time of a step: the usual one in a resumed run, or an estimate of a long step on a CPU.

    Args:
        app: app of the run.
        run: the run.
        cores: CPU cores of each process.
    """
    if type(run.config.actor.engine).memory is TrainEngineConfig.memory:
        return ""
    config = copy.deepcopy(run.config)
    config.model.path = run.config.model.directory()
    sizes = read_sizes(replace(run, config=config), app.form, app.lessons)
    tokens, seconds = _step_tokens(app, run), step_seconds(run.directory)
    if not seconds and run.device == "cpu":
        estimate = _seconds_on_cpu(run, sizes, tokens, cores)
        seconds = estimate if estimate >= LONG_SECONDS else 0.0
    condition = f" with completions of {tokens.generated} tokens" if tokens.generated else ""
    duration = f"about {float(f'{seconds:.2g}'):g} s per step, " if seconds else ""
    memory = _trainer_bytes(run, sizes, tokens) / GIB
    return f"expected{condition}: {duration}trainer memory about {memory:.1f} GiB per rank"


def _trainer_bytes(run: Run[Any], sizes: ModelSizes, tokens: StepTokens) -> float:
    """Return the peak memory of a trainer rank."""
    config, strategy = run.config, run.layout.actor.strategy
    per_update = math.ceil(tokens.total / config.actor.minibatches / strategy.data)
    spec = config.finetune_spec()
    largest = min(spec.micro_batch.max_tokens, per_update)
    micro_batches = math.ceil(per_update / largest)
    spec = replace(spec, micro_batch=replace(spec.micro_batch, max_tokens=largest))
    parts = config.actor.engine.memory(strategy, spec, sizes, micro_batches)
    algorithm = getattr(config, "algorithm", None)
    if algorithm is not None:
        parts["reference"] = parts["parameters"] * algorithm.needs_reference
        parts["critic"] = (parts["parameters"] + parts["optimizer"]) * algorithm.needs_critic
    return sum(parts.values()) + PROCESS_BYTES * (run.device == "cpu")


def _seconds_on_cpu(run: Run[Any], sizes: ModelSizes, tokens: StepTokens, cores: int) -> float:
    """Return the seconds of a step whose generation and training do not overlap."""
    seconds = sizes.active_parameters / _measure_flops(sizes, cores)
    has_completions = tokens.generated > 0
    training = (TRAINED_FLOPS + LOGPROB_FLOPS * has_completions) * tokens.total / run.layout.actor.world_size
    if not has_completions or run.layout.rollout is None:
        return seconds * training
    return seconds * (training + GENERATED_FLOPS * tokens.total / run.layout.rollout.strategy.data)


def _measure_flops(sizes: ModelSizes, cores: int) -> float:
    """Return the floating-point operations per second of a matrix product with the shape of an MLP of the model.

    It is measured in one thread: on a busy machine, threads that wait for each other are up to 100 times slower.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows, weights = torch.ones(PROBE_ROWS, sizes.hidden), torch.ones(sizes.hidden, sizes.intermediate)
        rows @ weights  # the first product is slower
        products, begin = 0, time.perf_counter()
        while (seconds := time.perf_counter() - begin) < PROBE_SECONDS or not products:
            rows @ weights
            products += 1
    finally:
        torch.set_num_threads(threads)
    return cores * 2 * products * PROBE_ROWS * sizes.hidden * sizes.intermediate / seconds


def _step_tokens(app: App, run: Run[Any]) -> StepTokens:
    """Return the tokens of a step, for the mean length of some examples and the longest completions."""
    config, lengths = run.config, lengths_of(run, app.form, load_tokenizer(run.config.model))
    rows = load_rows(config.data, "train", app.form, config.seed)
    stride = max(1, len(rows) // MEASURED_ROWS)
    mean = fmean(lengths.together(rows[number]) for number in range(0, len(rows), stride))
    if app.form != "rl":
        return StepTokens(config.data.batch_size, mean, 0)
    generated = config.generation.max_new_tokens
    sequences = config.data.batch_size * config.rollout.group_size
    return StepTokens(sequences, min(mean + generated, lengths.limit), generated)
