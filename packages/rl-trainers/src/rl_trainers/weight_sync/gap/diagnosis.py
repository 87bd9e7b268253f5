"""Infer the likeliest cause of a log-prob gap from evidence. `experiments` makes the measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from rl_trainers.weight_sync.gap.divergence import LogprobGap

if TYPE_CHECKING:
    from rl_contracts.data import WeightReceipt

DTYPE = "dtype"
"""Name of the one cause that is no fault: both sides compute the same with different rounding."""


@dataclass(frozen=True, slots=True)
class Receipts:
    """Comparison of a server's live tensors with the trainer's receipt."""

    holder: str
    """Name of the server."""
    total: int
    """Number of parameters compared."""
    differing: Sequence[str] = ()
    """Names of the parameters whose checksums differ."""
    older: bool = False
    """True if the live tensors match the receipt of the previous version instead of the sent one."""

    @classmethod
    def from_pair(cls, live: WeightReceipt, sent: WeightReceipt, previous: WeightReceipt | None) -> Receipts:
        """Compare a server's receipt with the trainer's receipts of this version and the previous one."""
        differing = [name for name, value in sent.checksums.items() if live.checksums.get(name) != value]
        older = bool(differing) and previous is not None and live.checksums == previous.checksums
        return cls(live.holder, len(sent.checksums), differing, older)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Measurements that may explain one log-prob gap.

    The gap compares the trainer's log-probs with the scores of a server or with recorded log-probs. A field is None if
    it was not measured, or if these servers do not support the measurement.
    """

    tolerance: float
    """Largest mean |d|, in nats, at which two computations count as equal."""
    low_precision: bool
    """True if the trainer or the servers compute in less than float32."""
    gap: LogprobGap
    """Log-prob gap to explain."""
    recorded: bool = False
    """True if the gap concerns recorded log-probs of tokens of the current version, while scores are correct."""
    behind: bool = False
    """True if `lag.LagTest` found that the scores belong to the weights before the update."""
    receipts: Receipts | None = None
    """Comparison of checksums, taken from the live tensors now."""
    older: LogprobGap | None = None
    """Gap to the log-probs of the previous version."""
    base: LogprobGap | None = None
    """Gap to the log-probs of the base weights, where low-rank adapters are trained."""
    temperature: tuple[float, LogprobGap] | None = None
    """Temperature at which the trainer comes closest, and the remaining gap."""
    seen_prompt: LogprobGap | None = None
    """Gap of completions generated now for prompts that the servers have already seen."""
    new_prompt: LogprobGap | None = None
    """Gap of completions generated now for prompts that no server has seen."""

    @property
    def certain(self) -> bool:
        """True if something is wrong, however small the gap."""
        return self.behind or (self.receipts is not None and bool(self.receipts.differing))

    def explained_by(self, other: LogprobGap | None) -> bool:
        """Return whether a hypothesis reduces the gap to the tolerance and to a quarter of its size."""
        return other is not None and other.mean_abs <= min(self.tolerance, self.gap.mean_abs / 4)


class Cause(NamedTuple):
    """Likeliest cause of a log-prob gap."""

    name: str
    """Short name, such as `temperature` or `weights not received`."""
    why: str
    """Evidence for the cause, and what to check."""


def diagnose(evidence: Evidence) -> Cause | None:
    """Return the likeliest cause, or None if nothing is wrong."""
    receipts, gap, older = evidence.receipts, evidence.gap, evidence.behind or evidence.explained_by(evidence.older)
    if not evidence.certain and gap.mean_abs <= evidence.tolerance:
        return None
    if receipts is not None and receipts.differing:
        return _wrong_tensors(receipts, older)
    subject = "recorded log-probs" if evidence.recorded else "scores"
    if evidence.explained_by(evidence.base):
        return Cause(
            "adapter not applied",
            f"the {subject} match the base weights without the adapter: the servers acknowledged the adapter but do "
            "not compute with it",
        )
    if evidence.temperature is not None and evidence.explained_by(evidence.temperature[1]):
        return Cause(
            "temperature",
            f"the {subject} match the trainer's at temperature {evidence.temperature[0]:.3g} instead of the batch's: "
            "either the sampler ignores the requested temperature, or the batch records a wrong temperature",
        )
    cause = None if older else _common_cause(evidence, subject)
    return cause or (_generation_cause(evidence, older) if evidence.recorded else _scoring_cause(receipts, older))


def _wrong_tensors(receipts: Receipts, older: bool) -> Cause:
    differing, total = len(receipts.differing), receipts.total
    if older or receipts.older or 2 * differing > total:
        details = " and match the previous version" if receipts.older else ""
        details += "; its scores match the previous version" if older else ""
        return Cause(
            "weights not received",
            f"{differing} of {total} live tensors of {receipts.holder} differ from the sent tensors{details}: the "
            "server acknowledged the commit but serves other weights",
        )
    names = ", ".join(receipts.differing[:3])
    return Cause(
        "one tensor wrong" if differing == 1 else "tensors wrong",
        f"{differing} of {total} live tensors of {receipts.holder} changed after the receipt: {names}",
    )


def _common_cause(evidence: Evidence, subject: str) -> Cause | None:
    """Return a cause that shows the same pattern in scores and in recorded log-probs, or None."""
    gap, limit = evidence.gap, evidence.tolerance
    if 0 < gap.far <= 0.15 and gap.near_mean <= limit:
        return Cause(
            "tokenizer or special tokens",
            f"the {subject} of {gap.far:.1%} of the tokens are far off (max {gap.max_abs:.3g} nats) and the rest "
            "match: check for token ids that one side adds, masks or bans",
        )
    one_sided = 0.5 + 2 / math.sqrt(gap.tokens)  # with few tokens, chance alone gives a bias
    small = gap.mean_abs <= 5 * limit and gap.far <= 0.01 and abs(gap.bias) <= one_sided * gap.mean_abs
    if evidence.low_precision and small:
        return Cause(
            DTYPE,
            f"the {subject} differ slightly on all tokens and in both directions, as rounding to 16 bits does; "
            "compute in float32 on both sides, or raise gap.warn",
        )
    return None


def _scoring_cause(receipts: Receipts | None, older: bool) -> Cause:
    """Return the cause of wrong scores when no tensor is known to be wrong."""
    if receipts is not None:
        symptom = "the scores match the previous version" if older else "the scores are wrong"
        return Cause(
            "stale fused copy",
            f"all {receipts.total} tensors are as sent, but {symptom}: the server computes with a fused, quantized or "
            "captured copy from before the commit, or runs another architecture",
        )
    if older:
        return Cause(
            "weights not received",
            "the scores match the previous version: the server did not load the new weights, or computes with a copy "
            "of the old ones",
        )
    return Cause(
        "weights or architecture",
        "no experiment explains the gap, and these servers give no checksums of live tensors; check for one wrong "
        "tensor, a stale fused copy, or another model",
    )


def _generation_cause(evidence: Evidence, older: bool) -> Cause:
    """Return the cause of wrong generation when scoring is correct.

    Candidates are the version stamp, the sampler, and the cache, which scoring does not use.
    """
    gap, seen, new, limit = evidence.gap, evidence.seen_prompt, evidence.new_prompt, evidence.tolerance
    if older:
        return Cause(
            "version stamped late",
            "the recorded log-probs match the previous version: tokens carry the version served when the response was "
            "read instead of the version that sampled them",
        )
    if gap.trainer_higher <= 0.02 and gap.bias <= -0.9 * gap.mean_abs:
        return Cause(
            "truncated sampling",
            "the recorded log-probs are never below the trainer's: they are normalized over the tokens that top-p, "
            "top-k or min-p kept; record log-probs of the full distribution",
        )
    if new is not None and not new.mean_abs <= limit:
        return Cause(
            "decode path",
            "generation is wrong for every prompt although scores are correct: check the KV cache, the captured graphs "
            "and the sampler",
        )
    why = "scores, which use no cache, are correct: the cache holds keys and values of a prompt from other weights"
    if seen is not None and new is not None:
        why = (
            "generation is correct now: the wrong cache entries are gone, or the tokens carry a version that did not "
            "sample them"
            if seen.mean_abs <= limit
            else "completions of prompts that the servers have seen are wrong, but completions of new prompts are "
            "correct: cached keys and values of shared prefixes survive the commit"
        )
    return Cause("stale prefix cache", why)
