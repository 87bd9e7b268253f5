"""Learning from the examples of a data set: a batch source, a learner and an evaluation for the training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_contracts.batch.redistribution import shard_batch
from rl_contracts.batch.trajectory import UNIT_KEY, Trajectory, stack, validate
from rl_contracts.chat.image_messages import images_in, with_read_images
from rl_contracts.engine import LossFn, LossWeightFn, TrainEngine
from rl_contracts.errors import ConfigError, DataError
from rl_trainers.algorithms.functional.value_and_preference_losses import cross_entropy_loss
from rl_trainers.learners.optimizer_steps import take_steps, trained_tokens
from rl_trainers.recovery.component_states import Stateful

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_contracts.batch.parallel import ParallelContext
    from rl_contracts.chat.rendering import ChatRenderer
    from rl_contracts.images import Image

__all__ = ["DataSource", "LossEvaluation", "LossLearner", "shard_sequences", "supervised_sequences"]


def supervised_sequences(
    rows: Iterable[dict[str, Any]], renderer: ChatRenderer, max_length: int, truncate: bool = False
) -> list[Trajectory]:
    """Return conversations as trajectories.

    No model sampled them, so all versions are -1 and all log-probs 0.

    Args:
        rows: examples with `messages`, and optionally `tools`. Messages may have images.
        renderer: turns conversations into tokens.
        max_length: longest conversation, in tokens.
        truncate: whether to cut longer conversations of text at `max_length` tokens.

    Raises:
        DataError: an example has no assistant token to learn from, has content that the chat template omits or an
            image that cannot be read, or is too long without `truncate` or with images. The message names the example.
    """
    result = []
    for index, row in enumerate(rows):
        name = row.get("prompt_id", index)
        ids, mask, images = render_conversation(renderer, row["messages"], row.get("tools"), f"example {name}")
        if len(ids) > max_length and (images or not truncate):  # a cut could separate an image from its placeholders
            raise DataError(
                f"example {name} has {len(ids)} tokens, more than data.max_length={max_length}; raise the limit or "
                "remove the example."
            )
        ids, mask = ids[:max_length], mask[:max_length]
        if not any(mask):
            raise DataError(
                f"example {name} has no assistant token within data.max_length={max_length}; raise the limit or remove "
                "the example."
            )
        size = len(ids)
        result.append(
            Trajectory(
                input_ids=np.asarray(ids, dtype=np.int64),
                loss_mask=np.asarray(mask, dtype=bool),
                logprobs=np.zeros(size, dtype=np.float32),
                versions=np.full(size, -1, dtype=np.int32),
                prompt_id=int(name),
                group_id=index,
                episode_id=index,
                images=images,
            )
        )
    return result


def render_conversation(
    renderer: ChatRenderer, messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None, where: str
) -> tuple[list[int], list[bool], tuple[Image, ...]]:
    """Check that the chat template renders all of a conversation; return the result of `render_sft` and the images.

    Args:
        where: name of the conversation, for messages.

    Raises:
        DataError: the template omits content or rejects the conversation, or an image cannot be read. The message
            begins with `where`.
    """
    try:
        read = with_read_images(messages)  # each image once
        renderer.require_rendered(read, tools)
        return *renderer.render_sft(read, tools), images_in(read)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


class DataSource:
    """Batches of examples for the training loop; every rank reads the same examples and keeps its shard.

    Args:
        batches: examples of each batch; must have `state_dict` and `load_state_dict` for recovery checkpoints.
        to_batch: turns the examples of a batch into this rank's shard.
    """

    def __init__(
        self, batches: Iterable[list[dict[str, Any]]], to_batch: Callable[[list[dict[str, Any]]], TensorDict]
    ) -> None:
        self._loader, self._batches, self._to_batch = batches, iter(batches), to_batch
        self._rows: list[dict[str, Any]] = []
        self._before: dict[str, Any] = {}
        self._returned = False

    def next_batch(self) -> TensorDict:
        """Return this rank's sequences of the next batch.

        Raises:
            StopIteration: the data is exhausted.
        """
        if not self._returned:
            self._before = self._stateful().state_dict() if self.can_be_saved else {}
            self._rows = next(self._batches)
        self._returned = False
        return self._to_batch(self._rows)

    @property
    def can_be_saved(self) -> bool:
        """True if the loader can save its position."""
        return isinstance(self._loader, Stateful)

    def return_batch(self) -> None:
        """Take back the last batch, so that `next_batch` returns it again."""
        self._returned = True

    def end_step(self, version: int) -> None:
        """Do nothing; a data set does not depend on the trainer's version."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, as saved by the loader.

        Raises:
            ConfigError: the loader cannot save its position.
        """
        loader = self._stateful()
        return self._before if self._returned else loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position.

        Raises:
            ConfigError: the loader cannot restore a position.
        """
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
    """Return this replica's shard of sequences, about B / dp_size of them, balanced by tokens and validated.

    All replicas pass the same sequences. Sequences of one group, such as a preference pair, stay together.
    """
    batch = stack(rows)
    batch[UNIT_KEY] = batch["group_ids"].clone()
    shard = shard_batch(batch, parallel)
    validate(shard, generated=False)
    return shard


class LossLearner:
    """Takes one optimizer step per batch, for losses that depend only on the data: cross entropy and preference pairs.

    Args:
        engine: the language model or reward model that learns.
        loss: loss to minimize.
        weigh: returns a batch's contribution to the loss denominator, such as `trained_tokens` or `count_pairs`.
        reference: frozen policy whose log-probs the loss needs, or None.
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
        """Number of training batches applied."""
        return self.engine.version

    def prepare(self, batch: TensorDict) -> dict[str, float | None]:
        """Add `ref_logprobs`, [B, T], if there is a reference (collective)."""
        if self.reference is not None:
            batch["ref_logprobs"] = self.reference.forward(batch, lambda outputs, _: outputs.logprobs)
        return {}

    def update(self, batch: TensorDict) -> dict[str, float | None]:
        """Take one optimizer step; the version advances unless the step was skipped (collective)."""
        return take_steps(self.engine, batch, self.loss, self.weigh)


class LossEvaluation:
    """Evaluates a learner's loss on held-out examples, and for pairs the preference accuracy.

    Construction is collective: it adds the entries that the loss needs to the batch.

    Args:
        learner: the learner to evaluate.
        batch: this rank's shard of the held-out sequences.
        num_examples: number of held-out examples on all ranks.
    """

    def __init__(self, learner: LossLearner, batch: TensorDict, num_examples: int) -> None:
        learner.prepare(batch)
        self.learner, self.batch, self.rows = learner, batch, num_examples

    def __call__(self, step: int) -> dict[str, float | None]:
        """Return `loss/eval` and `eval/examples`, and for pairs also `eval/accuracy` and `eval/margin` (collective).

        The loss of cross entropy is in nats per token.
        """
        statistics = self.learner.engine.eval_batch(self.batch, self.learner.loss, self.learner.weigh)
        names = {"loss": "loss/eval", "pair/accuracy": "eval/accuracy", "pair/margin": "eval/margin"}
        return {
            "eval/examples": self.rows,
            **{named: statistics[name] for name, named in names.items() if name in statistics},
        }
