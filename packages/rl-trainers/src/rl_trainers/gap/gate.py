"""The gap gate: do servers and trainer compute the same log-probs from the weights that both should hold?

Two comparisons. After a commit the servers score a few rows of the last batch at the new version. And of the batch
itself, tokens whose whole prefix carries the trainer's version (`rl_trainers.fresh`) must have been recorded with the
log-probs that the trainer gives them. The first finds what is wrong with the weights or with what is computed from
them, the second also what is wrong with sampling, caches and stamps.

Where a comparison is off, experiments look for the cause and the warning or error names it.
"""

from __future__ import annotations

from dataclasses import dataclass
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

FRESH_MEAN = "gap/fresh_mean_abs"
"""Name of the mean difference over fresh tokens, as the actor gives it."""


@dataclass
class GapConfig:
    """When servers and trainer are said to disagree."""

    rows: int = 2
    """Rows of the batch that each replica compares after a commit; 0 switches the gate off."""
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
    """Compares after each commit, and looks closer where something is off.

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
        self._kept: tuple[TensorDict, torch.Tensor] | None = None
        self._without_fresh = 0

    def check(
        self,
        batch: TensorDict,
        fresh: dict[str, float | None] | None = None,
        sent: WeightReceipt | None = None,
    ) -> dict[str, float | None]:
        """After a commit (collective).

        Args:
            batch: the batch that was learned from.
            fresh: what the actor found on its fresh tokens, `gap/fresh_mean_abs` among others.
            sent: the trainer's receipt of the version.

        Returns:
            `gap/mean_abs`, `gap/max_abs`, `gap/k3` over the compared tokens of all replicas, None without any;
            `gap/answers_mean_abs` where the servers answered for the gate; and `gap/empty`, the comparisons that found
            no token.

        Raises:
            WeightUpdateError: the scores are off by more than `stop`, or for too long; names the cause.
        """
        if not self.config.rows:
            names = ("gap/mean_abs", "gap/max_abs", "gap/k3", "gap/answers_mean_abs")
            return {**dict.fromkeys(names), "gap/empty": 0.0}
        from rl_contracts.trajectory import select

        rows = select(batch, list(range(min(self.config.rows, batch.batch_size[0]))))
        mask = rows["attention_mask"].clone()
        mask[:, 0] = False  # nothing predicts a first token
        ours, theirs = self.experiments.ours(rows), self.experiments.scores(rows, self.inference.score)
        gap = self.experiments.compare(ours, theirs, mask)
        kept, self._kept = self._kept, (rows, ours)
        result: dict[str, float | None] = {
            "gap/mean_abs": None if gap is None else gap.mean_abs,
            "gap/max_abs": None if gap is None else gap.max_abs,
            "gap/k3": None if gap is None else gap.k3,
        }
        if gap is not None and self._scores.note(gap.mean_abs):
            causes = self._explain_scores(gap, rows, theirs, mask, kept, sent)
            self._scores.speak(gap, self.engine.version, causes)
        compared = FRESH_MEAN in (fresh or {})
        recorded = (fresh or {}).get(FRESH_MEAN)
        result["gap/answers_mean_abs"] = self._note_fresh(rows, recorded) if compared else None
        return result | {"gap/empty": float(gap is None) + float(compared and recorded is None)}

    def _note_fresh(self, rows: TensorDict, recorded: float | None) -> float | None:
        """Count what the actor found. Where it long had nothing to compare, ask for answers; their mean difference."""
        if recorded is not None:
            self._without_fresh = 0
            if self._fresh.note(recorded):
                log.warning("recorded log-probs are %.3g nats off; the next batch is examined first", recorded)
            return None
        self._without_fresh += 1
        if not self.config.answer_every or self._without_fresh < self.config.answer_every:
            return None
        self._without_fresh = 0
        found = self._answered(rows)
        if found is None:
            return None
        gap, answers = found
        if self._fresh.note(gap.mean_abs):
            self._fresh.speak(gap, self.engine.version, self._explain_fresh(gap, answers))
        return gap.mean_abs

    def _answered(self, rows: TensorDict) -> tuple[Gap, TensorDict] | None:
        """Fresh answers to the rows' prompts, and their gap."""
        answers = self.experiments.answers(rows)
        gap = None if answers is None else self._gap_of_fresh(answers)
        return None if answers is None or gap is None else (gap, answers)

    def _gap_of_fresh(self, rows: TensorDict) -> Gap | None:
        return self.experiments.compare(self.experiments.ours(rows), rows["logprobs"], rows["fresh"])

    def examine(self, batch: TensorDict) -> None:
        """Before an update (collective): where the fresh tokens of a batch before were off, find out why on those of
        this one, with the weights that they say they came from; where it has none, on answers made for it. Else this
        does nothing.

        Args:
            batch: prepared by the actor.

        Raises:
            WeightUpdateError: they are off by more than `stop`, or for too long; names the cause.
        """
        if not self._fresh.pending:
            return
        from rl_contracts.trajectory import select

        ours = self.experiments.ours(batch)
        gap = self.experiments.compare(ours, batch["logprobs"], batch["fresh"])
        if gap is not None:
            worst = ((ours - batch["logprobs"]).abs() * batch["fresh"]).sum(-1).argsort(descending=True, stable=True)
            rows = select(batch, worst[: self.config.rows])
        else:
            found = self._answered(select(batch, list(range(min(self.config.rows, batch.batch_size[0])))))
            if found is None:
                return
            gap, rows = found
        self._fresh.speak(gap, self.engine.version, self._explain_fresh(gap, rows))

    def _explain_scores(
        self,
        gap: Gap,
        rows: TensorDict,
        theirs: torch.Tensor,
        mask: torch.Tensor,
        kept: tuple[TensorDict, torch.Tensor] | None,
        sent: WeightReceipt | None,
    ) -> list[Cause]:
        find, older = self.experiments, None
        if kept is not None:
            before, at_version_before = kept
            valid = before["attention_mask"].clone()
            valid[:, 0] = False
            older = find.against_scores(before, at_version_before, self.inference.score, valid)
        return diagnose(
            Evidence(
                self.config.warn,
                score=gap,
                receipts=find.receipts(sent),
                score_older=older,
                score_temperature=find.temperature(rows, theirs, mask),
                low_precision=self.low_precision,
            )
        )

    def _explain_fresh(self, gap: Gap, rows: TensorDict) -> list[Cause]:
        find, recorded, fresh = self.experiments, rows["logprobs"], rows["fresh"]
        return diagnose(
            Evidence(
                self.config.warn,
                fresh=gap,
                fresh_temperature=find.temperature(rows, recorded, fresh),
                # here "ours" are the servers' older weights, as far as they still have them
                fresh_older=find.against_scores(rows, recorded, self.inference.score_before, fresh),
                seen_prompt=find.probe(rows, new=False),
                new_prompt=find.probe(rows, new=True),
                low_precision=self.low_precision,
            )
        )


class Alarm:
    """The history of one comparison: speaks at the 1st, 2nd, 4th, 8th, ... time in a row that it is off, and stops the
    run where it is off by too much or for too long."""

    def __init__(self, config: GapConfig, what: str) -> None:
        self.config, self.what = config, what
        self.in_row = 0
        self.mean: float = 0.0
        self.pending = False
        self._rounding = False

    def note(self, mean: float) -> bool:
        """Count a comparison; whether something is to be said, until `speak`."""
        self.mean = mean
        if mean <= self.config.warn:
            self.in_row, self._rounding, self.pending = 0, False, False
            return False
        self.in_row += 1
        seldom = self.in_row & (self.in_row - 1) == 0
        self.pending = self.pending or seldom or self._too_much or self._too_long
        return self.pending

    @property
    def _too_much(self) -> bool:
        return not self.mean <= self.config.stop  # nan is too much

    @property
    def _too_long(self) -> bool:
        return self.in_row >= self.config.patience and not self._rounding

    def speak(self, gap: Gap, version: int, causes: list[Cause]) -> None:
        """Warn.

        Args:
            gap: what was examined.

        Raises:
            WeightUpdateError: instead, where the run must not go on.
        """
        self.pending = False
        self._rounding = [cause.name for cause in causes] == [DTYPE]
        said = "; or ".join(map(str, causes)) or "not found, what was examined now agrees"
        config = self.config
        message = (
            f"servers and trainer disagree: {self.what} and the trainer's differ by {self.mean:.3g} nats on average. "
            f"Examined at version {version}: {gap.mean_abs:.3g} on average, {gap.max_abs:.3g} at most, over "
            f"{gap.tokens} tokens (warn above {config.warn:g}, stop above {config.stop:g} or {config.patience} times "
            f"in a row; this is time {self.in_row}). Likely cause: {said}."
        )
        if self._too_much or self._too_long:
            raise WeightUpdateError(message)
        log.warning(message)
