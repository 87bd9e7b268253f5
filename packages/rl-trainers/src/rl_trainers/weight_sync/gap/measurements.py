"""Parts that both comparisons of the log-prob gap gate share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rl_trainers.weight_sync.gap.diagnosis import DTYPE, Evidence, diagnose
from rl_trainers.weight_sync.gap.divergence import LogprobGap, current_version_mask

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

    from rl_contracts.engine import TrainEngine
    from rl_contracts.inference import InferenceEngine
    from rl_trainers.weight_sync.gap.alarm import Alarm
    from rl_trainers.weight_sync.gap.config import GapConfig
    from rl_trainers.weight_sync.gap.experiments import Experiments
    from rl_trainers.weight_sync.memory_sharing import MemorySharing

HALF_PRECISION = ("bfloat16", "float16")


@dataclass
class Measurements:
    """Measurements on servers and trainer, and what follows from a failed comparison."""

    experiments: Experiments
    config: GapConfig
    trained: str
    """Name of the dtype in which the trainer computes."""
    served: str
    """Name of the dtype in which the servers compute."""
    sharing: MemorySharing | None = None
    """Wakes sleeping servers, or None if servers never sleep."""
    scores_each_batch: bool = True
    """True if servers score every batch before the update, and so are awake then."""

    @property
    def engine(self) -> TrainEngine:
        """The trainer."""
        return self.experiments.engine

    @property
    def inference(self) -> InferenceEngine:
        """Client of the servers."""
        return self.experiments.inference

    @property
    def low_precision(self) -> bool:
        """True if the trainer or the servers compute in less than float32."""
        return {self.trained, self.served} != {"float32"}

    @property
    def own_reference(self) -> bool:
        """True if 16-bit servers are compared with themselves, because they have no checksums of live tensors."""
        can = self.inference.capabilities
        return self.served in HALF_PRECISION and not (can.checksums and can.live_checksums)

    def servers_awake(self) -> AbstractContextManager[None]:
        """Wake sleeping servers for a block."""
        return nullcontext() if self.scores_each_batch or self.sharing is None else self.sharing.servers_awake()

    def as_scored(self, sequences: TensorDict, trainer_logprobs: torch.Tensor) -> tuple[TensorDict, torch.Tensor]:
        """Return the sequences that servers can score, and the trainer's log-probs of them (collective).

        Servers score text only, and some only at temperature 1.
        """
        from rl_contracts.batch.image_entries import IMAGES_KEY, images_of

        if IMAGES_KEY in sequences:
            texts = [index for index, images in enumerate(images_of(sequences)) if not images]
            sequences, trainer_logprobs = sequences.exclude(IMAGES_KEY)[texts], trainer_logprobs[texts]
        if self.inference.capabilities.any_score_temperature:
            return sequences, trainer_logprobs
        sequences = sequences.clone().update({"temperature": sequences["temperature"].new_ones(sequences.batch_size)})
        return sequences, self.experiments.trainer_logprobs(sequences)

    def current_mask(self, sequences: TensorDict) -> torch.Tensor:
        """Return the mask of tokens of the trainer's version, bool [B, T]."""
        return current_version_mask(sequences["versions"], self.engine.version)

    def raise_alarms(self, alarm: Alarm, subject: str, evidence: Evidence, examine: Callable[[], Evidence]) -> None:
        """Count a comparison. If it must be reported, gather more evidence with `examine` and name the likely cause."""
        gap, config = evidence.gap, self.config
        too_much = not gap.mean_abs <= config.stop  # nan is too much
        if alarm.count(diagnose(evidence) is not None, too_much, certain=evidence.certain):
            name, why = diagnose(examine()) or ("unknown", "a repeated measurement shows no gap")
            alarm.warn(
                f"servers and trainer disagree: {subject} differ from the trainer's by {gap.mean_abs:.3g} nats on "
                f"average (max {gap.max_abs:.3g}) over {gap.tokens} tokens at version {self.engine.version}; "
                f"consecutive failures: {alarm.in_row}, limit: {alarm.patience} (gap.warn={config.warn:g}, "
                f"gap.stop={config.stop:g}). Likely cause: {name}: {why}.",
                excused=name == DTYPE,
            )

    def diagnose(
        self,
        evidence: Evidence,
        sequences: TensorDict,
        server_logprobs: torch.Tensor,
        before: torch.Tensor | None,
        **more: Any,
    ) -> Evidence:
        """Return the evidence with the results of experiments added."""
        experiments = self.experiments
        mask = self.current_mask(sequences) if evidence.recorded else experiments.compared(sequences)
        older, base = (
            experiments.compare(server_logprobs, before, mask),
            experiments.compare(server_logprobs, experiments.unadapted(sequences), mask),
        )
        return replace(
            evidence,
            older=older,
            base=base,
            temperature=experiments.temperature(sequences, server_logprobs, mask),
            **more,
        )


def gap_metrics(prefix: str, gap: LogprobGap | None) -> dict[str, float | None]:
    """Return `<prefix>mean_abs`, `<prefix>max_abs` and `<prefix>k3`, with None values without a gap."""
    return {prefix + name: None if gap is None else getattr(gap, name) for name in ("mean_abs", "max_abs", "k3")}
