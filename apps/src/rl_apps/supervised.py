"""Checks of the commands that learn from the rows of a data set: one optimizer step per batch, no servers needed."""

from __future__ import annotations

from typing import Any

from rl_apps.app import Run
from rl_apps.data import load_rows
from rl_apps.layout import check_batch
from rl_contracts.config import require


def check_rows(run: Run[Any], form: str) -> list[str]:
    """Everything that can be known before a process starts.

    Args:
        form: what a row is to be, see `load_rows`.

    Returns:
        the arithmetic of the run, for the one who started it.

    Raises:
        ConfigError: a setting asks for what these commands do not do, or the batch does not divide.
        DataError: data cannot be used.
    """
    config = run.config
    require(
        config.actor.minibatches == 1,
        "actor.minibatches",
        "1: a batch of rows is one optimizer step here; set data.batch_size to the size of a step",
        config.actor.minibatches,
    )
    rows = load_rows(config.data, "train", form, config.seed)
    load_rows(config.data, "test", form, config.seed)
    check_batch(config.data.batch_size, 1, 1, run.layout.actor.strategy.data)
    what = "pairs" if form == "pairs" else "rows"
    return [f"{config.data.batch_size} of {len(rows)} {what} a step, {config.total_steps} steps"]
