"""The gap gate: do servers and trainer compute the same log-probs from the weights that both should hold?

Two comparisons over a few rows of each batch. Before the update, tokens whose whole prefix carries the trainer's
version must have been recorded with the log-probs that the trainer gives them. After the commit, the servers score the
same rows at the new version. The second finds what is wrong with the weights or with what is computed from them, the
first also what is wrong with sampling, caches and stamps.

Where a comparison is off, experiments look for the cause and the warning or error names it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rl_contracts.config import require
from rl_contracts.errors import WeightUpdateError
from rl_contracts.logging import get_logger
from rl_trainers.gap.diagnosis import DTYPE, Cause, Evidence, Gap, diagnose

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

    from rl_contracts.data import WeightReceipt
    from rl_contracts.engine import TrainEngine
    from rl_contracts.inference import InferenceEngine
    from rl_trainers.publish import Runner

log = get_logger("trainers.gap")


@dataclass
class GapConfig:
    """When servers and trainer are said to disagree."""

    rows: int = 2
    """Rows of the batch that each replica compares; 0 switches the gate off."""
    warn: float = 0.02
    """Mean absolute difference, in nats, above which a warning is logged. bfloat16 on either side makes 0.01 to 0.05.
    """
    stop: float = 0.5
    """Mean absolute difference, in nats, above which the run stops at once."""
    patience: int = 5
    """Comparisons above `warn` in a row at which the run stops as well, unless rounding to 16 bits explains them."""
    answer_every: int = 20
    """Steps in a row without a fresh token after which the servers answer `rows` of the batch's prompts again (at most
    16 tokens each), so that there are some; 0: never. Asynchronous runs seldom have fresh tokens of their own."""
    timeout: float = 60.0
    """Seconds for the servers to score or answer the rows."""

    def __post_init__(self) -> None:
        require(self.rows >= 0, "gap.rows", "0 (off) or more", self.rows)
        require(0 < self.warn <= self.stop, "gap.warn", f"more than 0 and at most gap.stop ({self.stop})", self.warn)
        require(self.patience >= 1, "gap.patience", "at least 1", self.patience)
        require(self.answer_every >= 0, "gap.answer_every", "0 (never) or more steps", self.answer_every)
        require(self.timeout > 0, "gap.timeout", "more than 0 seconds", self.timeout)


class GapGate:
    """Measures before an update and after its commit, and looks closer where something is off. All ranks make the same
    calls.

    Args:
        engine: the trainer.
        inference: client of the servers.
        run: runs the client's coroutines.
        config: thresholds.
        low_precision: whether one of the sides computes in less than float32.
    """

    def __init__(
        self,
        engine: TrainEngine,
        inference: InferenceEngine,
        run: Runner,
        config: GapConfig,
        low_precision: bool = False,
    ) -> None:
        from rl_trainers.gap.experiments import Experiments

        self.engine, self.inference, self.config = engine, inference, config
        self.low_precision = low_precision
        self.experiments = Experiments(engine, inference, run, config.timeout)
        self._scores = Alarm(config, "the servers' scores")
        self._fresh = Alarm(config, "the recorded log-probs of tokens that the trainer's version made")
        self._without_fresh = self._empty = 0
        self._sent: WeightReceipt | None = None
        self._rows: TensorDict | None = None
        self._before: torch.Tensor | None = None

    def before_update(self, batch: TensorDict) -> dict[str, float | None]:
        """Choose the rows of this step, and compare the log-probs that were recorded for their fresh tokens with the
        trainer's (collective). Fresh are those whose whole prefix carries the trainer's version; where there were none
        for `answer_every` steps, the servers answer the rows' prompts again.

        Args:
            batch: this rank's rows, from which the trainer is about to learn.

        Returns:
            `gap/fresh_mean_abs`, `gap/fresh_max_abs`, `gap/fresh_k3`, None without a fresh token; and
            `gap/fresh_tokens`.

        Raises:
            WeightUpdateError: they are off by more than `stop`, or for too long; names the cause.
        """
        if not self.config.rows:
            return _figures("gap/fresh_", None)
        self._rows = rows = _choose(batch, self.config.rows, self.engine.version)
        self._before = before = self.experiments.ours(rows)
        gap = self._compare_fresh(rows, before)
        self._without_fresh = 0 if gap is not None else self._without_fresh + 1
        if self.config.answer_every and self._without_fresh >= self.config.answer_every:
            self._without_fresh = 0
            answers = self.experiments.answers(rows)
            if answers is not None:
                rows, before = answers, self.experiments.ours(answers)
                gap = self._compare_fresh(rows, before)
        self._empty = int(gap is None)
        if gap is not None and self._fresh.note(gap):
            self._fresh.speak(gap, self.engine.version, diagnose(self._fresh_evidence(rows, before, gap)))
        return {**_figures("gap/fresh_", gap), "gap/fresh_tokens": float(gap.tokens) if gap else 0.0}

    def after_commit(self, sent: WeightReceipt | None = None) -> dict[str, float | None]:
        """Compare the servers' scores of the same rows, at the version that was just committed, with the trainer's
        log-probs (collective).

        Args:
            sent: the trainer's receipt of the version.

        Returns:
            `gap/mean_abs`, `gap/max_abs`, `gap/k3` over the compared tokens of all replicas, None without any; and
            `gap/empty`, the comparisons of this step that found no token.

        Raises:
            WeightUpdateError: the scores are off by more than `stop`, or for too long; names the cause.
        """
        self._sent = sent
        if self._rows is None or self._before is None:
            return {**_figures("gap/", None), "gap/empty": 0.0}
        rows, before, self._rows, self._before = self._rows, self._before, None, None
        ours, theirs = self.experiments.ours(rows), self.experiments.scores(rows, self.inference.score)
        gap = self.experiments.compare(ours, theirs, _scored(rows))
        if gap is not None and self._scores.note(gap):
            evidence = self._scores_evidence(rows, ours, theirs, before)
            self._scores.speak(gap, self.engine.version, diagnose(evidence))
        return {**_figures("gap/", gap), "gap/empty": float(self._empty + (gap is None))}

    def _compare_fresh(self, rows: TensorDict, ours: torch.Tensor) -> Gap | None:
        return self.experiments.compare(ours, rows["logprobs"], self._fresh_mask(rows))

    def _fresh_mask(self, rows: TensorDict) -> torch.Tensor:
        from rl_trainers.gap.divergence import fresh_mask

        return fresh_mask(rows["versions"], self.engine.version)

    def _scores_evidence(
        self, rows: TensorDict, ours: torch.Tensor, theirs: torch.Tensor, before: torch.Tensor | None = None
    ) -> Evidence:
        """What the servers' scores of some rows say, with the trainer's log-probs now and before the last update."""
        find, mask = self.experiments, _scored(rows)
        gap = find.compare(ours, theirs, mask)
        if gap is None or gap.mean_abs <= self.config.warn:
            return Evidence(self.config.warn, score=gap, low_precision=self.low_precision)
        return Evidence(
            self.config.warn,
            score=gap,
            receipts=find.receipts(self._sent),
            score_older=None if before is None else find.compare(before, theirs, mask),
            score_temperature=find.temperature(rows, theirs, mask),
            low_precision=self.low_precision,
        )

    def _fresh_evidence(self, rows: TensorDict, ours: torch.Tensor, gap: Gap) -> Evidence:
        find, recorded, fresh = self.experiments, rows["logprobs"], self._fresh_mask(rows)
        theirs = find.scores(rows, self.inference.score)
        return replace(
            self._scores_evidence(rows, ours, theirs),
            fresh=gap,
            fresh_temperature=find.temperature(rows, recorded, fresh),
            # here "ours" are the servers' older weights, as far as they still have them
            fresh_older=find.against_scores(rows, recorded, self.inference.score_before, fresh),
            seen_prompt=find.probe(rows, new=False),
            new_prompt=find.probe(rows, new=True),
        )


class Alarm:
    """The history of one comparison: speaks at the 1st, 2nd, 4th, 8th, ... time in a row that it is off, and stops the
    run where it is off by too much or for too long."""

    def __init__(self, config: GapConfig, what: str) -> None:
        self.config, self.what = config, what
        self.in_row = 0
        self._rounding = False

    def note(self, gap: Gap) -> bool:
        """Count a comparison; whether something is to be said."""
        if gap.mean_abs <= self.config.warn:
            self.in_row, self._rounding = 0, False
            return False
        self.in_row += 1
        seldom = self.in_row & (self.in_row - 1) == 0
        return seldom or self._too_much(gap) or self._too_long

    def _too_much(self, gap: Gap) -> bool:
        return not gap.mean_abs <= self.config.stop  # nan is too much

    @property
    def _too_long(self) -> bool:
        return self.in_row >= self.config.patience and not self._rounding

    def speak(self, gap: Gap, version: int, causes: list[Cause]) -> None:
        """Warn.

        Raises:
            WeightUpdateError: instead, where the run must not go on.
        """
        self._rounding = [cause.name for cause in causes] == [DTYPE]
        config = self.config
        message = (
            f"servers and trainer disagree: {self.what} and the trainer's differ by {gap.mean_abs:.3g} nats on "
            f"average, {gap.max_abs:.3g} at most, over {gap.tokens} tokens at version {version} (warn above "
            f"{config.warn:g}, stop above {config.stop:g} or {config.patience} times in a row; this is time "
            f"{self.in_row}). Likely cause: {'; or '.join(map(str, causes))}."
        )
        if self._too_much(gap) or self._too_long:
            raise WeightUpdateError(message)
        log.warning(message)


def _choose(batch: TensorDict, count: int, version: int) -> TensorDict:
    """`count` rows (all, where there are fewer), those with fresh tokens first."""
    from rl_contracts.trajectory import select
    from rl_trainers.gap.divergence import fresh_mask

    fresh = fresh_mask(batch["versions"], version).any(-1)
    return select(batch, fresh.int().argsort(descending=True, stable=True)[:count])


def _scored(rows: TensorDict) -> torch.Tensor:
    """The tokens that both sides rate, bool [B, T]: nothing predicts a first one."""
    mask = rows["attention_mask"].clone()
    mask[:, 0] = False
    return mask


def _figures(prefix: str, gap: Gap | None) -> dict[str, float | None]:
    """`<prefix>mean_abs`, `<prefix>max_abs` and `<prefix>k3`, None without a gap."""
    values = (None, None, None) if gap is None else (gap.mean_abs, gap.max_abs, gap.k3)
    return {f"{prefix}{name}": value for name, value in zip(("mean_abs", "max_abs", "k3"), values, strict=True)}
