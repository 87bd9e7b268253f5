"""Comparison after the commit: the scores of one server, with the trainer's log-probs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rl_contracts.errors import RLError
from rl_contracts.runtime.logging import get_logger
from rl_trainers.weight_sync.gap.alarm import Alarm
from rl_trainers.weight_sync.gap.diagnosis import Evidence
from rl_trainers.weight_sync.gap.lag import LIMIT, LagTest
from rl_trainers.weight_sync.gap.measurements import Measurements, gap_metrics

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

    from rl_contracts.data import WeightReceipt
    from rl_trainers.weight_sync.gap.divergence import LogprobGap
    from rl_trainers.weight_sync.gap.experiments import Score

log = get_logger("trainers.gap")

CLOSER_TO_PREVIOUS = "closer to the log-probs before the update than to those after it"
IDENTICAL_TO_PREVIOUS = "bitwise identical to its scores before the update, which changed the trainer's log-probs"


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


class ScoreCheck:
    """Compares the scores of one server, each in turn, with the trainer's log-probs after a commit.

    Args:
        measurements: measurements on servers and trainer.
    """

    def __init__(self, measurements: Measurements) -> None:
        self._measurements = measurements
        self._alarms: dict[str, Alarm] = defaultdict(Alarm)
        """Alarm of each server."""
        self._missing_alarm, self._unchanged_alarm = Alarm(), Alarm(stops=False)
        self._lag_tests: dict[tuple[str, str], LagTest] = defaultdict(LagTest)
        """Test of each server against each of its references."""
        self._last_turns: dict[str, int] = {}
        self._has_warned_blind = False
        self._comparison: _Comparison | None = None
        self.receipts: tuple[WeightReceipt | None, WeightReceipt | None] = (None, None)
        """The trainer's receipts of this version and of the previous one."""

    def prepare(self, sequences: TensorDict, trainer_logprobs: torch.Tensor) -> None:
        """Choose the server whose turn it is, and collect the reference log-probs before the update (collective).

        There is no comparison if all sequences have images.

        Only servers that every data-parallel leader knows are candidates, because leaders discover a new server at
        different times. In float32 the trainer is a sufficient reference, so no server scores before the update.
        """
        measurements, experiments = self._measurements, self._measurements.experiments
        sequences, before = measurements.as_scored(sequences, trainer_logprobs)
        parallel = measurements.engine.parallel
        if not any(parallel.gather_json(len(sequences))):
            return
        main_servers, *rank_servers = parallel.gather_json(
            measurements.inference.servers if parallel.is_dp_leader else None
        )
        names = [
            name for name in main_servers if all(name in servers for servers in rank_servers if servers is not None)
        ]
        server, peer = [*sorted(names, key=lambda n: self._last_turns.get(n, -1)), "", ""][:2]
        self._last_turns[server] = 1 + max(self._last_turns.values(), default=0)
        needs_peer = measurements.low_precision and peer and measurements.scores_each_batch
        peer_before = experiments.attempt(experiments.scores, sequences, self._scorer(peer)) if needs_peer else None
        self._comparison = _Comparison(
            sequences, before, server, peer, peer_before, *self._self_reference(sequences, before, server)
        )

    def _self_reference(
        self, sequences: TensorDict, trainer_logprobs: torch.Tensor, server: str
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return a 16-bit server's own scores and the trainer's log-probs with the weights as they are served.

        Both are None unless the server is its own reference and repeats its scores bit for bit.
        """
        measurements, experiments = self._measurements, self._measurements.experiments
        if not server or not measurements.own_reference:
            return None, None
        served = self._as_served(sequences, trainer_logprobs)
        own = None if served is None else experiments.attempt(experiments.scores, sequences, self._scorer(server))
        repeated = None if own is None else experiments.attempt(experiments.scores, sequences, self._scorer(server))
        repeats = repeated is not None and not experiments.logprob_change(sequences, own, repeated).changed_fraction
        return (own, served) if repeats else (None, None)

    def _as_served(self, sequences: TensorDict, trainer_logprobs: torch.Tensor) -> torch.Tensor | None:
        measurements = self._measurements
        if measurements.trained == measurements.served:
            return trainer_logprobs
        return measurements.experiments.as_served(sequences)

    def compare(self, sent: WeightReceipt | None) -> tuple[dict[str, float | None], bool]:
        """Compare the server that `prepare` chose (collective).

        Args:
            sent: the trainer's receipt of the version.

        Returns:
            the metrics of `GapGate.after_commit`, and whether a comparison was due but could not be made.
        """
        comparison, self._comparison = self._comparison, None
        previous, self.receipts = self.receipts[0], (sent, self.receipts[0])
        if comparison is None:
            return {**gap_metrics("gap/", None), "gap/lag": None}, False
        unchanged = self._is_unchanged(sent, previous)
        experiments, sequences = self._measurements.experiments, comparison.sequences
        pending = experiments.ask_scores(sequences, self._scorer(comparison.server))
        trainer_logprobs = experiments.trainer_logprobs(sequences)  # overlaps with the server's computation
        server_logprobs, why = None, "the sequences have no token to compare"
        try:
            server_logprobs = experiments.scores(sequences, self._scorer(comparison.server), pending)
        except (RLError, TimeoutError) as error:
            why = str(error)
        gap, lag = experiments.compare(trainer_logprobs, server_logprobs, experiments.compared(sequences)), None
        if self._missing_alarm.count(gap is None):
            times = f"consecutive failures: {self._missing_alarm.in_row}, limit: {self._missing_alarm.patience}"
            self._missing_alarm.warn(
                f"{comparison.server or 'servers'} and trainer could not be compared ({times}): {why}"
            )
        if gap is not None and server_logprobs is not None:
            lag, how = self._measure_lag(comparison, trainer_logprobs, server_logprobs, unchanged)
            self._judge(comparison, gap, server_logprobs, lag, how)
        return {**gap_metrics("gap/", gap), "gap/lag": lag}, gap is None

    def _is_unchanged(self, sent: WeightReceipt | None, previous: WeightReceipt | None) -> bool:
        """Return whether the update left the served weights unchanged, and warn if so."""
        engine = self._measurements.engine
        unchanged = sent is not None and previous is not None and sent.checksums == previous.checksums != {}
        unchanged = engine.parallel.broadcast_json(unchanged)  # only rank 0's receipts are complete
        if self._unchanged_alarm.count(unchanged):
            log.warning(
                "the weights of version %d are bitwise identical to the previous version in %s: the update is too "
                "small for that dtype. A server that missed it cannot be detected.",
                engine.version,
                self._measurements.served,
            )
        return unchanged

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
        experiments, sequences, tests = self._measurements.experiments, comparison.sequences, self._lag_tests
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
        if self._measurements.trained == self._measurements.served:
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
        return tuple(self._measurements.engine.parallel.broadcast_json([z, how]))

    def _judge(
        self, comparison: _Comparison, gap: LogprobGap, server_logprobs: torch.Tensor, lag: float | None, how: str
    ) -> None:
        measurements, experiments = self._measurements, self._measurements.experiments
        subject, behind = f"the scores of {comparison.server}", lag is not None and lag > LIMIT
        if behind:
            subject += f", {how} (z={lag:.1f}),"
        receipts = experiments.receipts(*self.receipts, comparison.server) if measurements.low_precision else None
        evidence = Evidence(measurements.config.warn, measurements.low_precision, gap, behind=behind, receipts=receipts)
        if not (self._has_warned_blind or comparison.peer or receipts or measurements.trained == measurements.served):
            self._has_warned_blind = True
            log.warning(
                "%s has no reference: it serves %s without checksums, the trainer computes in %s, and there is no "
                "second server. A missed update shows only as a log-prob gap above gap.warn, or as bitwise identical "
                "scores.",
                comparison.server,
                measurements.served,
                measurements.trained,
            )

        def examine() -> Evidence:
            live = receipts or experiments.receipts(*self.receipts, comparison.server)
            return measurements.diagnose(
                evidence, comparison.sequences, server_logprobs, comparison.before, receipts=live
            )

        measurements.raise_alarms(self._alarms[comparison.server], subject, evidence, examine)

    def _scorer(self, server: str) -> Score:
        return partial(self._measurements.inference.score, server=server)
