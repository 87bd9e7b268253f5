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
"""The generated data set, which needs no path and comes with an embedded model of its own."""

GENERATED_PAIRS = "word-problem-pairs"
"""The same problems as preference pairs."""

CHAT = "chat"
"""Any conversations or prompts; where they are has to be said."""

Rows = Sequence[dict[str, Any]]


@dataclass
class DataConfig(Settings):
    """What is learned from."""

    setting: ClassVar[str] = "data"
    name: str = GENERATED
    """Installed data set (`chat`: any conversations or prompts; `gsm8k`: questions and worked answers; generated
    `word-problems`; of pairs `hh-rlhf`, `word-problem-pairs`) or a dotted path to a loader."""
    path: str = ""
    """Hub id, directory or file; empty: the data set's own default. A file is one split, so it needs
    `evaluation.rows=0`."""
    columns: dict[str, str] = field(default_factory=dict)
    """Columns that have other names there: `data.columns.question=problem`. The names before `=` are those that the
    data set asks for (`gsm8k`: question, answer; `chat`: messages, answer, and what the reward asks for; `hh-rlhf`:
    chosen, rejected, prompt; each also system, history, input), behind it the file's, with dots for what lies inside
    of another column. `data.columns.unused_context=context` keeps `context` out of the question."""
    train_split: str = "train"
    """The split that is learned from, by its name in the data set."""
    test_split: str = "test"
    """The split of held-out rows; it is not read with `evaluation.rows=0`."""
    batch_size: int = bounded(16, "at least 1", lambda rows: rows >= 1)
    """Prompts (SFT: rows) per training step, over all data-parallel replicas."""
    max_length: int | None = bounded(None, "at least 2, or null", lambda tokens: tokens is None or tokens >= 2)
    """Tokens of a row at most; where answers are generated, of a prompt with its answer, which ends there. null: what
    the model's context holds, and 2048 at most. More than the context is refused."""
    overlong: str = choice("refuse", ("refuse", "drop", "truncate"))
    """What becomes of rows that are longer: `refuse` (the command says how many, and does not start), `drop` (they are
    left out) or `truncate` (their end is cut; of a prompt that leaves no room for an answer, the beginning of its last
    message, until `max_new_tokens` fit, or half of the limit). What is left out or cut is told."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further options of the data set."""


def load_rows(config: DataConfig, split: str, form: str, seed: int) -> Rows:
    """The rows of one split.

    Args:
        config: which data set.
        split: `train` or `test`, whatever they are called there.
        form: `rl` (question and gold answer apart), `sft` (whole conversations) or `pairs` (two conversations, of which
            one is preferred).
        seed: makes generated sets; others ignore it.

    Raises:
        ConfigError: no data set of that name, one whose columns have no other names, or one file for both splits.
        DataError: a missing file, a row without question or answer, or no rows.
    """
    loader = registry.load("rl.datasets", config.name)
    arguments: dict[str, Any] = {"path": config.path} if config.path else {}
    if config.columns:
        fits = "columns" in inspect.signature(loader).parameters
        require(fits, "data.columns", f"none: data.name={config.name} takes no names of columns", config.columns)
        arguments["columns"] = dict(config.columns)
    if split == "test" and getattr(loader, "reads_files", False):
        _check_splits(config)
    named = {"train": config.train_split, "test": config.test_split}.get(split, split)
    rows: Rows = loader(**arguments, split=named, form=form, seed=seed, **config.options)
    if not len(rows):
        raise DataError(f"data.name={config.name}: the {named} split has no rows.")
    return rows


def held_out_rows(rows: Rows, count: int) -> list[dict[str, Any]]:
    """`count` rows in their order, a random sample that is the same in every run, or all there are. The first rows of a
    file that is sorted by difficulty would say little about the others."""
    numbers = range(len(rows))
    return [rows[i] for i in (numbers if count >= len(rows) else sorted(random.Random(0).sample(numbers, count)))]


def _check_splits(config: DataConfig) -> None:
    """Reject held-out rows that are the training rows."""
    require(
        config.train_split != config.test_split,
        "data.test_split",
        f"another split than data.train_split={config.train_split}, or evaluation.rows=0 for none",
        config.test_split,
    )
    require(
        not config.path or not Path(config.path).expanduser().is_file(),
        "data.path",
        f"a directory with the splits {config.train_split} and {config.test_split}, because one file would be both, or "
        "evaluation.rows=0 for no held-out rows",
        config.path,
    )


def first_rows(rows: Rows, count: int) -> list[dict[str, Any]]:
    """The first `count` rows, or all there are."""
    return [rows[i] for i in range(min(count, len(rows)))]
