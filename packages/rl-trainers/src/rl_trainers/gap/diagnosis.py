"""Why servers and trainer disagree: from evidence to causes. Nothing here measures; `experiments` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DTYPE = "dtype"
"""The one cause that is no fault: both sides compute the same, with other rounding."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Two sets of log-probs of the same tokens, with d = the trainer's - the other's, in nats."""

    tokens: int
    """Tokens compared; more than 0."""
    mean_abs: float
    """Mean of |d|."""
    max_abs: float
    """Largest |d|."""
    k3: float = 0.0
    """Mean of exp(-d) - 1 + d."""
    bias: float = 0.0
    """Mean of d."""
    ours_higher: float = 0.5
    """Share of tokens that the trainer rates higher."""
    far: float = 0.0
    """Share of tokens that are off by more than a nat."""
    near_mean: float = 0.0
    """Mean of |d| of the others."""

    @classmethod
    def of(cls, sums: Sequence[float], largest: float) -> Gap | None:
        """From `gap_sums`; None without tokens."""
        count, total, k3, signed, higher, far, near = sums
        if not count:
            return None
        rest = count - far
        return cls(
            int(count),
            total / count,
            largest,
            k3 / count,
            signed / count,
            higher / count,
            far / count,
            near / rest if rest else 0.0,
        )


@dataclass(frozen=True, slots=True)
class Receipts:
    """The servers' live tensors against what the trainer sent."""

    holder: str
    """The server that is furthest off."""
    total: int
    """Parameters compared."""
    differing: tuple[str, ...]
    """Names of those whose checksum differs on that server."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known. None: not measured, or not measurable with these servers."""

    tolerance: float
    """Mean |d| up to which two computations count as the same."""
    score: Gap | None = None
    """The servers' scores at the current version."""
    receipts: Receipts | None = None
    """Taken from the live tensors now."""
    score_older: Gap | None = None
    """The servers' scores now, against the trainer's log-probs of the same rows at the version before."""
    score_temperature: tuple[float, Gap] | None = None
    """The temperature at which the trainer is nearest to the scores, and how near."""
    fresh: Gap | None = None
    """Recorded log-probs of tokens whose whole prefix carries the trainer's version."""
    fresh_temperature: tuple[float, Gap] | None = None
    """The temperature at which the trainer is nearest to them, and how near."""
    fresh_older: Gap | None = None
    """The recorded log-probs against the servers' scores at the version before."""
    seen_prompt: Gap | None = None
    """An answer generated now to a prompt that was answered before: its log-probs against the servers' own scores."""
    new_prompt: Gap | None = None
    """The same for a prompt that no server has seen."""
    low_precision: bool = False
    """Whether one of the sides computes in less than float32."""


@dataclass(frozen=True, slots=True)
class Cause:
    """One likely cause."""

    name: str
    """Short: `temperature`, `weights not received`, ..."""
    why: str
    """What was found that speaks for it, and what to look at."""

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


def diagnose(evidence: Evidence) -> list[Cause]:
    """The likely causes, likeliest first; empty where nothing is off.

    Scores come first: where they are wrong, what is generated is wrong as well.
    """
    if evidence.score is not None and not evidence.score.mean_abs <= evidence.tolerance:
        return _of_scores(evidence, evidence.score)
    if evidence.fresh is not None and not evidence.fresh.mean_abs <= evidence.tolerance:
        return _of_fresh_tokens(evidence, evidence.fresh)
    return []


def _of_scores(evidence: Evidence, gap: Gap) -> list[Cause]:
    receipts, older = evidence.receipts, _explains(evidence.score_older, gap, evidence)
    if receipts is not None and receipts.differing:
        return [_wrong_tensors(receipts, older)]
    if evidence.score_temperature is not None and _explains(evidence.score_temperature[1], gap, evidence):
        return [_temperature(evidence.score_temperature[0], "the servers' scores")]
    if older and receipts is None:
        return [
            Cause(
                "weights not received",
                "the servers' scores are those of the version before; they did not take the "
                "new weights, or compute with a copy of the old ones",
            )
        ]
    if older:
        return [
            Cause(
                "stale fused copy",
                f"all {_count(receipts)} tensors are as sent, yet the scores are those of the version before: the "
                "servers compute with a copy (fused, quantised, captured in a graph) made before the commit",
            )
        ]
    common = _common(evidence, gap, "scores")
    if common:
        return common
    if receipts is not None:
        return [
            Cause(
                "stale fused copy",
                f"all {_count(receipts)} tensors are as sent, yet what is computed with them is "
                "wrong: a fused, quantised or captured copy was not renewed at the commit, or the servers run another "
                "architecture",
            )
        ]
    return [
        Cause(
            "weights or architecture",
            "no experiment explains it and these servers give no checksums of live "
            "tensors: one tensor may be wrong, a fused copy stale, or the model another one",
        )
    ]


def _of_fresh_tokens(evidence: Evidence, gap: Gap) -> list[Cause]:
    if evidence.fresh_temperature is not None and _explains(evidence.fresh_temperature[1], gap, evidence):
        return [_temperature(evidence.fresh_temperature[0], "the recorded log-probs")]
    if _explains(evidence.fresh_older, gap, evidence):
        return [
            Cause(
                "version stamped late",
                "the recorded log-probs are those of the version before: tokens are stamped "
                "with the version that was served when the answer was read, not when they were sampled",
            )
        ]
    if gap.ours_higher <= 0.02 and gap.bias <= -0.9 * gap.mean_abs:
        return [
            Cause(
                "truncated sampling",
                "the recorded log-probs are never below the trainer's: they were normalised "
                "over the tokens that top-p, top-k or min-p left; record those of the full distribution",
            )
        ]
    return _common(evidence, gap, "recorded log-probs") or _of_generation(evidence)


def _of_generation(evidence: Evidence) -> list[Cause]:
    """Scoring is right and generating wrong. What differs between the two is the cache."""
    seen, new, limit = evidence.seen_prompt, evidence.new_prompt, evidence.tolerance
    stale = "stale prefix cache"
    if seen is None or new is None:
        return [
            Cause(
                stale,
                "scores, which use no cache, are right, and recorded log-probs wrong: keys and values of a "
                "prompt were kept from other weights",
            )
        ]
    if not seen.mean_abs <= limit and new.mean_abs <= limit:
        return [
            Cause(
                stale,
                "an answer to a prompt that the servers know is wrong, one to a new prompt is right: keys and "
                "values of shared prefixes outlive the commit",
            )
        ]
    if not new.mean_abs <= limit:
        return [
            Cause(
                "decode path",
                "what a server generates now disagrees with its own scores, whatever the prompt: look "
                "at its KV cache, its captured graphs and its sampler",
            )
        ]
    return [
        Cause(
            stale,
            "what is generated now is right; the cache that was wrong is gone, or the tokens were made by "
            "weights other than their stamps say",
        )
    ]


def _common(evidence: Evidence, gap: Gap, what: str) -> list[Cause]:
    """Causes that look alike in scores and in recorded log-probs."""
    if 0 < gap.far <= 0.15 and gap.near_mean <= evidence.tolerance:
        return [
            Cause(
                "tokenizer or special tokens",
                f"the {what} of {gap.far:.1%} of the tokens are far off ({gap.max_abs:.3g} nats at most) and the "
                "others agree: single ids are treated differently, such as added, masked or banned tokens",
            )
        ]
    small = gap.mean_abs <= 5 * evidence.tolerance and gap.far <= 0.01 and abs(gap.bias) <= gap.mean_abs / 2
    if evidence.low_precision and small:
        return [
            Cause(
                DTYPE,
                f"the {what} are off a little, everywhere and to both sides, as rounding to 16 bits does; "
                "compute in float32 on both sides, or raise gap.warn",
            )
        ]
    return []


def _wrong_tensors(receipts: Receipts, older: bool) -> Cause:
    wrong, total = len(receipts.differing), receipts.total
    if 2 * wrong > total:
        are = "; its scores are those of the version before" if older else ""
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


def _temperature(value: float, what: str) -> Cause:
    return Cause(
        "temperature",
        f"{what} agree with the trainer's at temperature {value:.3g} instead of the rows' own; the sampler does not "
        "use the temperature that it is told, or the batch does not say the one that was used",
    )


def _explains(candidate: Gap | None, gap: Gap, evidence: Evidence) -> bool:
    """Whether a hypothesis makes the gap (nearly) disappear."""
    if candidate is None:
        return False
    return candidate.mean_abs <= evidence.tolerance and candidate.mean_abs <= gap.mean_abs / 4


def _count(receipts: Receipts | None) -> int:
    return 0 if receipts is None else receipts.total
