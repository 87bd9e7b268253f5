"""Log-prob gap gate: check that servers and trainer compute the same log-probs from the same weights.

It makes two comparisons over a few sequences of each batch.

- Before the update: tokens of the current version must have been recorded with the log-probs that the trainer computes.
- After the commit: one server scores the same sequences; the servers take turns, one per step. The scores must equal
  the trainer's log-probs after the update, and must not be closer to the log-probs before the update. To test the
  latter in 16 bits, servers also score before the update.

The second comparison finds faults of the weights and of values computed from them. The first also finds faults of
sampling, caches and version stamps. Servers that can only score at temperature 1 are compared at temperature 1.

When a comparison fails, experiments look for the cause, and the warning or error names it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import zip_longest
from typing import TYPE_CHECKING

from rl_trainers.weight_sync.gap.config import GapConfig
from rl_trainers.weight_sync.gap.divergence import current_version_mask
from rl_trainers.weight_sync.gap.measurements import Measurements, gap_metrics
from rl_trainers.weight_sync.gap.recorded import RecordedCheck
from rl_trainers.weight_sync.gap.scores import ScoreCheck

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_contracts.batch.parallel import ParallelContext
    from rl_contracts.data import WeightReceipt
    from rl_contracts.engine import TrainEngine
    from rl_contracts.inference import InferenceEngine
    from rl_contracts.runtime.aio import LoopThread
    from rl_trainers.weight_sync.memory_sharing import MemorySharing


class GapGate:
    """Log-prob gap gate: compares log-probs before each update and after its commit.

    When a comparison fails, experiments look for the cause. All ranks must make the same calls.

    Args:
        engine: the trainer.
        inference: client of the servers; only data-parallel leaders use it.
        loop: thread that runs the client's coroutines.
        config: thresholds.
        trained, served: names of the dtypes in which the trainer and the servers compute.
        sharing: wakes sleeping servers when the gate needs them, or None if servers never sleep.
        image_token: token that a vision-language model replaces by image features; None for a model of texts.
    """

    def __init__(
        self,
        engine: TrainEngine,
        inference: InferenceEngine,
        loop: LoopThread,
        config: GapConfig,
        trained: str = "float32",
        served: str = "float32",
        sharing: MemorySharing | None = None,
        image_token: int | None = None,
    ) -> None:
        from rl_trainers.weight_sync.gap.experiments import Experiments

        self.config, self.inference = config, inference
        experiments = Experiments(engine, inference, loop, image_token)
        self.measurements = Measurements(experiments, config, trained, served, sharing)
        self._recorded, self._scores = RecordedCheck(self.measurements), ScoreCheck(self.measurements)
        self._missing_recorded = False

    def scores_before_update(self) -> bool:
        """Return whether `before_update` requests scores for each batch, so that servers must be awake (collective).

        True in 16 bits if servers are compared with each other or with themselves. Otherwise `before_update` wakes
        sleeping servers only when they are needed.
        """
        measurements = self.measurements
        needs_scores = measurements.low_precision and (measurements.own_reference or len(self.inference.servers) > 1)
        measurements.scores_each_batch = bool(self.config.sequences) and bool(
            measurements.engine.parallel.broadcast_json(needs_scores)
        )
        return measurements.scores_each_batch

    def before_update(self, batch: TensorDict) -> dict[str, float | None]:
        """Compare the recorded log-probs of tokens of the current version with the trainer's (collective).

        Also choose the sequences and the server of this step. A token is of the current version if it and all
        generated tokens before it carry the trainer's version. After `recorded.REGENERATE_STEPS` steps without such
        tokens, the servers generate new completions for the sequences' prompts.

        Args:
            batch: this rank's sequences, from which the trainer is about to learn.

        Returns:
            `gap/fresh_mean_abs`, `gap/fresh_max_abs` and `gap/fresh_k3`, None without tokens of the current version,
            and `gap/fresh_tokens`.

        Raises:
            WeightUpdateError: the gap is above `stop`, or the comparison failed `alarm.PATIENCE` consecutive times. The
                message names the likely cause.
        """
        if not self.config.sequences:
            return gap_metrics("gap/fresh_", None)
        engine = self.measurements.engine
        sequences = _sample_sequences(batch, self.config.sequences, engine.version, engine.parallel)
        trainer_logprobs = self.measurements.experiments.trainer_logprobs(sequences)
        self._scores.prepare(sequences, trainer_logprobs)
        metrics, self._missing_recorded = self._recorded.compare(sequences, trainer_logprobs, self._scores.receipts)
        return metrics

    def after_commit(self, sent: WeightReceipt | None = None) -> dict[str, float | None]:
        """Compare a server's scores at the committed version with the trainer's log-probs (collective).

        The server scores the sequences that `before_update` chose.

        Args:
            sent: the trainer's receipt of the version.

        Returns:
            `gap/mean_abs`, `gap/max_abs` and `gap/k3` over the compared tokens of all replicas, None if the comparison
            could not be made. `gap/lag`: z of the test whether the server still serves the previous version
            (`lag.LagTest`), None if no test was informative. `gap/empty`: the number of comparisons of this step that
            could not be made.

        Raises:
            WeightUpdateError: the gap is above `stop`, or `alarm.PATIENCE` consecutive comparisons failed or could not
                be made. The message names the likely cause.
        """
        metrics, is_missing = self._scores.compare(sent)
        return metrics | {"gap/empty": float(self._missing_recorded + is_missing)}


def _sample_sequences(batch: TensorDict, count: int, version: int, parallel: ParallelContext) -> TensorDict:
    """Return this replica's `count` / dp_size sequences, rounded up, or all of them if it has fewer.

    They come from as many groups as possible, and sequences with tokens of the current version come first. A group may
    be spread over replicas, so each replica prefers different groups.
    """
    from rl_contracts.batch.trajectory import select

    is_local = batch["group_ids"] % parallel.dp_size == parallel.dp_rank
    is_current = current_version_mask(batch["versions"], version).any(-1)
    order = (2 * is_current.int() + is_local.int()).argsort(descending=True, stable=True)
    members: dict[int, list[int]] = defaultdict(list)
    for index, group in zip(order.tolist(), batch["group_ids"][order].tolist(), strict=True):
        members[group].append(index)
    turns = zip_longest(*members.values())  # the first of each group, then the second of each, ...
    chosen = [index for turn in turns for index in turn if index is not None]
    return select(batch, chosen[: math.ceil(count / parallel.dp_size)])
