"""The measurements of the gap gate: what it compares after every commit, and what it tries out when something is off.

Everything here is collective: all ranks make the same calls, and get the same answers.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from rl_contracts.config import GenerationConfig
from rl_contracts.data import ModelRequest
from rl_contracts.errors import InferenceError, RLError
from rl_contracts.logging import get_logger
from rl_contracts.trajectory import Trajectory, from_response, lengths, stack
from rl_trainers.gap.diagnosis import Gap, Receipts
from rl_trainers.gap.divergence import gap_sums

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_contracts.data import WeightReceipt
    from rl_contracts.engine import TrainEngine
    from rl_contracts.inference import InferenceEngine
    from rl_trainers.publish import Runner

log = get_logger("trainers.gap")

Score = Callable[[list[int], float], Awaitable[list[float]]]
"""`(token ids, temperature) -> log-probs`: a client's `score` or `score_before`."""

TEMPERATURES = [0.1 * 100 ** (i / 12) for i in range(13)]
"""Where the search for another temperature begins: 0.1 to 10."""
REFINEMENTS = 16
"""Steps of the golden section between the two neighbours of the best one; each shrinks the bracket by 0.618."""
ANSWER_TOKENS = 16
"""Tokens of an answer that the gate asks for itself."""
PROBE_TOKENS = 8
"""Tokens generated to compare what a server generates with what it scores."""


@dataclass(frozen=True, slots=True)
class Experiments:
    """Comparisons between a trainer and its servers."""

    engine: TrainEngine
    """The trainer; its weights are those that the servers should hold."""
    inference: InferenceEngine
    """Client of the servers."""
    run: Runner
    """Runs the client's coroutines."""
    timeout: float
    """Seconds for one question to the servers."""

    def ours(self, rows: TensorDict) -> torch.Tensor:
        """The trainer's log-probs at the rows' temperatures, [B, T]."""
        return self.engine.forward(rows, lambda outputs, _: outputs.logprobs)

    def compare(self, ours: torch.Tensor, theirs: torch.Tensor, mask: torch.Tensor) -> Gap | None:
        """Over all replicas; None without tokens."""
        parallel = self.engine.parallel
        sums, largest = gap_sums(ours, theirs, mask)
        return Gap.of(parallel.sum_over_replicas(sums).tolist(), parallel.max_over_replicas(largest).item())

    def scores(self, rows: TensorDict, score: Score) -> torch.Tensor:
        """What the servers say of the rows' tokens, [B, T].

        Raises:
            RLError: on every rank, if the servers do not answer one of them.
        """

        async def all_rows() -> list[list[float]]:
            calls = [
                score(ids[:length].tolist(), float(temperature))
                for ids, length, temperature in zip(rows["input_ids"], lengths(rows), rows["temperature"], strict=True)
            ]
            return await asyncio.gather(*calls)

        result, error = torch.zeros(rows["input_ids"].shape), None
        try:
            for row, values in zip(result, self.run(all_rows(), self.timeout), strict=True):
                row[: len(values)] = torch.tensor(values)
        except (RLError, TimeoutError) as caught:
            error = caught
        self.engine.parallel.agree(error, "scoring rows on the servers")
        return result

    def against_scores(self, rows: TensorDict, ours: torch.Tensor, score: Score, mask: torch.Tensor) -> Gap | None:
        """`ours` against the servers' scores of the rows; None where the servers cannot give them."""
        try:
            theirs = self.scores(rows, score)
        except (RLError, TimeoutError) as error:
            log.info("this experiment of the gap's diagnosis was not possible: %s", error)
            return None
        return self.compare(ours, theirs, mask)

    def answers(self, rows: TensorDict) -> TensorDict | None:
        """Let the servers answer the rows' prompts again, now: rows of fresh tokens. None, on every rank, where they do
        not."""
        made: list[Trajectory] = []
        error: Exception | None = None
        try:
            made = self.run(self._answer_all(rows), self.timeout)
        except (RLError, TimeoutError) as caught:
            error = caught
        if any(self.engine.parallel.gather_json(error is not None)):
            log.info("servers do not answer for the gap gate: %s", error or "on another rank")
            return None
        return stack(made)

    async def _answer_all(self, rows: TensorDict) -> list[Trajectory]:
        async def one(seed: int, row: TensorDict) -> Trajectory:
            prompt, temperature, generated = _prompt(row)
            generation = GenerationConfig(
                max_new_tokens=min(ANSWER_TOKENS, generated), temperature=temperature, ignore_eos=True
            )
            answer = await self.inference.agenerate(ModelRequest(prompt, generation, seed=seed))
            return from_response(answer, reward=0.0, temperature=temperature)

        answered = rows[(rows["versions"] >= 0).any(-1)]
        return await asyncio.gather(*(one(i, answered[i]) for i in range(answered.batch_size[0])))

    def temperature(self, rows: TensorDict, theirs: torch.Tensor, mask: torch.Tensor) -> tuple[float, Gap] | None:
        """The one temperature at which the trainer comes nearest to some log-probs, and how near; None without
        tokens."""

        def at(temperature: float) -> Gap | None:
            changed = rows.clone()
            changed["temperature"] = torch.full_like(rows["temperature"], temperature)
            return self.compare(self.ours(changed), theirs, mask)

        found = [at(temperature) for temperature in TEMPERATURES]
        if found[0] is None:
            return None
        sizes = [gap.mean_abs if gap is not None else math.inf for gap in found]
        best = sizes.index(min(sizes))
        low, high = (math.log(TEMPERATURES[min(max(best + side, 0), len(found) - 1)]) for side in (-1, 1))
        value = math.exp(_golden_section(lambda x: _mean(at(math.exp(x))), low, high))
        gap = at(value)
        return None if gap is None else (value, gap)

    def receipts(self, sent: WeightReceipt | None) -> Receipts | None:
        """The servers' live tensors against what was sent; None where they have no checksums. Rank 0 asks."""
        found: Receipts | None = None
        if self.engine.parallel.is_main and sent is not None and sent.checksums:
            try:
                live = self.run(self.inference.live_receipts(), self.timeout)
            except (RLError, TimeoutError) as error:
                log.info("the servers give no checksums of what they serve: %s", error)
            else:
                found = max((_against(sent, receipt) for receipt in live), key=lambda r: len(r.differing), default=None)
        told = self.engine.parallel.broadcast_json(None if found is None else asdict(found))
        return None if told is None else Receipts(told["holder"], told["total"], tuple(told["differing"]))

    def probe(self, rows: TensorDict, new: bool) -> Gap | None:
        """Let a server go on after the prompt of a row, and compare its log-probs with its own scores of the same
        tokens; None if it does not answer.

        Args:
            new: turn the prompt round first, so that no server can have its beginning in a cache.
        """
        recorded, scored = torch.zeros(PROBE_TOKENS), torch.zeros(PROBE_TOKENS)
        if rows.batch_size[0]:
            prompt, temperature, generated = _prompt(rows[0])
            asked = prompt[::-1] if new else prompt
            coroutine = self._generate_and_score(asked, temperature, min(PROBE_TOKENS, generated))
            try:
                values, scores = self.run(coroutine, self.timeout)
                recorded[: len(values)], scored[: len(values)] = torch.tensor(values), torch.tensor(scores)
            except (RLError, TimeoutError) as error:
                log.info("a probe of the gap's diagnosis failed: %s", error)
        return self.compare(scored, recorded, recorded != 0)

    async def _generate_and_score(
        self, prompt: list[int], temperature: float, tokens: int
    ) -> tuple[list[float], list[float]]:
        generation = GenerationConfig(max_new_tokens=tokens, temperature=temperature, ignore_eos=True)
        answer = await self.inference.agenerate(ModelRequest(prompt, generation, seed=0))
        if not answer.output_ids:
            raise InferenceError("the server answered a probe without a token.")
        scores = await self.inference.score([*prompt, *answer.output_ids], temperature)
        return answer.logprobs, scores[len(prompt) :]


def _prompt(row: TensorDict) -> tuple[list[int], float, int]:
    """Ids before the first generated token, temperature, and number of generated tokens of one row."""
    generated = row["versions"] >= 0
    return row["input_ids"][: int(generated.long().argmax())].tolist(), float(row["temperature"]), int(generated.sum())


def _against(sent: WeightReceipt, live: WeightReceipt) -> Receipts:
    differing = [name for name, value in sent.checksums.items() if live.checksums.get(name) != value]
    return Receipts(live.holder, len(sent.checksums), tuple(differing))


def _mean(gap: Gap | None) -> float:
    return math.inf if gap is None else gap.mean_abs


def _golden_section(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function of one minimum between `low` and `high` has it (Kiefer, "Sequential minimax search for a
    maximum", 1953)."""
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = function(left), function(right)
    for _ in range(REFINEMENTS):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = function(right)
    return left if at_left <= at_right else right
