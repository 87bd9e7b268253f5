"""Replaying saved batches through the actor, without servers: the first tool for every question about numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_contracts.sharding import share
from rl_contracts.trajectory import load_batch
from rl_trainers.actor import PolicyActor

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_contracts.parallel import ParallelContext


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


class ReplaySource:
    """Saved batches as the source of a training loop, in order.

    Args:
        paths: files that `Books` saved.
        parallel: this rank learns from its share of each.
        minibatches: optimizer steps per batch.
    """

    def __init__(self, paths: Sequence[str | Path], parallel: ParallelContext, minibatches: int = 1) -> None:
        self.paths, self.parallel, self.minibatches = list(paths), parallel, minibatches
        self.position = 0

    def next_batch(self) -> TensorDict:
        """This rank's share of the next batch; StopIteration after the last."""
        if self.position >= len(self.paths):
            raise StopIteration
        batch = load_batch(self.paths[self.position])
        self.position += 1
        return share(batch, self.parallel, self.minibatches)

    def end_step(self, version: int) -> None:
        """Nothing waits for it."""

    def state_dict(self) -> dict[str, Any]:
        """How many batches were handed out."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.position = int(state["position"])
