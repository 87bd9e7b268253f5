"""The canary: what servers without checksums serve after an update, compared with the trainer's own forward before they
get requests again.

Each server scores a prompt that it has served before the update, and generates a few greedy tokens after it. Scores
that are off speak of the weights. Scores that are right and generated tokens that are off speak of what was computed
before the update: a server may pass by its prefix cache where it scores, so scores alone never see a stale one.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rl_contracts.errors import WeightUpdateError
from rl_contracts.inference import Canary, CanaryCompletion

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_contracts.engine import TrainEngine

TOKENS = 16
"""Greedy tokens after the prompt."""
VOCABULARY = range(3, 100)
"""Token ids of the prompt; every vocabulary has them."""
NEARER = 3.0
"""How many times nearer to the version before scores must be to be called its. Noise alone makes them equally near."""
DECODING = 10.0
"""How many times further off generated tokens may be than scores, which another kernel computes."""
NOISE = 1e-3
"""Nats within which generated tokens are never off."""


@dataclass(frozen=True)
class ExpectedCompletion:
    """What the trainer says of the canary at a version."""

    version: int
    scores: list[float]
    """Log-probs of the prompt's tokens; entry 0 is 0."""
    answers: dict[tuple[int, ...], list[float]]
    """Log-probs of tokens after it, by the tokens."""
    base: list[float] | None = None
    """As `scores`, of the base weights without the adapter; None: none is trained."""

    def logprobs(self, output_ids: Sequence[int]) -> list[float]:
        """Of the beginning of an answer that is also the beginning of a known one: of as much as there is."""
        best: list[float] = []
        for known, logprobs in self.answers.items():
            pairs = enumerate(zip(known, output_ids, strict=False))
            same = next((n for n, (ours, theirs) in pairs if ours != theirs), min(len(known), len(output_ids)))
            best = max(best, logprobs[:same], key=len)
        return best

    @staticmethod
    def _is_nearer(other: Sequence[float], scores: Sequence[float], spread: float) -> bool:
        """Whether scores are so much nearer to others than `to_tokens` that noise is no reason."""
        return _rms(_differences(other[1:], scores[1:])) * NEARER < spread

    def fault(self, answer: CanaryCompletion, before: ExpectedCompletion | None, tolerance: float) -> str | None:
        """What is wrong with what a server showed; None: nothing.

        Args:
            before: of the version before this one, where it is known.
            tolerance: mean absolute difference, in nats, above which log-probs are off.
        """
        scored = _differences(self.scores[1:], answer.scores[1:])
        off, spread = _mean(scored), _rms(scored)
        moved = before is not None and self._is_nearer(before.scores, answer.scores, spread)
        unapplied = self.base is not None and self._is_nearer(self.base, answer.scores, spread)
        if moved or unapplied or not off <= tolerance:  # nan is off
            what = ", and they are those of the version before" if moved else ""
            what = ", and they are those of the base weights: the adapter is not applied" if unapplied else what
            return (
                f"its scores of {len(scored)} tokens are {off:.3g} nats off the trainer's on average (at most "
                f"{tolerance:g}){what}: it serves other weights than were sent. Does it load them, all of them (a tied "
                "head too), and into what it computes with?"
            )
        made = _differences(self.logprobs(answer.output_ids), answer.logprobs)
        limit, off = min(tolerance, max(DECODING * spread, NOISE)), _mean(made)
        if not off <= limit:
            return (
                f"its scores are right, but the log-probs of the {len(made)} tokens that it generated after them are "
                f"{off:.3g} nats off the trainer's on average (at most {limit:.3g}): its prefix cache or its decode "
                "path still has what was computed with the weights before."
            )
        return None


class CanaryCheck:
    """Takes part in the commits of a publisher. All ranks have one and make the same calls.

    Args:
        engine: the trainer, with the weights that are published.
        route: on which they travel, for errors.
        tokens: of the prompt.
        tolerance: mean absolute difference, in nats, above which log-probs are off.
    """

    def __init__(self, engine: TrainEngine, route: str, tokens: int, tolerance: float) -> None:
        self.engine, self.route, self.tolerance = engine, route, tolerance
        self.prompt = random.Random(0).choices(VOCABULARY, k=tokens)
        self._right: ExpectedCompletion | None = None
        self._before: ExpectedCompletion | None = None
        self._base: list[float] | None = None
        self._asked: Future[list[CanaryCompletion]] = Future()
        self._verdict: Future[None] = Future()

    def prepare(self) -> Canary:
        """What a commit is to be given; for the rank that speaks to the servers."""
        self._asked, self._verdict = Future(), Future()
        return Canary(self.prompt, TOKENS, self._raise_on_mismatch)

    def compare(self, version: int, committing: Future[Any] | None, timeout: float) -> None:
        """Compare what the servers show while a commit waits for it (collective).

        Args:
            version: what is committed, and what the engine holds.
            committing: the commit, on rank 0; its error is left to whoever waits for it.
            timeout: seconds until the servers have shown it.
        """
        parallel, shown = self.engine.parallel, None
        if committing is not None:
            wait({self._asked, committing}, timeout, FIRST_COMPLETED)
            # whoever is asked from now on comes too late
            shown = None if self._asked.cancel() else [asdict(answer) for answer in self._asked.result()]
        shown = parallel.broadcast_json(shown)
        if shown is None:
            return
        try:
            right = self._ask_trainer(version, [CanaryCompletion(**answer) for answer in shown])
        except BaseException as error:
            self._decide(WeightUpdateError(f"the trainer could not compute the canary: {error!r}"))
            raise
        if self._right is None or self._right.version != version:
            self._before = self._right
        self._right = right
        self._decide(self._fault(right, [CanaryCompletion(**answer) for answer in shown]))

    def _decide(self, error: WeightUpdateError | None) -> None:
        with suppress(InvalidStateError):  # the commit does not wait any more
            self._verdict.set_result(None) if error is None else self._verdict.set_exception(error)

    def _ask_trainer(self, version: int, answers: list[CanaryCompletion]) -> ExpectedCompletion:
        """The trainer's log-probs of the prompt and of what was generated after it (collective)."""
        import numpy as np

        from rl_contracts.batch.trajectory import Trajectory, stack

        outputs = sorted({tuple(answer.output_ids) for answer in answers})
        length = len(self.prompt) + len(outputs[0])
        rows = stack(
            [
                Trajectory(
                    np.array([*self.prompt, *output], dtype=np.int64),
                    np.zeros(length, dtype=bool),
                    np.zeros(length, dtype=np.float32),
                    np.full(length, -1, dtype=np.int32),
                )
                for output in outputs
            ]
        )
        found, prompt, base = self._logprobs(rows), len(self.prompt), self.engine.without_adapter()
        after = {o: row[prompt:] for o, row in zip(outputs, found, strict=True)}
        if base is not None and self._base is None:  # which no step changes
            with base:
                self._base = self._logprobs(rows[:1])[0][:prompt]
        return ExpectedCompletion(version, found[0][:prompt], after, self._base)

    def _logprobs(self, rows: TensorDict) -> list[list[float]]:
        found: list[list[float]] = self.engine.forward(rows, lambda outputs, _: outputs.logprobs).tolist()
        return found

    def _fault(self, right: ExpectedCompletion, answers: list[CanaryCompletion]) -> WeightUpdateError | None:
        faults = [(answer.server, right.fault(answer, self._before, self.tolerance)) for answer in answers]
        where = f"route {self.route}, version {right.version}"
        wrong = [f"{where}, {server}: {fault}" for server, fault in faults if fault is not None]
        return WeightUpdateError(" ".join(wrong)) if wrong else None

    async def _raise_on_mismatch(self, version: int, answers: list[CanaryCompletion]) -> None:
        """`Canary.judge`: in a commit the trainer is asked, and the commit waits for it; a server that comes back later
        is compared with what it said then."""
        right = self._right
        if right is not None and right.version == version and self._asked.done():
            error = self._fault(right, answers)
            if error is not None:
                raise error
            return
        if self._asked.done():
            raise WeightUpdateError(
                f"{', '.join(answer.server for answer in answers)}: version {version} was never compared with the "
                "trainer's; the next update will be."
            )
        self._asked.set_result(answers)
        await asyncio.wrap_future(self._verdict)


def _differences(trainer: Sequence[float], server: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(trainer, server, strict=False)]


def _mean(values: Sequence[float]) -> float:
    """Of the absolute values; nan without any."""
    return math.fsum(map(abs, values)) / len(values) if values else math.nan


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum(value * value for value in values) / max(len(values), 1))
