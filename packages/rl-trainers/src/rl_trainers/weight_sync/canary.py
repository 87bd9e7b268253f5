"""Canary check: compare what servers compute after an update with the trainer's own forward pass.

The check runs before the servers get requests again. It is meant for servers without checksums.

Each server scores a prompt that it already served before the update, and continues this prompt by a few greedy tokens.
Wrong scores mean wrong weights. Correct scores with wrong generated tokens mean that results computed before the
update are still in use. A server may bypass its prefix cache when it scores, so scores alone never reveal a stale
cache.
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

PROMPT_TOKENS = 224
"""Length of the prompt. It fills several blocks of a usual prefix cache, which stores only whole blocks, and fits into
the embedded model's context of 256."""
TOKENS = 16
"""Greedy tokens to generate after the prompt."""
VOCABULARY = range(3, 100)
"""Token ids of the prompt, present in every vocabulary."""
TOLERANCE = 0.2
"""Largest accepted mean absolute difference of log-probs, in nats. 16-bit dtypes cause up to 0.05."""
FLOAT32_TOLERANCE = 0.01
"""The same if trainer and servers compute in float32, where rounding causes about 1e-5."""
CLOSER_FACTOR = 3.0
"""Ratio of distances above which scores count as computed with other weights. Noise alone gives a ratio near 1."""
DECODING_FACTOR = 10.0
"""Allowed error of generated tokens, as a multiple of the error of the scores. Decoding uses another kernel."""
NOISE = 1e-3
"""Error of generated tokens, in nats, that is always accepted."""


@dataclass(frozen=True)
class ExpectedCompletion:
    """Log-probs that the trainer computes for the canary at one version."""

    version: int
    scores: list[float]
    """Log-probs of the prompt's tokens; entry 0 is 0."""
    completion_logprobs: dict[tuple[int, ...], list[float]]
    """Log-probs of each completion that a server generated, by its token ids."""
    base: list[float] | None = None
    """Scores with the base weights alone, or None where no adapter is trained."""

    def logprobs(self, output_ids: Sequence[int]) -> list[float]:
        """Return the log-probs of the longest prefix that a completion shares with a scored completion."""
        best: list[float] = []
        for scored_ids, logprobs in self.completion_logprobs.items():
            pairs = enumerate(zip(scored_ids, output_ids, strict=False))
            same = next((n for n, (scored, output) in pairs if scored != output), min(len(scored_ids), len(output_ids)))
            best = max(best, logprobs[:same], key=len)
        return best

    @staticmethod
    def _is_closer(other: Sequence[float], scores: Sequence[float], spread: float) -> bool:
        """Return whether the scores' distance from `other` is less than `spread` by a factor of `CLOSER_FACTOR`."""
        return _rms(_differences(other[1:], scores[1:])) * CLOSER_FACTOR < spread

    def fault(self, completion: CanaryCompletion, previous: ExpectedCompletion | None, tolerance: float) -> str | None:
        """Return a description of the fault in a server's completion, or None.

        Args:
            completion: scores and completion of the server.
            previous: expected values at the previous version, or None if unknown.
            tolerance: largest accepted mean absolute difference of log-probs, in nats.
        """
        score_errors = _differences(self.scores[1:], completion.scores[1:])
        error, spread = _mean(score_errors), _rms(score_errors)
        is_previous = previous is not None and self._is_closer(previous.scores, completion.scores, spread)
        is_base = self.base is not None and self._is_closer(self.base, completion.scores, spread)
        if is_previous or is_base or not error <= tolerance:  # nan is a fault
            match = " and match the previous version" if is_previous else ""
            match = " and match the base weights (the adapter is not applied)" if is_base else match
            return (
                f"its scores of {len(score_errors)} tokens differ from the trainer's by {error:.3g} nats on average "
                f"(limit {tolerance:g}){match}. The server does not serve the sent weights; check that it loads every "
                "tensor, including a tied lm_head."
            )
        token_errors = _differences(self.logprobs(completion.output_ids), completion.logprobs)
        limit, error = min(tolerance, max(DECODING_FACTOR * spread, NOISE)), _mean(token_errors)
        if not error <= limit:
            return (
                f"its scores are correct, but the log-probs of its {len(token_errors)} generated tokens differ from "
                f"the trainer's by {error:.3g} nats on average (limit {limit:.3g}): its prefix cache or its decode "
                "path still uses results of the previous weights."
            )
        return None


class CanaryCheck:
    """Check of the servers during a commit of a publisher. All ranks have one and make the same calls.

    Args:
        engine: the trainer, which holds the weights that are published.
        route: name of the publish route, for error messages.
        tolerance: largest accepted mean absolute difference of log-probs, in nats.
    """

    def __init__(self, engine: TrainEngine, route: str, tolerance: float) -> None:
        self.engine, self.route, self.tolerance = engine, route, tolerance
        self.prompt = random.Random(0).choices(VOCABULARY, k=PROMPT_TOKENS)
        self._expected: ExpectedCompletion | None = None
        self._previous: ExpectedCompletion | None = None
        self._base: list[float] | None = None
        self._completions: Future[list[CanaryCompletion]] = Future()
        self._verdict: Future[None] = Future()

    def prepare(self) -> Canary:
        """Return the canary for a commit; only the rank that talks to the servers calls this."""
        self._completions, self._verdict = Future(), Future()
        return Canary(self.prompt, TOKENS, self._raise_on_mismatch)

    def compare(self, version: int, committing: Future[Any] | None, timeout: float) -> None:
        """Compare the servers' completions with the trainer while the commit waits (collective).

        Args:
            version: the version being committed, whose weights the engine holds.
            committing: the running commit, on rank 0. The caller that waits for it handles its error.
            timeout: seconds to wait for the completions.
        """
        parallel, completions = self.engine.parallel, None
        if committing is not None:
            wait({self._completions, committing}, timeout, FIRST_COMPLETED)
            # a cancelled future makes a later call of the judge fail instead of waiting for a verdict
            completions = (
                None
                if self._completions.cancel()
                else [asdict(completion) for completion in self._completions.result()]
            )
        completions = parallel.broadcast_json(completions)
        if completions is None:
            return
        try:
            expected = self._compute_expected(version, [CanaryCompletion(**completion) for completion in completions])
        except BaseException as error:
            self._decide(WeightUpdateError(f"the trainer could not compute the canary's log-probs: {error!r}"))
            raise
        if self._expected is None or self._expected.version != version:
            self._previous = self._expected
        self._expected = expected
        self._decide(self._fault(expected, [CanaryCompletion(**completion) for completion in completions]))

    def _decide(self, error: WeightUpdateError | None) -> None:
        with suppress(InvalidStateError):  # the commit no longer waits
            self._verdict.set_result(None) if error is None else self._verdict.set_exception(error)

    def _compute_expected(self, version: int, completions: list[CanaryCompletion]) -> ExpectedCompletion:
        """Compute the trainer's log-probs of the prompt and of the servers' completions (collective)."""
        import numpy as np

        from rl_contracts.batch.trajectory import Trajectory, stack

        outputs = sorted({tuple(completion.output_ids) for completion in completions})
        length = len(self.prompt) + len(outputs[0])
        sequences = stack(
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
        logprobs, prompt, base = self._logprobs(sequences), len(self.prompt), self.engine.without_adapter()
        completion_logprobs = {o: values[prompt:] for o, values in zip(outputs, logprobs, strict=True)}
        if base is not None and self._base is None:  # training never changes the base weights
            with base:
                self._base = self._logprobs(sequences[:1])[0][:prompt]
        return ExpectedCompletion(version, logprobs[0][:prompt], completion_logprobs, self._base)

    def _logprobs(self, sequences: TensorDict) -> list[list[float]]:
        logprobs: list[list[float]] = self.engine.forward(sequences, lambda outputs, _: outputs.logprobs).tolist()
        return logprobs

    def _fault(self, expected: ExpectedCompletion, completions: list[CanaryCompletion]) -> WeightUpdateError | None:
        faults = [
            (completion.server, expected.fault(completion, self._previous, self.tolerance))
            for completion in completions
        ]
        where = f"route {self.route}, version {expected.version}"
        messages = [f"{where}, {server}: {fault}" for server, fault in faults if fault is not None]
        return WeightUpdateError(" ".join(messages)) if messages else None

    async def _raise_on_mismatch(self, version: int, completions: list[CanaryCompletion]) -> None:
        """Implement `Canary.judge`.

        During a commit, hand the completions to `compare` and wait for its verdict. A server that rejoins later is
        compared with the log-probs that the trainer computed in that commit.
        """
        expected = self._expected
        if expected is not None and expected.version == version and self._completions.done():
            error = self._fault(expected, completions)
            if error is not None:
                raise error
            return
        if self._completions.done():
            raise WeightUpdateError(
                f"{', '.join(completion.server for completion in completions)}: version {version} was never compared "
                "with the trainer; the next update will be compared."
            )
        self._completions.set_result(completions)
        await asyncio.wrap_future(self._verdict)


def _differences(trainer: Sequence[float], server: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(trainer, server, strict=False)]


def _mean(values: Sequence[float]) -> float:
    """Return the mean absolute value, or nan without values."""
    return math.fsum(map(abs, values)) / len(values) if values else math.nan


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum(value * value for value in values) / max(len(values), 1))
