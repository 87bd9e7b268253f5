"""The measurements of the gap gate: what it compares at every step, and what it tries out when something is off.

Everything here is collective: all ranks make the same calls, and get the same answers. The head of each replica asks
the servers and tells the other ranks of its replica, so that they cannot disagree.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tensordict import TensorDict

from rl_contracts.batch.trajectory import Trajectory, from_response, lengths, stack
from rl_contracts.config import GenerationConfig
from rl_contracts.data import ModelRequest
from rl_contracts.errors import RLError
from rl_contracts.runtime.logging import get_logger
from rl_trainers.weight_sync.gap.diagnosis import Receipts
from rl_trainers.weight_sync.gap.divergence import LogprobGap

if TYPE_CHECKING:
    from rl_contracts.data import WeightReceipt
    from rl_contracts.engine import TrainEngine
    from rl_contracts.inference import InferenceEngine
    from rl_contracts.runtime.aio import LoopThread

log = get_logger("trainers.gap")

Tensors = dict[str, torch.Tensor]
type Asked = Future[list[Any]] | None
"""Questions to the servers, of the head of a replica; None on its other ranks."""
Score = Callable[[list[int], float], Awaitable[list[float]]]
"""`(token ids, temperature) -> log-probs`: a client's `score` or `score_previous_weights`."""
FAILED = (RLError, TimeoutError)
"""What a measurement that cannot be made raises, on every rank."""

ROUNDS, POINTS = 6, 9
"""The search for another temperature: each round tries so many between the neighbours of the best one so far."""
COMPLETION_TOKENS = 16
"""Tokens of an answer that the gate asks for itself."""


class LogprobChange(NamedTuple):
    """How an update changed log-probs."""

    share: float = 0.0
    """Of the tokens: those whose log-prob changed at all."""
    nats: float = 0.0
    """Root mean square of the changes."""

    @property
    def is_clear(self) -> bool:
        """Whether a 16-bit server that gave every token the same log-prob to the last bit cannot have received the
        update. Where log-probs of a small random model changed by 2.5e-6 in float32, 0.05 of those in bfloat16 did by
        the one kernel and 0.29 by another, and all from 1e-4 on."""
        return self.share >= 0.5 and self.nats >= 1e-4


@dataclass(frozen=True, slots=True)
class Experiments:
    """Comparisons between a trainer and its servers."""

    engine: TrainEngine
    """The trainer; its weights are those that the servers should hold."""
    inference: InferenceEngine
    """Client of the servers."""
    loop: LoopThread
    """Runs the client's coroutines."""
    timeout: float
    """Seconds for one question to the servers."""

    @staticmethod
    def compared(rows: TensorDict) -> torch.Tensor:
        """[..., T]: tokens that were generated; of rows that nobody sampled (supervised ones) those learned from."""
        generated = rows["versions"] >= 0
        return generated | (rows["loss_mask"] & ~generated.any(-1, keepdim=True))

    def trainer_logprobs(self, rows: TensorDict) -> torch.Tensor:
        """The trainer's log-probs at the rows' temperatures, [B, T]."""
        return self.engine.forward(rows, lambda outputs, _: outputs.logprobs)

    def unadapted(self, rows: TensorDict) -> torch.Tensor | None:
        """The same with the base weights alone; None where no adapter is trained."""
        return self._within(self.engine.without_adapter(), rows)

    def as_served(self, rows: TensorDict) -> torch.Tensor | None:
        """The same with the weights as they are published; None where the trainer cannot, or always does."""
        return self._within(self.engine.as_served(), rows)

    def _within(self, block: AbstractContextManager[None] | None, rows: TensorDict) -> torch.Tensor | None:
        if block is None:
            return None
        with block:
            return self.trainer_logprobs(rows)

    def compare(self, trainer: torch.Tensor, server: torch.Tensor | None, mask: torch.Tensor) -> LogprobGap | None:
        """Over all replicas; None without tokens, or where there are none of theirs."""
        if server is None:
            return None
        gap = LogprobGap.from_differences(
            torch.cat([part["d"] for part in self._from_leaders({"d": (trainer - server)[mask].double()})])
        )
        # rank 0's, so that not even rounding can make two ranks decide differently
        told = self.engine.parallel.broadcast_json(gap and asdict(gap))
        return told and LogprobGap(**told)

    def lag_statistics(
        self, rows: TensorDict, server_logprobs: torch.Tensor, after: torch.Tensor, before: torch.Tensor
    ) -> list[list[float]]:
        """What `lag.LagTest.look` takes, over the generated tokens of the rows of all replicas."""
        pairs, generated = ((server_logprobs, after), (server_logprobs, before), (after, before)), self.compared(rows)
        sums = torch.stack([((x - y).double().square() * generated).sum(-1) for x, y in pairs], -1)
        parts = self._from_leaders({"groups": rows["group_ids"], "sums": sums})
        names, place = torch.unique(torch.cat([part["groups"] for part in parts]), return_inverse=True)
        total = torch.zeros(len(names), len(pairs), dtype=torch.float64)
        return total.index_add(0, place, torch.cat([part["sums"] for part in parts])).tolist()

    def logprob_change(
        self, rows: TensorDict, before: torch.Tensor | None, after: torch.Tensor | None
    ) -> LogprobChange:
        """What changed of the generated tokens' log-probs, over all replicas: rank 0's figures; nothing, where there
        are none."""
        if before is None or after is None:
            return LogprobChange()
        parts = self._from_leaders({"d": (after - before)[self.compared(rows)].double()})
        d = torch.cat([part["d"] for part in parts])
        found = (
            LogprobChange((d != 0).double().mean().item(), d.square().mean().sqrt().item())
            if len(d)
            else LogprobChange()
        )
        return LogprobChange(*self.engine.parallel.broadcast_json(found))

    def ask_scores(self, rows: TensorDict, score: Score) -> Asked:
        """Ask the servers what they say of the rows' tokens, without waiting for it: `scores` does."""
        told = zip(rows["input_ids"], lengths(rows), rows["temperature"], strict=True)
        return self._request_on_leader(score(ids[:size].tolist(), float(heat)) for ids, size, heat in told)

    def scores(self, rows: TensorDict, score: Score, asked: Asked = None) -> torch.Tensor:
        """What the servers say of the rows' tokens, [B, T].

        Args:
            asked: of `ask_scores`; None: they are asked now.

        Raises:
            RLError: on every rank, if the servers do not answer one of them.
        """
        mask = rows["attention_mask"]

        def padded(found: list[list[float]]) -> Tensors:
            values = torch.tensor([value for row in found for value in row])
            return {"scores": torch.zeros(mask.shape).masked_scatter(mask, values)}

        return self._broadcast_from_leader(
            asked or self.ask_scores(rows, score), padded, "scoring rows on the servers"
        )["scores"]

    def regenerate(self, rows: TensorDict, new: bool = False) -> TensorDict:
        """Let the servers answer the rows' prompts again, now: rows of fresh tokens.

        Args:
            new: turn each prompt round first, so that no server can have its beginning in a cache.

        Raises:
            RLError: on every rank, if they do not.
        """

        async def answer(seed: int, row: TensorDict) -> Trajectory:
            generated, temperature = self.compared(row), float(row["temperature"])
            prompt = row["input_ids"][: int(generated.long().argmax())].tolist()
            most = min(COMPLETION_TOKENS, int(generated.sum()))
            generation = GenerationConfig(max_new_tokens=most, temperature=temperature, ignore_eos=True)
            request = ModelRequest(prompt[::-1] if new else prompt, generation, seed=seed)
            return from_response(await self.inference.agenerate(request), reward=0.0, temperature=temperature)

        questions = (answer(seed, row) for seed, row in enumerate(rows[self.compared(rows).any(-1)]))
        made = self._broadcast_from_leader(
            self._request_on_leader(questions),
            lambda found: stack(found).to_dict(),
            "answering prompts for the gap gate",
        )
        return TensorDict(made, batch_size=made["input_ids"].shape[:1])

    def gap_of_regenerated(self, rows: TensorDict, new: bool) -> LogprobGap | None:
        """Between what servers record for `answers` and what the trainer says of them; None without."""
        made = self.attempt(self.regenerate, rows, new)
        return (
            None if made is None else self.compare(self.trainer_logprobs(made), made["logprobs"], made["versions"] >= 0)
        )

    def attempt[T](self, work: Callable[..., T], *arguments: Any) -> T | None:
        """What a measurement gives; None, on every rank, where it cannot be made."""
        try:
            return work(*arguments)
        except FAILED as error:
            log.info("this experiment of the gap gate was not possible: %s", error)
            return None

    def _from_leaders(self, mine: Tensors) -> list[Tensors]:
        """What the head of each replica has, in order of dp_rank."""
        parallel = self.engine.parallel
        parts = parallel.gather_tensors(mine if parallel.is_dp_leader else {}, all_ranks=True)
        return [part for part in parts if part]

    def _request_on_leader(self, questions: Iterable[Awaitable[Any]]) -> Asked:
        """Heads alone make and ask the questions."""

        async def together() -> list[Any]:
            return await asyncio.gather(*questions)

        if not self.engine.parallel.is_dp_leader:
            return None
        try:
            return self.loop.submit(together())
        except RLError as error:  # the loop is dead: `_told` raises it, on every rank
            asked: Future[list[Any]] = Future()
            asked.set_exception(error)
            return asked

    def _broadcast_from_leader(self, asked: Asked, pack: Callable[[list[Any]], Tensors], doing: str) -> Tensors:
        """What the head of this rank's replica got from the servers; an RLError on every rank, if one got nothing."""
        parallel, mine = self.engine.parallel, Tensors()
        with parallel.agree_on_errors(doing):
            if asked is not None:
                mine = pack(self.loop.wait(asked, doing, self.timeout))
        return self._from_leaders(mine)[parallel.dp_rank]

    def temperature(
        self, rows: TensorDict, server_logprobs: torch.Tensor, mask: torch.Tensor
    ) -> tuple[float, LogprobGap]:
        """The one temperature, 0.1 to 10, at which the trainer comes nearest to some log-probs, and how near."""

        def at(value: float) -> tuple[float, LogprobGap]:
            changed = rows.clone().update({"temperature": torch.full_like(rows["temperature"], value)})
            gap = self.compare(self.trainer_logprobs(changed), server_logprobs, mask)
            assert gap is not None, "asked only where there is a gap to explain"
            return value, gap

        low, high, best = 0.1, 10.0, 0
        for _ in range(ROUNDS):
            values = torch.logspace(math.log10(low), math.log10(high), POINTS, dtype=torch.float64).tolist()
            tried = [at(value) for value in values]
            best = min(range(POINTS), key=lambda point: tried[point][1].mean_abs)
            low, high = values[max(best - 1, 0)], values[min(best + 1, POINTS - 1)]
        return tried[best]

    def receipts(
        self, sent: WeightReceipt | None, before: WeightReceipt | None, server: str | None = None
    ) -> Receipts | None:
        """The live tensors of a server (None: of the one that is furthest off) against the trainer's receipts of this
        version and of the one before; None where they have no checksums of these. Rank 0 asks."""
        found, can = None, self.inference.capabilities
        able = can.checksums and can.live_checksums
        if able and self.engine.parallel.is_main and sent is not None and sent.checksums:
            live = self.attempt(self.loop.run, self.inference.live_receipts(server), self.timeout)
            found = max(
                (Receipts.from_pair(receipt, sent, before) for receipt in live or ()),
                key=lambda receipts: len(receipts.differing),
                default=None,
            )
        told = self.engine.parallel.broadcast_json(found and asdict(found))
        return told and Receipts(**told)
