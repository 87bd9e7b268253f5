"""Warnings about settings that work but probably give poor results.

A dry run prints them last, and a run before its servers start.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rl_apps.preflight.checks import file_shortage
from rl_apps.run.app import Run
from rl_apps.run.sequence_lengths import longest_row
from rl_apps.settings.config import GRPOConfig, RunConfig
from rl_apps.settings.data import Rows, load_rows
from rl_apps.settings.dtypes import gpus_have_bfloat16, warn_float32
from rl_apps.settings.evaluation_sets import configs_of_sets
from rl_apps.settings.model import MADE

WARNING = "warning: "
"""Beginning of a warning."""
HIGHEST_RATE = 1e-2
"""Learning rate above which AdamW usually diverges."""
LOWEST_ADAPTER_RATE = 1e-5
"""Learning rate below which LoRA adapters hardly change."""
MOST_PASSES = 20
"""Passes over the data above which a model usually memorizes it."""


def warnings_for(run: Run[Any], form: str) -> list[str]:
    """Return the warnings of a run.

    Args:
        form: form of the data, see `load_rows`.
    """
    config = run.config
    shortage = file_shortage(run)
    sentences = [
        *_warn_learning_rate(config),
        *_warn_passes(config, form),
        *_warn_lengths(run),
        *([shortage] if shortage else []),
        *_warn_models(config),
        *warn_float32(config, run.device == "cuda" and gpus_have_bfloat16()),
    ]
    return [WARNING + sentence for sentence in sentences]


def passes_over(config: RunConfig, form: str, rows: Rows) -> float:
    """Return the number of passes of a run over its training examples."""
    return config.steps_with(len(rows), form) * config.data.batch_size / len(rows)


def _warn_learning_rate(config: RunConfig) -> Iterator[str]:
    optimizer, setting = config.actor.optimizer, f"actor.optimizer.lr={config.actor.optimizer.lr:g}"
    if optimizer.name.startswith("adamw") and optimizer.lr > HIGHEST_RATE:
        yield f"{setting} is above {HIGHEST_RATE:g}, so training probably diverges; use 1e-6 to 1e-3"
    if getattr(config.actor.engine, "lora", None) and 0 < optimizer.lr < LOWEST_ADAPTER_RATE:
        yield f"{setting} is low for LoRA adapters, which then hardly change; use 1e-5 to 1e-3"


def _warn_passes(config: RunConfig, form: str) -> Iterator[str]:
    rows = load_rows(config.data, "train", form, config.seed)
    passes = passes_over(config, form, rows)
    if passes > MOST_PASSES and not config.total_epochs:
        yield (
            f"total_steps={config.total_steps} is {passes:,.0f} passes over {len(rows)} example(s), so the model "
            f"probably memorizes them; use more examples, or total_epochs={MOST_PASSES}"
        )


def _warn_lengths(run: Run[Any]) -> Iterator[str]:
    config, lengths = run.config, {}
    if run.layout.rollout and config.evaluation.examples:
        lengths["evaluation.max_new_tokens"] = config.evaluation.max_new_tokens
    for name, of_set in configs_of_sets(config).items():
        lengths[f"evaluation.sets.{name}.max_new_tokens"] = of_set.evaluation.max_new_tokens
    if isinstance(config, GRPOConfig):
        lengths["rollout.generation.max_new_tokens"] = config.rollout.generation.max_new_tokens
    limit = longest_row(config.data, config.model.directory())
    for name, tokens in lengths.items():
        if tokens >= limit:
            yield (
                f"{name}={tokens} leaves no room for a prompt, because both together have at most {limit} tokens "
                f"(data.max_length, or the model's context); use for example {limit // 2}"
            )


def _warn_models(config: RunConfig) -> Iterator[str]:
    for setting, path in config.model_paths().items():
        if path not in MADE and path not in config.model.directories:  # only in a dry run
            yield (
                f"{setting}={path} is no directory and not in the hub's cache, and a dry run does not look it up; "
                f"correct it, or run `hf download {path}`"
            )
