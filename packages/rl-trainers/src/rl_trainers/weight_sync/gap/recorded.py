"""Comparison before the update: the log-probs that servers recorded, with those of the trainer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rl_trainers.weight_sync.gap.alarm import Alarm
from rl_trainers.weight_sync.gap.diagnosis import Evidence
from rl_trainers.weight_sync.gap.measurements import Measurements, gap_metrics

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

    from rl_contracts.data import WeightReceipt

REGENERATE_STEPS = 20
"""Consecutive steps without tokens of the current version, after which servers generate new completions. Asynchronous
runs seldom have such tokens; a few short completions in 20 steps cost little."""


class RecordedCheck:
    """Compares the recorded log-probs of tokens of the current version with the trainer's.

    Args:
        measurements: measurements on servers and trainer.
    """

    def __init__(self, measurements: Measurements) -> None:
        self._measurements = measurements
        self._alarm = Alarm()
        self._steps_without_tokens = 0

    def compare(
        self,
        sequences: TensorDict,
        trainer_logprobs: torch.Tensor,
        receipts: tuple[WeightReceipt | None, WeightReceipt | None],
    ) -> tuple[dict[str, float | None], bool]:
        """Compare once (collective).

        Args:
            sequences: sequences of the batch.
            trainer_logprobs: the trainer's log-probs of them, [B, T].
            receipts: the trainer's receipts of this version and of the previous one.

        Returns:
            the metrics of `GapGate.before_update`, and whether there was no token of the current version.
        """
        measurements = self._measurements
        experiments, config = measurements.experiments, measurements.config
        gap = experiments.compare(trainer_logprobs, sequences["logprobs"], measurements.current_mask(sequences))
        self._steps_without_tokens = 0 if gap is not None else self._steps_without_tokens + 1
        if self._steps_without_tokens >= REGENERATE_STEPS:
            self._steps_without_tokens = 0
            with measurements.servers_awake():
                regenerated = experiments.attempt(experiments.regenerate, sequences)
            if regenerated is not None:
                sequences, trainer_logprobs = regenerated, experiments.trainer_logprobs(regenerated)
                mask = measurements.current_mask(sequences)
                gap = experiments.compare(trainer_logprobs, sequences["logprobs"], mask)
        if gap is not None:
            evidence = Evidence(config.warn, measurements.low_precision, gap, recorded=True)

            def examine() -> Evidence:
                with measurements.servers_awake():
                    return self._diagnose(evidence, sequences, trainer_logprobs, receipts)

            subject = "the recorded log-probs of tokens of the current version"
            measurements.raise_alarms(self._alarm, subject, evidence, examine)
        metrics = {**gap_metrics("gap/fresh_", gap), "gap/fresh_tokens": float(gap.tokens) if gap else 0.0}
        return metrics, gap is None

    def _diagnose(
        self,
        evidence: Evidence,
        sequences: TensorDict,
        trainer_logprobs: torch.Tensor,
        receipts: tuple[WeightReceipt | None, WeightReceipt | None],
    ) -> Evidence:
        """Return the evidence for a gap of recorded log-probs.

        Scores are examined first, because wrong scores imply wrong recorded log-probs.
        """
        measurements, experiments = self._measurements, self._measurements.experiments
        scored, trainer_logprobs = measurements.as_scored(sequences, trainer_logprobs)
        server_logprobs = experiments.attempt(experiments.scores, scored, measurements.inference.score)
        gap = experiments.compare(trainer_logprobs, server_logprobs, experiments.compared(scored))
        if server_logprobs is not None and gap is not None and not gap.mean_abs <= measurements.config.warn:
            live = experiments.receipts(*receipts)
            return measurements.diagnose(
                replace(evidence, gap=gap, recorded=False), scored, server_logprobs, None, receipts=live
            )
        before = experiments.attempt(experiments.scores, sequences, measurements.inference.score_previous_weights)
        prompts = {
            "seen_prompt": experiments.gap_of_regenerated(sequences, False),
            "new_prompt": experiments.gap_of_regenerated(sequences, True),
        }
        return measurements.diagnose(evidence, sequences, sequences["logprobs"], before, **prompts)
