"""Data sets by name, checked before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rl_contracts import registry
from rl_contracts.config import Settings, bounded
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
    max_length: int = bounded(2048, "at least 2", lambda tokens: tokens >= 2)
    """Tokens of a row (of a prompt with its answer, where answers are generated) at most; longer ones are refused."""
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
