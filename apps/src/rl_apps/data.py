"""Data sets by name, checked before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rl_contracts import registry
from rl_contracts.config import Settings, bounded, choice
from rl_contracts.errors import DataError

GENERATED = "word-problems"
"""The generated data set, which needs no path and comes with an embedded model of its own."""

GENERATED_PAIRS = "word-problem-pairs"
"""The same problems as preference pairs."""

Rows = Sequence[dict[str, Any]]


@dataclass
class DataConfig(Settings):
    """What is learned from."""

    setting: ClassVar[str] = "data"
    name: str = GENERATED
    """Installed data set (`word-problems`, `gsm8k`; of pairs `word-problem-pairs`, `hh-rlhf`) or a dotted path to a
    loader."""
    path: str = ""
    """Hub id, directory or file; empty: the data set's own default."""
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
        split: `train` or `test`.
        form: `rl` (question and gold answer apart), `sft` (whole conversations) or `pairs` (two conversations, of which
            one is preferred).
        seed: makes generated sets; others ignore it.

    Raises:
        ConfigError: no data set of that name.
        DataError: a missing file, a row without question or answer, or no rows.
    """
    loader = registry.load("rl.datasets", config.name)
    arguments = {"path": config.path} if config.path else {}
    rows: Rows = loader(**arguments, split=split, form=form, seed=seed, **config.options)
    if not len(rows):
        raise DataError(f"data.name={config.name}: the {split} split has no rows.")
    return rows


def first_rows(rows: Rows, count: int) -> list[dict[str, Any]]:
    """The first `count` rows, or all there are."""
    return [rows[i] for i in range(min(count, len(rows)))]
