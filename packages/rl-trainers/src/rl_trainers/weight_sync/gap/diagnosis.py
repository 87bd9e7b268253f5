"""Why servers and trainer disagree: from evidence to the likeliest cause. Nothing here measures; `experiments` does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from rl_trainers.weight_sync.gap.divergence import LogprobGap

if TYPE_CHECKING:
    from rl_contracts.data import WeightReceipt

DTYPE = "dtype"
"""The one cause that is no fault: both sides compute the same, with other rounding."""


@dataclass(frozen=True, slots=True)
class Receipts:
    """A server's live tensors against what the trainer sent."""

    holder: str
    """The server."""
    total: int
    """Parameters compared."""
    differing: Sequence[str] = ()
    """Names of those whose checksum differs."""
    older: bool = False
    """Whether something differs, and all are as they were sent for the version before."""

    @classmethod
    def from_pair(cls, live: WeightReceipt, sent: WeightReceipt, before: WeightReceipt | None) -> Receipts:
        """From the server's receipt and the trainer's."""
        wrong = [name for name, value in sent.checksums.items() if live.checksums.get(name) != value]
        older = bool(wrong) and before is not None and live.checksums == before.checksums
        return cls(live.holder, len(sent.checksums), wrong, older)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of one comparison: of the servers' scores, or of recorded log-probs. None: not measured, or not
    measurable with these servers."""

    tolerance: float
    """Mean |d| up to which two computations count as the same."""
    low_precision: bool
    """Whether one of the sides computes in less than float32."""
    gap: LogprobGap
    """What was found."""
    recorded: bool = False
    """Whether it is about recorded log-probs, of tokens whose whole prefix carries the trainer's version, while the
    servers' scores are right."""
    behind: bool = False
    """Whether scores are nearer to the log-probs before the update than to those after it, or the server's own of then
    (`lag.LagTest`)."""
    receipts: Receipts | None = None
    """Taken from the live tensors now."""
    older: LogprobGap | None = None
    """How far they are from what the version before gives."""
    base: LogprobGap | None = None
    """How far they are from what the base weights give, where low-rank adapters are trained."""
    temperature: tuple[float, LogprobGap] | None = None
    """The temperature at which the trainer is nearest to them, and how near."""
    seen_prompt: LogprobGap | None = None
    """What is recorded for answers made now, to prompts that were answered before."""
    new_prompt: LogprobGap | None = None
    """The same for prompts that no server has seen."""

    @property
    def certain(self) -> bool:
        """Whether something is wrong, however small the gap."""
        return self.behind or (self.receipts is not None and bool(self.receipts.differing))

    def explained_by(self, other: LogprobGap | None) -> bool:
        """Whether a hypothesis makes the gap (nearly) disappear."""
        return other is not None and other.mean_abs <= min(self.tolerance, self.gap.mean_abs / 4)


class Cause(NamedTuple):
    """The likeliest cause."""

    name: str
    """Short: `temperature`, `weights not received`, ..."""
    why: str
    """What was found that speaks for it, and what to look at."""


def diagnose(evidence: Evidence) -> Cause | None:
    """The likeliest cause; None where nothing is off."""
    receipts, gap, older = evidence.receipts, evidence.gap, evidence.behind or evidence.explained_by(evidence.older)
    if not evidence.certain and gap.mean_abs <= evidence.tolerance:
        return None
    if receipts is not None and receipts.differing:
        return _wrong_tensors(receipts, older)
    what = "recorded log-probs" if evidence.recorded else "scores"
    if evidence.explained_by(evidence.base):
        return Cause(
            "adapter not applied",
            f"the {what} are those of the base weights without the adapter: the servers acknowledged it, and do not "
            "add it to what they compute with",
        )
    if evidence.temperature is not None and evidence.explained_by(evidence.temperature[1]):
        return Cause(
            "temperature",
            f"the {what} agree with the trainer's at temperature {evidence.temperature[0]:.3g} instead of the rows' "
            "own; the sampler does not use the temperature that it is told, or the batch does not say the one that was "
            "used",
        )
    found = None if older else _of_many_kinds(evidence, what)
    return found or (_of_generation(evidence, older) if evidence.recorded else _of_computation(receipts, older))


def _wrong_tensors(receipts: Receipts, older: bool) -> Cause:
    wrong, total = len(receipts.differing), receipts.total
    if older or receipts.older or 2 * wrong > total:
        are = ", but those of the version before" if receipts.older else ""
        are += "; its scores are those of the version before" if older else ""
        return Cause(
            "weights not received",
            f"{wrong} of {total} live tensors of {receipts.holder} are not those that were sent{are}: it acknowledged "
            "the commit and serves other weights",
        )
    names = ", ".join(receipts.differing[:3])
    return Cause(
        "one tensor wrong" if wrong == 1 else "tensors wrong",
        f"{wrong} of {total} live tensors of {receipts.holder} changed after the receipt: {names}",
    )


def _of_many_kinds(evidence: Evidence, what: str) -> Cause | None:
    """Causes that look alike in scores and in recorded log-probs."""
    gap, limit = evidence.gap, evidence.tolerance
    if 0 < gap.far <= 0.15 and gap.near_mean <= limit:
        return Cause(
            "tokenizer or special tokens",
            f"the {what} of {gap.far:.1%} of the tokens are far off ({gap.max_abs:.3g} nats at most) and the others "
            "agree: single ids are treated differently, such as added, masked or banned tokens",
        )
    one_sided = 0.5 + 2 / math.sqrt(gap.tokens)  # few tokens lean to one side by chance
    small = gap.mean_abs <= 5 * limit and gap.far <= 0.01 and abs(gap.bias) <= one_sided * gap.mean_abs
    if evidence.low_precision and small:
        return Cause(
            DTYPE,
            f"the {what} are off a little, everywhere and to both sides, as rounding to 16 bits does; compute in "
            "float32 on both sides, or raise gap.warn",
        )
    return None


def _of_computation(receipts: Receipts | None, older: bool) -> Cause:
    """The scores are wrong, and no tensor is known to be."""
    if receipts is not None:
        what = "the scores are those of the version before" if older else "what is computed with them is wrong"
        return Cause(
            "stale fused copy",
            f"all {receipts.total} tensors are as sent, yet {what}: a fused, quantised or captured copy was made "
            "before the commit and not renewed, or the servers run another architecture",
        )
    if older:
        return Cause(
            "weights not received",
            "these are the scores of the version before: the new weights were not taken, or a copy of the old ones "
            "computes",
        )
    return Cause(
        "weights or architecture",
        "no experiment explains it and these servers give no checksums of live tensors: one tensor may be wrong, a "
        "fused copy stale, or the model another one",
    )


def _of_generation(evidence: Evidence, older: bool) -> Cause:
    """Scoring is right and generating wrong: the stamp, the sampler, or the cache, which scoring does not use."""
    gap, seen, new, limit = evidence.gap, evidence.seen_prompt, evidence.new_prompt, evidence.tolerance
    if older:
        return Cause(
            "version stamped late",
            "the recorded log-probs are those of the version before: tokens are stamped with the version that was "
            "served when the answer was read, not when they were sampled",
        )
    if gap.ours_higher <= 0.02 and gap.bias <= -0.9 * gap.mean_abs:
        return Cause(
            "truncated sampling",
            "the recorded log-probs are never below the trainer's: they were normalised over the tokens that top-p, "
            "top-k or min-p left; record those of the full distribution",
        )
    if new is not None and not new.mean_abs <= limit:
        return Cause(
            "decode path",
            "what is generated now is off whatever the prompt, though scores are right: look at the KV cache, the "
            "captured graphs and the sampler",
        )
    why = "scores, which use no cache, are right: keys and values of a prompt were kept from other weights"
    if seen is not None and new is not None:
        why = (
            "what is generated now is right; the cache that was wrong is gone, or the tokens were made by weights "
            "other than their stamps say"
            if seen.mean_abs <= limit
            else "an answer to a prompt that the servers know is wrong, one to a new prompt is right: keys and values "
            "of shared prefixes outlive the commit"
        )
    return Cause("stale prefix cache", why)
