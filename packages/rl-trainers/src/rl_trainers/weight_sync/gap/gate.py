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
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, ClassVar

from rl_contracts.config import Settings, bounded, require
from rl_contracts.errors import RLError, WeightUpdateError
from rl_contracts.runtime.logging import get_logger
from rl_trainers.weight_sync.gap.diagnosis import DTYPE, Evidence, diagnose
from rl_trainers.weight_sync.gap.divergence import LogprobGap, current_version_mask
from rl_trainers.weight_sync.gap.lag import LIMIT, LagTest

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

    from rl_contracts.batch.parallel import ParallelContext
    from rl_contracts.data import WeightReceipt
    from rl_contracts.engine import TrainEngine
    from rl_contracts.inference import InferenceEngine
    from rl_contracts.runtime.aio import LoopThread
    from rl_trainers.weight_sync.gap.experiments import Score
    from rl_trainers.weight_sync.memory_sharing import MemorySharing

log = get_logger("trainers.gap")

CLOSER_TO_PREVIOUS = "closer to the log-probs before the update than to those after it"
IDENTICAL_TO_PREVIOUS = "bitwise identical to its scores before the update, which changed the trainer's log-probs"
HALF_PRECISION = ("bfloat16", "float16")


@dataclass
class GapConfig(Settings):
    """Thresholds of the log-prob gap gate."""

    setting: ClassVar[str] = "gap"
    sequences: int = bounded(4, "0 (off) or more", lambda count: count >= 0)
    """Number of sequences to compare per batch, over all replicas. Each replica compares at least one. The sequences
    come from as many groups as possible; with fewer than 4 groups, it takes more steps to detect a server with old
    weights. 0 switches the gate off."""
    warn: float = bounded(0.02, "more than 0", lambda nats: nats > 0)
    """Mean absolute log-prob gap, in nats, above which a warning is logged. bfloat16 on either side causes 0.01 to
    0.05."""
    stop: float = 0.5
    """Mean absolute log-prob gap, in nats, above which the run stops at once; at least `warn`."""
    patience: int = bounded(5, "at least 1", lambda times: times >= 1)
    """Number of consecutive failed comparisons at which the run stops, counted for each server and for recorded
    log-probs. Comparisons that cannot be made have a separate count with the same limit. Gaps that rounding to 16 bits
    explains do not count."""
    regenerate_every: int = bounded(20, "0 (never) or more steps", lambda steps: steps >= 0)
    """Number of consecutive steps without tokens of the current version, after which the gate requests new completions
    from the servers. These use the prompts of the compared sequences and have at most 16 tokens. 0: never. Batches of
    asynchronous runs seldom contain tokens of the current version."""
    timeout: float = bounded(60.0, "more than 0 seconds", lambda seconds: seconds > 0)
    """Seconds to wait for the servers to score the sequences or to generate completions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.stop >= self.warn, "gap.stop", f"at least gap.warn ({self.warn})", self.stop)


@dataclass
class _Comparison:
    """Data for the comparison after the commit."""

    sequences: TensorDict
    """Sequences to score, at a temperature that the servers can score."""
    before: torch.Tensor
    """The trainer's log-probs before the update, [B, T]."""
    server: str
    """Server to compare in this step, or empty without a live server."""
    peer: str
    """Server that will be compared next, or empty."""
    peer_before: torch.Tensor | None
    """The peer's scores before the update, [B, T], or None if the peer is not used as a reference."""
    own_before: torch.Tensor | None
    """The server's scores before the update, [B, T], or None if the server is not used as its own reference."""
    served_before: torch.Tensor | None
    """The trainer's log-probs before the update with the weights as they were served, [B, T]; None if `own_before` is.
    """


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
    ) -> None:
        from rl_trainers.weight_sync.gap.experiments import Experiments

        self.engine, self.inference, self.config, self.trained, self.served = engine, inference, config, trained, served
        self.low_precision = {trained, served} != {"float32"}
        self.experiments = Experiments(engine, inference, loop, config.timeout)
        self.sharing, self._scores_each_batch = sharing, True
        self._recorded_alarm, self._missing_alarm, self._unchanged_alarm = (
            Alarm(config.patience),
            Alarm(config.patience),
            Alarm(math.inf),
        )
        self._score_alarms: dict[str, Alarm] = defaultdict(lambda: Alarm(config.patience))
        self._lag_tests: dict[tuple[str, str], LagTest] = defaultdict(LagTest)
        self._last_turns: dict[str, int] = {}
        self._steps_without_current = self._missing_recorded = 0
        self._has_warned_blind = False
        self._receipts: tuple[WeightReceipt | None, WeightReceipt | None] = (None, None)
        self._comparison: _Comparison | None = None

    @property
    def _own_reference(self) -> bool:
        """True if 16-bit servers are compared with themselves, because they have no checksums of live tensors."""
        can = self.inference.capabilities
        return self.served in HALF_PRECISION and not (can.checksums and can.live_checksums)

    def scores_before_update(self) -> bool:
        """Return whether `before_update` requests scores for each batch, so that servers must be awake (collective).

        True in 16 bits if servers are compared with each other or with themselves. Otherwise `before_update` wakes
        sleeping servers only when they are needed.
        """
        needs_scores = self.low_precision and (self._own_reference or len(self.inference.servers) > 1)
        self._scores_each_batch = bool(self.config.sequences) and bool(
            self.engine.parallel.broadcast_json(needs_scores)
        )
        return self._scores_each_batch

    def _with_servers_awake(self) -> AbstractContextManager[None]:
        return nullcontext() if self._scores_each_batch or self.sharing is None else self.sharing.servers_awake()

    def before_update(self, batch: TensorDict) -> dict[str, float | None]:
        """Compare the recorded log-probs of tokens of the current version with the trainer's (collective).

        Also choose the sequences and the server of this step. A token is of the current version if it and all
        generated tokens before it carry the trainer's version. After `regenerate_every` steps without such tokens, the
        servers generate new completions for the sequences' prompts.

        Args:
            batch: this rank's sequences, from which the trainer is about to learn.

        Returns:
            `gap/fresh_mean_abs`, `gap/fresh_max_abs` and `gap/fresh_k3`, None without tokens of the current version,
            and `gap/fresh_tokens`.

        Raises:
            WeightUpdateError: the gap is above `stop`, or the comparison failed `patience` consecutive times. The
                message names the likely cause.
        """
        if not self.config.sequences:
            return _gap_metrics("gap/fresh_", None)
        experiments = self.experiments
        sequences = _sample_sequences(batch, self.config.sequences, self.engine.version, self.engine.parallel)
        trainer_logprobs = experiments.trainer_logprobs(sequences)
        self._comparison = self._prepare(sequences, trainer_logprobs)
        gap = experiments.compare(trainer_logprobs, sequences["logprobs"], self._current_mask(sequences))
        self._steps_without_current = 0 if gap is not None else self._steps_without_current + 1
        if self.config.regenerate_every and self._steps_without_current >= self.config.regenerate_every:
            self._steps_without_current = 0
            with self._with_servers_awake():
                regenerated = experiments.attempt(experiments.regenerate, sequences)
            if regenerated is not None:
                sequences, trainer_logprobs = regenerated, experiments.trainer_logprobs(regenerated)
                gap = experiments.compare(trainer_logprobs, sequences["logprobs"], self._current_mask(sequences))
        self._missing_recorded = int(gap is None)
        if gap is not None:
            subject = "the recorded log-probs of tokens of the current version"
            evidence = Evidence(self.config.warn, self.low_precision, gap, recorded=True)

            def examine() -> Evidence:
                with self._with_servers_awake():
                    return self._diagnose_recorded(evidence, sequences, trainer_logprobs)

            self._raise_alarms(self._recorded_alarm, subject, evidence, examine)
        return {**_gap_metrics("gap/fresh_", gap), "gap/fresh_tokens": float(gap.tokens) if gap else 0.0}

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
            WeightUpdateError: the gap is above `stop`, or `patience` consecutive comparisons failed or could not be
                made. The message names the likely cause.
        """
        comparison, self._comparison = self._comparison, None
        previous, self._receipts = self._receipts[0], (sent, self._receipts[0])
        if comparison is None:
            return {**_gap_metrics("gap/", None), "gap/lag": None, "gap/empty": 0.0}
        unchanged = sent is not None and previous is not None and sent.checksums == previous.checksums != {}
        unchanged = self.engine.parallel.broadcast_json(unchanged)  # only rank 0's receipts are complete
        if self._unchanged_alarm.count(unchanged):
            log.warning(
                "the weights of version %d are bitwise identical to the previous version in %s: the update is too "
                "small for that dtype. A server that missed it cannot be detected.",
                self.engine.version,
                self.served,
            )
        experiments = self.experiments
        mask = experiments.compared(comparison.sequences)
        pending = experiments.ask_scores(comparison.sequences, self._scorer(comparison.server))
        trainer_logprobs = experiments.trainer_logprobs(comparison.sequences)  # overlaps with the server's computation
        server_logprobs, why = None, "the sequences have no token to compare"
        try:
            server_logprobs = experiments.scores(comparison.sequences, self._scorer(comparison.server), pending)
        except (RLError, TimeoutError) as error:
            why = str(error)
        gap, lag = experiments.compare(trainer_logprobs, server_logprobs, mask), None
        if self._missing_alarm.count(gap is None):
            times = f"consecutive failures: {self._missing_alarm.in_row}, gap.patience={self.config.patience}"
            self._missing_alarm.warn(
                f"{comparison.server or 'servers'} and trainer could not be compared ({times}): {why}"
            )
        if gap is not None and server_logprobs is not None:
            lag, how = self._measure_lag(comparison, trainer_logprobs, server_logprobs, unchanged)
            self._judge_scores(comparison, gap, server_logprobs, lag, how)
        return {
            **_gap_metrics("gap/", gap),
            "gap/lag": lag,
            "gap/empty": float(self._missing_recorded + (gap is None)),
        }

    def _prepare(self, sequences: TensorDict, before: torch.Tensor) -> _Comparison:
        """Choose the server whose turn it is, and collect the reference log-probs before the update.

        Only servers that every data-parallel leader knows are candidates, because leaders discover a new server at
        different times. In float32 the trainer is a sufficient reference, so no server scores before the update.
        """
        experiments = self.experiments
        sequences, before = self._as_scored(sequences, before)
        parallel = self.engine.parallel
        main_servers, *rank_servers = parallel.gather_json(self.inference.servers if parallel.is_dp_leader else None)
        names = [
            name for name in main_servers if all(name in servers for servers in rank_servers if servers is not None)
        ]
        server, peer = [*sorted(names, key=lambda n: self._last_turns.get(n, -1)), "", ""][:2]
        self._last_turns[server] = 1 + max(self._last_turns.values(), default=0)
        needs_peer = self.low_precision and peer and self._scores_each_batch
        peer_before = experiments.attempt(experiments.scores, sequences, self._scorer(peer)) if needs_peer else None
        return _Comparison(
            sequences, before, server, peer, peer_before, *self._self_reference(sequences, before, server)
        )

    def _self_reference(
        self, sequences: TensorDict, trainer_logprobs: torch.Tensor, server: str
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return a 16-bit server's own scores and the trainer's log-probs with the weights as they are served.

        Both are None unless the server is its own reference and repeats its scores bit for bit.
        """
        experiments = self.experiments
        if not server or not self._own_reference:
            return None, None
        served = self._as_served(sequences, trainer_logprobs)
        own = None if served is None else experiments.attempt(experiments.scores, sequences, self._scorer(server))
        repeated = None if own is None else experiments.attempt(experiments.scores, sequences, self._scorer(server))
        repeats = repeated is not None and not experiments.logprob_change(sequences, own, repeated).changed_fraction
        return (own, served) if repeats else (None, None)

    def _as_served(self, sequences: TensorDict, trainer_logprobs: torch.Tensor) -> torch.Tensor | None:
        return trainer_logprobs if self.trained == self.served else self.experiments.as_served(sequences)

    def _measure_lag(
        self,
        comparison: _Comparison,
        trainer_logprobs: torch.Tensor,
        server_logprobs: torch.Tensor,
        weights_unchanged: bool,
    ) -> tuple[float | None, str]:
        """Test whether the server still serves the previous version; return the largest z, and its reason as text.

        Each available reference is tested: the server itself, the trainer if it computes in the servers' dtype, and
        the peer.

        Args:
            comparison: the data from before the update.
            trainer_logprobs: the trainer's log-probs after the update, [B, T].
            server_logprobs: the server's scores after the commit, [B, T].
            weights_unchanged: whether the update left the served weights unchanged.
        """
        experiments, sequences, tests = self.experiments, comparison.sequences, self._lag_tests
        peer_after = (
            None
            if comparison.peer_before is None
            else experiments.attempt(experiments.scores, sequences, self._scorer(comparison.peer))
        )
        results: list[tuple[float | None, str]] = []
        if comparison.own_before is not None and not weights_unchanged:
            change = experiments.logprob_change(
                sequences, comparison.served_before, self._as_served(sequences, trainer_logprobs)
            )
            unchanged = (
                change.is_clear
                and not experiments.logprob_change(sequences, comparison.own_before, server_logprobs).changed_fraction
            )
            results.append((tests[comparison.server, "itself"].add_self_comparison(unchanged), IDENTICAL_TO_PREVIOUS))
        if self.trained == self.served:
            results.append(
                (
                    tests[comparison.server, "trainer"].add(
                        experiments.lag_statistics(sequences, server_logprobs, trainer_logprobs, comparison.before)
                    ),
                    CLOSER_TO_PREVIOUS,
                )
            )
        if peer_after is not None and comparison.peer_before is not None:
            results.append(
                (
                    tests[comparison.server, "peer"].add(
                        experiments.lag_statistics(sequences, server_logprobs, peer_after, comparison.peer_before)
                    ),
                    CLOSER_TO_PREVIOUS,
                )
            )
        informative = [(z, how) for z, how in results if z is not None]
        z, how = max(informative, key=lambda result: result[0], default=(None, ""))
        return tuple(self.engine.parallel.broadcast_json([z, how]))

    def _judge_scores(
        self, comparison: _Comparison, gap: LogprobGap, server_logprobs: torch.Tensor, lag: float | None, how: str
    ) -> None:
        experiments, subject, behind = (
            self.experiments,
            f"the scores of {comparison.server}",
            lag is not None and lag > LIMIT,
        )
        if behind:
            subject += f", {how} (z={lag:.1f}),"
        receipts = experiments.receipts(*self._receipts, comparison.server) if self.low_precision else None
        evidence = Evidence(self.config.warn, self.low_precision, gap, behind=behind, receipts=receipts)
        if not (self._has_warned_blind or comparison.peer or receipts or self.trained == self.served):
            self._has_warned_blind = True
            log.warning(
                "%s has no reference: it serves %s without checksums, the trainer computes in %s, and there is no "
                "second server. A missed update shows only as a log-prob gap above gap.warn, or as bitwise identical "
                "scores.",
                comparison.server,
                self.served,
                self.trained,
            )

        def examine() -> Evidence:
            live = receipts or experiments.receipts(*self._receipts, comparison.server)
            return self._diagnose(evidence, comparison.sequences, server_logprobs, comparison.before, receipts=live)

        self._raise_alarms(self._score_alarms[comparison.server], subject, evidence, examine)

    def _raise_alarms(self, alarm: Alarm, subject: str, evidence: Evidence, examine: Callable[[], Evidence]) -> None:
        """Count a comparison. If it must be reported, gather more evidence with `examine` and name the likely cause."""
        gap, config = evidence.gap, self.config
        too_much = not gap.mean_abs <= config.stop  # nan is too much
        if alarm.count(diagnose(evidence) is not None, too_much, certain=evidence.certain):
            name, why = diagnose(examine()) or ("unknown", "a repeated measurement shows no gap")
            alarm.warn(
                f"servers and trainer disagree: {subject} differ from the trainer's by {gap.mean_abs:.3g} nats on "
                f"average (max {gap.max_abs:.3g}) over {gap.tokens} tokens at version {self.engine.version}; "
                f"consecutive failures: {alarm.in_row} (gap.warn={config.warn:g}, gap.stop={config.stop:g}, "
                f"gap.patience={config.patience}). Likely cause: {name}: {why}.",
                excused=name == DTYPE,
            )

    def _diagnose(
        self,
        evidence: Evidence,
        sequences: TensorDict,
        server_logprobs: torch.Tensor,
        before: torch.Tensor | None,
        **more: Any,
    ) -> Evidence:
        """Return the evidence with the results of experiments added."""
        experiments = self.experiments
        mask = self._current_mask(sequences) if evidence.recorded else experiments.compared(sequences)
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

    def _diagnose_recorded(self, evidence: Evidence, sequences: TensorDict, trainer_logprobs: torch.Tensor) -> Evidence:
        """Return the evidence for a gap of recorded log-probs.

        Scores are examined first, because wrong scores imply wrong recorded log-probs.
        """
        experiments = self.experiments
        scored, trainer_logprobs = self._as_scored(sequences, trainer_logprobs)
        server_logprobs = experiments.attempt(experiments.scores, scored, self.inference.score)
        gap = experiments.compare(trainer_logprobs, server_logprobs, experiments.compared(scored))
        if server_logprobs is not None and gap is not None and not gap.mean_abs <= self.config.warn:
            receipts = experiments.receipts(*self._receipts)
            return self._diagnose(
                replace(evidence, gap=gap, recorded=False), scored, server_logprobs, None, receipts=receipts
            )
        before = experiments.attempt(experiments.scores, sequences, self.inference.score_previous_weights)
        prompts = {
            "seen_prompt": experiments.gap_of_regenerated(sequences, False),
            "new_prompt": experiments.gap_of_regenerated(sequences, True),
        }
        return self._diagnose(evidence, sequences, sequences["logprobs"], before, **prompts)

    def _as_scored(self, sequences: TensorDict, trainer_logprobs: torch.Tensor) -> tuple[TensorDict, torch.Tensor]:
        """Return the sequences and the trainer's log-probs at a temperature that the servers can score (collective)."""
        if self.inference.capabilities.any_score_temperature:
            return sequences, trainer_logprobs
        sequences = sequences.clone().update({"temperature": sequences["temperature"].new_ones(sequences.batch_size)})
        return sequences, self.experiments.trainer_logprobs(sequences)

    def _current_mask(self, sequences: TensorDict) -> torch.Tensor:
        return current_version_mask(sequences["versions"], self.engine.version)

    def _scorer(self, server: str) -> Score:
        return partial(self.inference.score, server=server)


class Alarm:
    """Counter of the consecutive failures of one comparison, such as of the scores of one server.

    The alarm reports the 1st, 2nd, 4th, 8th, ... consecutive failure. It stops the run if a gap is too large, or after
    `patience` consecutive failures.
    """

    def __init__(self, patience: float) -> None:
        self.patience, self.in_row = patience, 0
        self._too_much = self._excused = False

    def count(self, off: bool, too_much: bool = False, certain: bool = False) -> bool:
        """Count a comparison and return whether to report it.

        Args:
            off: whether the comparison failed.
            too_much: whether the gap is too large to continue the run.
            certain: whether the failure proves a fault. After an excused failure, it sets the count to 1.
        """
        if not off or (certain and self._excused):
            self.in_row, self._excused = 0, False
        self.in_row, self._too_much = self.in_row + off, too_much
        return (off and self.in_row & (self.in_row - 1) == 0) or self._stops

    @property
    def _stops(self) -> bool:
        return self._too_much or (self.in_row >= self.patience and not self._excused)

    def warn(self, message: str, excused: bool = False) -> None:
        """Log a warning, or stop the run.

        Args:
            message: the text of the warning or error.
            excused: whether the cause, such as rounding, is not a fault. `patience` does not apply to excused
                failures, and the first failure after them sets the count to 1.

        Raises:
            WeightUpdateError: the gap is too large, or `patience` consecutive comparisons failed.
        """
        if self._excused and not excused:
            self.in_row = 1
        self._excused = excused
        if self._stops:
            raise WeightUpdateError(message)
        log.warning(message)


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


def _gap_metrics(prefix: str, gap: LogprobGap | None) -> dict[str, float | None]:
    """Return `<prefix>mean_abs`, `<prefix>max_abs` and `<prefix>k3`, with None values without a gap."""
    return {prefix + name: None if gap is None else getattr(gap, name) for name in ("mean_abs", "max_abs", "k3")}
