"""Data sets by name, checked before anything starts."""

from __future__ import annotations

import inspect
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rl_contracts import registry
from rl_contracts.config import Settings, bounded, choice, require
from rl_contracts.errors import DataError

__all__ = ["load_rows"]

GENERATED = "word-problems"
"""The generated data set. It needs no path and comes with its own embedded model."""

GENERATED_PAIRS = "word-problem-pairs"
"""The same problems as preference pairs."""

CHAT = "chat"
"""Data set of any conversations or prompts; `data.path` is required."""

Rows = Sequence[dict[str, Any]]


@dataclass
class DataConfig(Settings):
    """Settings of the training data."""

    setting: ClassVar[str] = "data"
    name: str = GENERATED
    """Installed data set, or a dotted path to a loader. `chat`: any conversations or prompts; `gsm8k`: questions and
    worked answers; `word-problems`: generated; `hh-rlhf` and `word-problem-pairs`: preference pairs; `vision-chat`,
    `clevr_count_70k`, `geometry3k`: with images; `drawn-scenes`: generated images."""
    path: str = ""
    """Hub id, directory or file. Empty: the default of the data set. A file is a single split, so it needs
    `evaluation.examples=0`."""
    columns: dict[str, str] = field(default_factory=dict)
    """Column names that differ from the expected names, as `data.columns.EXPECTED=ACTUAL`, for example
    `data.columns.question=problem`. Expected names: `gsm8k`: question, answer; `chat`: messages, answer and fields of
    the reward; `hh-rlhf`: chosen, rejected, prompt; all: system, history, input. Dots in the actual name select nested
    fields. `data.columns.unused_context=context` keeps `context` out of the question."""
    train_split: str = "train"
    """Name of the training split in the data set."""
    test_split: str = "test"
    """Name of the split of held-out examples. Not read with `evaluation.examples=0`."""
    batch_size: int = bounded(16, "at least 1", lambda rows: rows >= 1)
    """Prompts (SFT: examples) per training step, over all data-parallel replicas."""
    max_length: int | None = bounded(None, "at least 2, or null", lambda tokens: tokens is None or tokens >= 2)
    """Maximum tokens of an example, including the completion if completions are generated; generation stops there.
    null: the model's context length, at most 2048. A value above the context length is rejected."""
    overlong: str = choice("reject", ("reject", "drop", "truncate"))
    """Handling of examples that are too long: `reject`, `drop` or `truncate`. `reject`: the command reports their
    number and does not start. `truncate`: conversations are cut at their end, and prompts at the beginning of their
    last message. A cut prompt leaves room for `max_new_tokens`, but at most half of the limit. The command reports the
    number of dropped or cut examples."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further options of the data set, by name."""


def load_rows(config: DataConfig, split: str, form: str, seed: int) -> Rows:
    """Load the examples of one split.

    Args:
        config: settings of the data set.
        split: `train` or `test`, independent of the names in the data set; or `set`, the test split of an evaluation
            set, which may be a single file.
        form: `rl` (question and gold answer separate), `sft` (whole conversations) or `pairs` (two conversations, one
            of them preferred).
        seed: seed of generated data sets; others ignore it.

    Raises:
        ConfigError: the data set is unknown, its columns cannot be renamed, or one file is used for both splits.
        DataError: a file is missing, an example has no question or answer, or there are no examples.
    """
    loader = registry.load("rl.datasets", config.name)
    arguments: dict[str, Any] = {"path": config.path} if config.path else {}
    if config.columns:
        fits = "columns" in inspect.signature(loader).parameters
        require(fits, "data.columns", f"none: data.name={config.name} has no renamable columns", config.columns)
        arguments["columns"] = dict(config.columns)
    if split == "test" and getattr(loader, "reads_files", False):
        _check_splits(config)
    name = {"train": config.train_split, "test": config.test_split, "set": config.test_split}.get(split, split)
    rows: Rows = loader(**arguments, split=name, form=form, seed=seed, **config.options)
    if not len(rows):
        raise DataError(f"data.name={config.name}: the {name} split has no examples.")
    return rows


def has_images(config: DataConfig) -> bool:
    """Return whether the examples may have images, as the attribute `has_images` of the data set says."""
    return getattr(registry.load("rl.datasets", config.name), "has_images", False)


def held_out_rows(rows: Rows, count: int) -> list[dict[str, Any]]:
    """Return `count` examples in the order of the data set, or all if there are fewer.

    The examples are a random sample, the same in every run. The first examples of a file sorted by difficulty would
    not be representative.
    """
    indices = range(len(rows))
    return [rows[i] for i in (indices if count >= len(rows) else sorted(random.Random(0).sample(indices, count)))]


def _check_splits(config: DataConfig) -> None:
    """Reject settings that use the same examples for training and evaluation."""
    require(
        config.train_split != config.test_split,
        "data.test_split",
        f"a split other than data.train_split={config.train_split}, or evaluation.examples=0 for no held-out examples",
        config.test_split,
    )
    require(
        not config.path or not Path(config.path).expanduser().is_file(),
        "data.path",
        f"a directory with the splits {config.train_split} and {config.test_split}, because one file would be both, or "
        "evaluation.examples=0 for no held-out examples",
        config.path,
    )


def first_rows(rows: Rows, count: int) -> list[dict[str, Any]]:
    """Return the first `count` examples, or all if there are fewer."""
    return [rows[i] for i in range(min(count, len(rows)))]
