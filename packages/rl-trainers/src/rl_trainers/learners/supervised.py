"""Learning from the rows of a data set: a source of batches and a learner for the common loop, and its evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_contracts.batch.redistribution import shard_batch
from rl_contracts.batch.trajectory import UNIT_KEY, Trajectory, stack, validate
from rl_contracts.engine import LossFn, LossWeightFn, TrainEngine
from rl_contracts.errors import ConfigError, DataError
from rl_trainers.algorithms.functional.value_and_preference_losses import cross_entropy_loss
from rl_trainers.learners.optimizer_steps import take_steps, trained_tokens
from rl_trainers.recovery.component_states import Stateful

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_contracts.batch.parallel import ParallelContext
    from rl_contracts.chat.rendering import ChatRenderer

__all__ = ["DataSource", "LossEvaluation", "LossLearner", "shard_sequences", "supervised_sequences"]


def supervised_sequences(
    rows: Iterable[dict[str, Any]], renderer: ChatRenderer, max_length: int, truncate: bool = False
) -> list[Trajectory]:
    """Return conversations as trajectories that no model sampled: versions are -1 and log-probs 0 throughout.

    Args:
        rows: each with `messages`, and `tools` where the conversation has any.
        truncate: cut rows at `max_length` tokens.

    Raises:
        DataError: a row has nothing to learn from, is not shown whole by the chat template, or is longer than
            `max_length` tokens and not cut; names it.
    """
    result = []
    for number, row in enumerate(rows):
        name = row.get("prompt_id", number)
        ids, mask = rendered(renderer, row["messages"], row.get("tools"), f"row {name}")
        if len(ids) > max_length and not truncate:
            raise DataError(
                f"row {name} has {len(ids)} tokens, more than data.max_length ({max_length}); raise that or drop it."
            )
        ids, mask = ids[:max_length], mask[:max_length]
        if not any(mask):
            raise DataError(f"row {name} has no assistant token to learn from within {max_length} tokens.")
        size = len(ids)
        result.append(
            Trajectory(
                input_ids=np.asarray(ids, dtype=np.int64),
                loss_mask=np.asarray(mask, dtype=bool),
                logprobs=np.zeros(size, dtype=np.float32),
                versions=np.full(size, -1, dtype=np.int32),
                prompt_id=int(name),
                group_id=number,
                episode_id=number,
            )
        )
    return result


def rendered(
    renderer: ChatRenderer, messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None, where: str
) -> tuple[list[int], list[bool]]:
    """Return `render_sft` of a conversation that the chat template shows whole.

    Raises:
        DataError: the template does not show everything, or rejects the conversation; names the row.
    """
    try:
        renderer.require_rendered(messages, tools)
        return renderer.render_sft(messages, tools)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


class DataSource:
    """Batches of data rows for the training loop; every rank reads the same rows and keeps its share.

    Args:
        batches: rows of each batch; with `state_dict` and `load_state_dict`, where the run is to be saved.
        to_batch: this rank's part of them, as a batch.
    """

    def __init__(
        self, batches: Iterable[list[dict[str, Any]]], to_batch: Callable[[list[dict[str, Any]]], TensorDict]
    ) -> None:
        self._loader, self._batches, self._to_batch = batches, iter(batches), to_batch
        self._rows: list[dict[str, Any]] = []
        self._before: dict[str, Any] = {}
        self._returned = False

    def next_batch(self) -> TensorDict:
        """This rank's rows of the next batch; StopIteration at the end of the data."""
        if not self._returned:
            self._before = self._stateful().state_dict() if self.can_be_saved else {}
            self._rows = next(self._batches)
        self._returned = False
        return self._to_batch(self._rows)

    @property
    def can_be_saved(self) -> bool:
        """Whether the loader says its position."""
        return isinstance(self._loader, Stateful)

    def return_batch(self) -> None:
        """Take the last batch back, so that it is the next one."""
        self._returned = True

    def end_step(self, version: int) -> None:
        """Nothing waits for it."""

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, as its loader says it.

        Raises:
            ConfigError: the loader cannot be saved.
        """
        loader = self._stateful()
        return self._before if self._returned else loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._stateful().load_state_dict(state)
        self._batches = iter(self._loader)

    def _stateful(self) -> Stateful:
        if not isinstance(self._loader, Stateful):
            raise ConfigError(
                f"recover: {type(self._loader).__name__} has no state_dict and load_state_dict, so its position in the "
                "data cannot be saved. Set recover.every=0."
            )
        return self._loader


def shard_sequences(rows: Sequence[Trajectory], parallel: ParallelContext) -> TensorDict:
    """This replica's token-balanced part of rows that every replica has, [B / dp_size]; validated. Rows of one group,
    such as a preference pair, are not parted."""
    batch = stack(rows)
    batch[UNIT_KEY] = batch["group_ids"].clone()
    local = shard_batch(batch, parallel)
    validate(local, generated=False)
    return local


class LossLearner:
    """One optimizer step per batch, of any loss that needs nothing but the rows: cross entropy, preference pairs.

    Args:
        engine: what learns: a language model, or a reward model.
        loss: what is minimised.
        weigh: a batch's part of what the loss is divided by: `trained_tokens`, or pairs.
        reference: a frozen policy whose log-probs the loss compares with.
    """

    def __init__(
        self,
        engine: TrainEngine,
        loss: LossFn = cross_entropy_loss,
        weigh: LossWeightFn = trained_tokens,
        reference: TrainEngine | None = None,
    ) -> None:
        self.engine, self.loss, self.weigh, self.reference = engine, loss, weigh, reference

    @property
    def version(self) -> int:
        """Training batches applied."""
        return self.engine.version

    def prepare(self, batch: TensorDict) -> dict[str, float | None]:
        """Add `ref_logprobs`, [B, T], at the reference's weights, where there is one (collective)."""
        if self.reference is not None:
            batch["ref_logprobs"] = self.reference.forward(batch, lambda outputs, _: outputs.logprobs)
        return {}

    def update(self, batch: TensorDict) -> dict[str, float | None]:
        """Take the step; the version advances unless it was skipped (collective)."""
        return take_steps(self.engine, batch, self.loss, self.weigh)


class LossEvaluation:
    """A learner's loss on held-out rows, and of pairs how often the chosen answer is preferred.

    Args:
        batch: this rank's share of them; it is given what the loss needs (collective).
        rows: how many there are on all ranks.
    """

    def __init__(self, learner: LossLearner, batch: TensorDict, rows: int) -> None:
        learner.prepare(batch)
        self.learner, self.batch, self.rows = learner, batch, rows

    def __call__(self, step: int) -> dict[str, float | None]:
        """`loss/eval` (of cross entropy in nats per token) and `eval/rows`; of pairs also `eval/accuracy` and
        `eval/margin` (collective)."""
        found = self.learner.engine.eval_batch(self.batch, self.learner.loss, self.learner.weigh)
        names = {"loss": "loss/eval", "pair/accuracy": "eval/accuracy", "pair/margin": "eval/margin"}
        return {"eval/rows": self.rows, **{named: found[name] for name, named in names.items() if name in found}}
