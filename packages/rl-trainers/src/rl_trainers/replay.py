"""Replaying a saved batch through the actor, without servers: the first tool for every question about numbers."""

from __future__ import annotations

from pathlib import Path

from rl_contracts.sharding import share
from rl_contracts.trajectory import load_batch
from rl_trainers.actor import PolicyActor


def replay_batch(actor: PolicyActor, path: str | Path, version: int | None = None) -> dict[str, float | None]:
    """One training step on a saved batch (collective).

    Args:
        actor: holds the weights to start from.
        path: a file that `Books` saved (`batches/step_<n>-version_<v>.safetensors`).
        version: the trainer's version at that step; None: the latest version of a token in the batch.

    Returns:
        statistics of `prepare` and `update`, the same on every rank and for every number of ranks.

    Raises:
        DataError: the file is not a saved batch.
    """
    batch = load_batch(path)
    actor.engine.version = int(batch["versions"].max()) if version is None else version
    mine = share(batch, actor.engine.parallel, actor.minibatches)
    return actor.prepare(mine) | actor.update(mine)
