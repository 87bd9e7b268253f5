"""The gap gate: do servers and trainer compute the same log-probs from the weights that both should hold?

Two comparisons over a few rows of each batch. Before the update, tokens whose whole prefix carries the trainer's
version must have been recorded with the log-probs that the trainer gives them. After the commit, one server, each in
turn, scores the same rows: its scores must be the trainer's, and nearer to those after the update than to those before
it; servers in 16 bits are therefore asked before the update as well. The second comparison finds what is wrong with the
weights or with what is computed from them, the first also what is wrong with sampling, caches and stamps. Servers that
score at temperature 1 alone are compared there.

Where a comparison is off, experiments look for the cause and the warning or error names it.
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

NEARER = "nearer to those before the update than to those after it"
SAME = "to the last bit its own before the update, which changed the trainer's"
HALF = ("bfloat16", "float16")


@dataclass
class GapConfig(Settings):
    """When servers and trainer are said to disagree."""

    setting: ClassVar[str] = "gap"
    rows: int = bounded(4, "0 (off) or more", lambda count: count >= 0)
    """Rows of each batch that are compared, over all replicas together (each takes at least one), from as many groups
    as there are; 0 switches the gate off. Fewer than 4 groups make it slow to name a server that is behind."""
    warn: float = bounded(0.02, "more than 0", lambda nats: nats > 0)
    """Mean absolute difference, in nats, above which a warning is logged. bfloat16 on either side makes 0.01 to 0.05.
    """
    stop: float = 0.5
    """Mean absolute difference, in nats, above which the run stops at once; at least `warn`."""
    patience: int = bounded(5, "at least 1", lambda times: times >= 1)
    """Comparisons in a row (looks at the same server) that are off, or could not be made, at which the run stops as
    well, unless rounding to 16 bits explains them."""
    answer_every: int = bounded(20, "0 (never) or more steps", lambda steps: steps >= 0)
    """Steps in a row without a fresh token after which the servers answer the rows' prompts again (at most 16 tokens
    each), so that there are some; 0: never. Asynchronous runs seldom have fresh tokens of their own."""
    timeout: float = bounded(60.0, "more than 0 seconds", lambda seconds: seconds > 0)
    """Seconds for the servers to score or answer the rows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.stop >= self.warn, "gap.stop", f"at least gap.warn ({self.warn})", self.stop)


@dataclass
class _Comparison:
    """What is compared after the commit."""

    rows: TensorDict
    """As the servers can score them."""
    before: torch.Tensor
    """The trainer's log-probs before the update, [B, T]."""
    server: str
    """The server whose turn it is; empty without a live one."""
    peer: str
    """The one that comes after it."""
    peer_before: torch.Tensor | None
    """Its scores before the update, [B, T], where they are a reference."""
    own_before: torch.Tensor | None
    """The server's own, [B, T], where it repeats them to the last bit when it is asked again."""
    served_before: torch.Tensor | None
    """The trainer's log-probs before the update with the weights as they were served, [B, T]; with `own_before`."""


class GapGate:
    """Measures before an update and after its commit, and looks closer where something is off. All ranks make the same
    calls.

    Args:
        engine: the trainer.
        inference: client of the servers; the head of each replica uses it.
        loop: runs the client's coroutines.
        config: thresholds.
        trained, served: names of the dtypes in which the trainer and the servers compute.
        sharing: wakes servers that sleep while the trainer learns, where they are asked nevertheless; None: none does.
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
        self.sharing, self._asks = sharing, True
        self._fresh, self._missing, self._unchanged = Alarm(config.patience), Alarm(config.patience), Alarm(math.inf)
        self._scores: dict[str, Alarm] = defaultdict(lambda: Alarm(config.patience))
        self._lag: dict[tuple[str, str], LagTest] = defaultdict(LagTest)
        self._turns: dict[str, int] = {}
        self._without_fresh = self._empty = 0
        self._told_blind = False
        self._receipts: tuple[WeightReceipt | None, WeightReceipt | None] = (None, None)
        self._look: _Comparison | None = None

    @property
    def _own_reference(self) -> bool:
        """Whether a server in 16 bits is compared with itself, because nothing else tells that it is behind."""
        can = self.inference.capabilities
        return self.served in HALF and not (can.checksums and can.live_checksums)

    def scores_before_update(self) -> bool:
        """Whether `before_update` asks about each batch, of servers that are awake (collective): in 16 bits, where they
        are compared with each other or with themselves. Else it wakes those that sleep when it has to ask."""
        asks = self.low_precision and (self._own_reference or len(self.inference.servers) > 1)
        self._asks = bool(self.config.rows) and bool(self.engine.parallel.broadcast_json(asks))
        return self._asks

    def _with_servers_awake(self) -> AbstractContextManager[None]:
        return nullcontext() if self._asks or self.sharing is None else self.sharing.servers_awake()

    def before_update(self, batch: TensorDict) -> dict[str, float | None]:
        """Choose the rows and the server of this step, and compare the log-probs that were recorded for the rows' fresh
        tokens with the trainer's (collective). Fresh are those whose whole prefix carries the trainer's version; where
        there were none for `answer_every` steps, the servers answer the rows' prompts again.

        Args:
            batch: this rank's rows, from which the trainer is about to learn.

        Returns:
            `gap/fresh_mean_abs`, `gap/fresh_max_abs`, `gap/fresh_k3`, None without a fresh token; and
            `gap/fresh_tokens`.

        Raises:
            WeightUpdateError: they are off by more than `stop`, or for too long; names the cause.
        """
        if not self.config.rows:
            return _gap_metrics("gap/fresh_", None)
        find = self.experiments
        rows = _sample_sequences(batch, self.config.rows, self.engine.version, self.engine.parallel)
        ours = find.trainer_logprobs(rows)
        self._look = self._prepare(rows, ours)
        gap = find.compare(ours, rows["logprobs"], self._is_current_version(rows))
        self._without_fresh = 0 if gap is not None else self._without_fresh + 1
        if self.config.answer_every and self._without_fresh >= self.config.answer_every:
            self._without_fresh = 0
            with self._with_servers_awake():
                answers = find.attempt(find.regenerate, rows)
            if answers is not None:
                rows, ours = answers, find.trainer_logprobs(answers)
                gap = find.compare(ours, rows["logprobs"], self._is_current_version(rows))
        self._empty = int(gap is None)
        if gap is not None:
            what = "the recorded log-probs of tokens that the trainer's version made"
            evidence = Evidence(self.config.warn, self.low_precision, gap, recorded=True)

            def examine() -> Evidence:
                with self._with_servers_awake():
                    return self._diagnose_recorded(evidence, rows, ours)

            self._raise_alarms(self._fresh, what, evidence, examine)
        return {**_gap_metrics("gap/fresh_", gap), "gap/fresh_tokens": float(gap.tokens) if gap else 0.0}

    def after_commit(self, sent: WeightReceipt | None = None) -> dict[str, float | None]:
        """Compare a server's scores of the same rows, at the version that was just committed, with the trainer's
        log-probs (collective).

        Args:
            sent: the trainer's receipt of the version.

        Returns:
            `gap/mean_abs`, `gap/max_abs`, `gap/k3` over the generated tokens of the rows of all replicas, None where
            the comparison could not be made; `gap/lag`, the evidence that the server is behind (`lag.LagTest`), None
            where there is none yet; and `gap/empty`, the comparisons of this step that were not made.

        Raises:
            WeightUpdateError: the server's scores are off by more than `stop`, or they are off, or could not be
                compared, for too long; names the cause.
        """
        look, self._look = self._look, None
        before, self._receipts = self._receipts[0], (sent, self._receipts[0])
        if look is None:
            return {**_gap_metrics("gap/", None), "gap/lag": None, "gap/empty": 0.0}
        same = sent is not None and before is not None and sent.checksums == before.checksums != {}
        same = self.engine.parallel.broadcast_json(same)  # rank 0's receipts are whole
        if self._unchanged.count(same):
            log.warning(
                "version %d is the one before to the last bit, as it is served in %s, which cannot resolve so small an "
                "update. A server that misses it cannot be told from one that does not.",
                self.engine.version,
                self.served,
            )
        find = self.experiments
        mask = find.compared(look.rows)
        asked = find.ask_scores(look.rows, self._scorer(look.server))
        ours = find.trainer_logprobs(look.rows)  # while the server computes its own
        theirs, why = None, "the rows have no token to compare"
        try:
            theirs = find.scores(look.rows, self._scorer(look.server), asked)
        except (RLError, TimeoutError) as error:
            why = str(error)
        gap, lag = find.compare(ours, theirs, mask), None
        if self._missing.count(gap is None):
            times = f"{self._missing.in_row} times in a row, the run stops at {self.config.patience}"
            self._missing.warn(f"{look.server or 'servers'} and trainer could not be compared ({times}): {why}")
        if gap is not None and theirs is not None:
            lag, how = self._lag_of(look, ours, theirs, same)
            self._judge_scores(look, gap, theirs, lag, how)
        return {**_gap_metrics("gap/", gap), "gap/lag": lag, "gap/empty": float(self._empty + (gap is None))}

    def _prepare(self, rows: TensorDict, before: torch.Tensor) -> _Comparison:
        """With the server whose turn it is, of those that every head knows (one that joins is known to some of them
        first). In float32 the trainer is reference enough."""
        find = self.experiments
        rows, before = self._as_scored(rows, before)
        parallel = self.engine.parallel
        first, *others = parallel.gather_json(self.inference.servers if parallel.is_dp_leader else None)
        names = [name for name in first if all(name in known for known in others if known is not None)]
        server, peer = [*sorted(names, key=lambda n: self._turns.get(n, -1)), "", ""][:2]
        self._turns[server] = 1 + max(self._turns.values(), default=0)
        wanted = self.low_precision and peer and self._asks
        of_peer = find.attempt(find.scores, rows, self._scorer(peer)) if wanted else None
        return _Comparison(rows, before, server, peer, of_peer, *self._self_reference(rows, before, server))

    def _self_reference(
        self, rows: TensorDict, trainer_logprobs: torch.Tensor, server: str
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """A server's own scores and what the trainer gives with the weights as they are served, where 16 bits are all
        that there is to tell whether the server is behind."""
        find = self.experiments
        if not server or not self._own_reference:
            return None, None
        served = self._as_served(rows, trainer_logprobs)
        own = None if served is None else find.attempt(find.scores, rows, self._scorer(server))
        again = None if own is None else find.attempt(find.scores, rows, self._scorer(server))
        repeats = again is not None and not find.logprob_change(rows, own, again).share
        return (own, served) if repeats else (None, None)

    def _as_served(self, rows: TensorDict, trainer_logprobs: torch.Tensor) -> torch.Tensor | None:
        return trainer_logprobs if self.trained == self.served else self.experiments.as_served(rows)

    def _lag_of(
        self, look: _Comparison, ours: torch.Tensor, theirs: torch.Tensor, same: bool
    ) -> tuple[float | None, str]:
        """What says most that the server is behind, and how: itself, the trainer, if it computes in the servers' dtype,
        or the peer.

        Args:
            same: the update left what is served as it was.
        """
        find, rows, tests = self.experiments, look.rows, self._lag
        peer = None if look.peer_before is None else find.attempt(find.scores, rows, self._scorer(look.peer))
        found: list[tuple[float | None, str]] = []
        if look.own_before is not None and not same:
            moved = find.logprob_change(rows, look.served_before, self._as_served(rows, ours))
            still = moved.is_clear and not find.logprob_change(rows, look.own_before, theirs).share
            found.append((tests[look.server, "itself"].add_self_comparison(still), SAME))
        if self.trained == self.served:
            found.append(
                (tests[look.server, "trainer"].add(find.lag_statistics(rows, theirs, ours, look.before)), NEARER)
            )
        if peer is not None and look.peer_before is not None:
            found.append(
                (tests[look.server, "peer"].add(find.lag_statistics(rows, theirs, peer, look.peer_before)), NEARER)
            )
        said = [(z, how) for z, how in found if z is not None]
        z, how = max(said, key=lambda told: told[0], default=(None, ""))
        return tuple(self.engine.parallel.broadcast_json([z, how]))

    def _judge_scores(
        self, look: _Comparison, gap: LogprobGap, server_logprobs: torch.Tensor, lag: float | None, how: str
    ) -> None:
        find, what, behind = self.experiments, f"the scores of {look.server}", lag is not None and lag > LIMIT
        if behind:
            what += f", {how} (z={lag:.1f}),"
        receipts = find.receipts(*self._receipts, look.server) if self.low_precision else None
        evidence = Evidence(self.config.warn, self.low_precision, gap, behind=behind, receipts=receipts)
        if not (self._told_blind or look.peer or receipts or self.trained == self.served):
            self._told_blind = True
            log.warning(
                "a server that misses an update is seen only where that makes a difference above gap.warn, or where "
                "its scores repeat to the last bit: %s serves %s without checksums, a trainer in %s is no reference "
                "for that, and there is no second server to compare with.",
                look.server,
                self.served,
                self.trained,
            )

        def examine() -> Evidence:
            live = receipts or find.receipts(*self._receipts, look.server)
            return self._diagnose(evidence, look.rows, server_logprobs, look.before, receipts=live)

        self._raise_alarms(self._scores[look.server], what, evidence, examine)

    def _raise_alarms(self, alarm: Alarm, what: str, evidence: Evidence, examine: Callable[[], Evidence]) -> None:
        """Count what was found; where something is to be said, look closer first."""
        gap, config = evidence.gap, self.config
        too_much = not gap.mean_abs <= config.stop  # nan is too much
        if alarm.count(diagnose(evidence) is not None, too_much, certain=evidence.certain):
            name, why = diagnose(examine()) or ("unknown", "what was looked at again agrees")
            alarm.warn(
                f"servers and trainer disagree: {what} and the trainer's differ by {gap.mean_abs:.3g} nats on average, "
                f"{gap.max_abs:.3g} at most, over {gap.tokens} tokens at version {self.engine.version} (warn above "
                f"{config.warn:g}, stop above {config.stop:g} or {config.patience} times in a row; this is time "
                f"{alarm.in_row}). Likely cause: {name}: {why}.",
                excused=name == DTYPE,
            )

    def _diagnose(
        self, evidence: Evidence, rows: TensorDict, theirs: torch.Tensor, before: torch.Tensor | None, **more: Any
    ) -> Evidence:
        """Add what experiments give."""
        find = self.experiments
        mask = self._is_current_version(rows) if evidence.recorded else find.compared(rows)
        older, base = find.compare(theirs, before, mask), find.compare(theirs, find.unadapted(rows), mask)
        return replace(evidence, older=older, base=base, temperature=find.temperature(rows, theirs, mask), **more)

    def _diagnose_recorded(self, evidence: Evidence, rows: TensorDict, ours: torch.Tensor) -> Evidence:
        """Scores come first: where they are wrong, what is generated is wrong as well."""
        find = self.experiments
        scored, ours = self._as_scored(rows, ours)
        theirs = find.attempt(find.scores, scored, self.inference.score)
        gap = find.compare(ours, theirs, find.compared(scored))
        if theirs is not None and gap is not None and not gap.mean_abs <= self.config.warn:
            receipts = find.receipts(*self._receipts)
            return self._diagnose(replace(evidence, gap=gap, recorded=False), scored, theirs, None, receipts=receipts)
        before = find.attempt(find.scores, rows, self.inference.score_previous_weights)
        prompts = {
            "seen_prompt": find.gap_of_regenerated(rows, False),
            "new_prompt": find.gap_of_regenerated(rows, True),
        }
        return self._diagnose(evidence, rows, rows["logprobs"], before, **prompts)

    def _as_scored(self, rows: TensorDict, trainer_logprobs: torch.Tensor) -> tuple[TensorDict, torch.Tensor]:
        """Rows at a temperature at which servers can score them, and the trainer's log-probs there (collective)."""
        if self.inference.capabilities.any_score_temperature:
            return rows, trainer_logprobs
        rows = rows.clone().update({"temperature": rows["temperature"].new_ones(rows.batch_size)})
        return rows, self.experiments.trainer_logprobs(rows)

    def _is_current_version(self, rows: TensorDict) -> torch.Tensor:
        return current_version_mask(rows["versions"], self.engine.version)

    def _scorer(self, server: str) -> Score:
        return partial(self.inference.score, server=server)


class Alarm:
    """The history of one comparison: speaks at the 1st, 2nd, 4th, 8th, ... time in a row that it is off, and stops the
    run where it is off by too much, or `patience` times in a row."""

    def __init__(self, patience: float) -> None:
        self.patience, self.in_row = patience, 0
        self._too_much = self._excused = False

    def count(self, off: bool, too_much: bool = False, certain: bool = False) -> bool:
        """Count a comparison; whether something is to be said. What is `certain` begins anew after an excused one."""
        if not off or (certain and self._excused):
            self.in_row, self._excused = 0, False
        self.in_row, self._too_much = self.in_row + off, too_much
        return (off and self.in_row & (self.in_row - 1) == 0) or self._stops

    @property
    def _stops(self) -> bool:
        return self._too_much or (self.in_row >= self.patience and not self._excused)

    def warn(self, message: str, excused: bool = False) -> None:
        """Warn.

        Args:
            excused: what was found is no fault: it does not stop the run, however often it is found. What is found
                after it and is a fault counts as the first.

        Raises:
            WeightUpdateError: instead, where the run must not go on.
        """
        if self._excused and not excused:
            self.in_row = 1
        self._excused = excused
        if self._stops:
            raise WeightUpdateError(message)
        log.warning(message)


def _sample_sequences(batch: TensorDict, count: int, version: int, parallel: ParallelContext) -> TensorDict:
    """This replica's part of `count` rows (all, where there are fewer), of as many groups as there are, those with
    fresh tokens first. Groups may be spread over replicas: each begins with others."""
    from rl_contracts.batch.trajectory import select

    is_local = batch["group_ids"] % parallel.dp_size == parallel.dp_rank
    fresh = current_version_mask(batch["versions"], version).any(-1)
    order = (2 * fresh.int() + is_local.int()).argsort(descending=True, stable=True)
    members: dict[int, list[int]] = defaultdict(list)
    for row, group in zip(order.tolist(), batch["group_ids"][order].tolist(), strict=True):
        members[group].append(row)
    turns = zip_longest(*members.values())  # of each group the first, of each the second, ...
    chosen = [row for turn in turns for row in turn if row is not None]
    return select(batch, chosen[: math.ceil(count / parallel.dp_size)])


def _gap_metrics(prefix: str, gap: LogprobGap | None) -> dict[str, float | None]:
    """`<prefix>mean_abs`, `<prefix>max_abs` and `<prefix>k3`, None without a gap."""
    return {prefix + name: None if gap is None else getattr(gap, name) for name in ("mean_abs", "max_abs", "k3")}
