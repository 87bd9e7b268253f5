"""Measurements of the log-prob gap gate: the comparisons of every step, and the experiments that look for a cause.

Everything here is collective: all ranks make the same calls and get the same results. The data-parallel leader sends
the requests and shares the replies with the other ranks of its replica, so that the ranks cannot disagree.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from rl_contracts.batch.image_entries import images_of
from rl_contracts.batch.trajectory import (
    Trajectory,
    batch_from_tensors,
    batch_to_tensors,
    from_response,
    lengths,
    stack,
)
from rl_contracts.config import GenerationConfig
from rl_contracts.data import ModelRequest
from rl_contracts.errors import InferenceError, RLError
from rl_contracts.runtime.logging import get_logger
from rl_trainers.weight_sync.gap.diagnosis import Receipts
from rl_trainers.weight_sync.gap.divergence import LogprobGap

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_contracts.data import WeightReceipt
    from rl_contracts.engine import TrainEngine
    from rl_contracts.images import Image
    from rl_contracts.inference import InferenceEngine
    from rl_contracts.runtime.aio import LoopThread

log = get_logger("trainers.gap")

Tensors = dict[str, torch.Tensor]
type PendingReplies = Future[list[Any]] | None
"""Replies to requests sent by a data-parallel leader, or None on the other ranks of its replica."""
Score = Callable[[list[int], float], Awaitable[list[float]]]
"""`(token ids, temperature) -> log-probs`: a client's `score` or `score_previous_weights`."""
MEASUREMENT_ERRORS = (RLError, TimeoutError)
"""Errors that a measurement raises, on every rank, if it cannot be made."""

ROUNDS, POINTS = 6, 9
"""Number of rounds of the temperature search, and number of temperatures per round.

Each round searches between the two neighbors of the best temperature of the previous round.
"""
REPLY_SECONDS = 60.0
"""Seconds to wait for the replies to one batch of requests. A few sequences take seconds; training waits as well."""
COMPLETION_TOKENS = 16
"""Maximum number of tokens per completion that the gate requests."""


class LogprobChange(NamedTuple):
    """Change of log-probs by an update."""

    changed_fraction: float = 0.0
    """Fraction of the tokens whose log-prob changed at all."""
    rms: float = 0.0
    """Root mean square of the changes, in nats."""

    @property
    def is_clear(self) -> bool:
        """True if the change is large enough to change some log-probs of any 16-bit server that received the update.

        On a small random model, float32 changes of 2.5e-6 changed 5% of the bfloat16 log-probs with one kernel, and 29%
        with another. Changes of 1e-4 and above changed all bfloat16 log-probs.
        """
        return self.changed_fraction >= 0.5 and self.rms >= 1e-4


@dataclass(frozen=True, slots=True)
class Experiments:
    """Comparisons between a trainer and its servers."""

    engine: TrainEngine
    """The trainer, with the weights that the servers should hold."""
    inference: InferenceEngine
    """Client of the servers."""
    loop: LoopThread
    """Thread that runs the client's coroutines."""
    image_token: int | None = None
    """Token that a vision-language model replaces by image features; None for a model of texts."""

    @staticmethod
    def compared(sequences: TensorDict) -> torch.Tensor:
        """Return the mask of the tokens to compare, bool [..., T].

        These are the generated tokens. In sequences without generated tokens, as in supervised training, these are the
        trained tokens.
        """
        generated = sequences["versions"] >= 0
        return generated | (sequences["loss_mask"] & ~generated.any(-1, keepdim=True))

    def trainer_logprobs(self, sequences: TensorDict) -> torch.Tensor:
        """Return the trainer's log-probs at the sequences' temperatures, [B, T]."""
        return self.engine.forward(sequences, lambda outputs, _: outputs.logprobs)

    def unadapted(self, sequences: TensorDict) -> torch.Tensor | None:
        """Return the trainer's log-probs with the base weights alone, or None if no adapter is trained."""
        return self._within(self.engine.without_adapter(), sequences)

    def as_served(self, sequences: TensorDict) -> torch.Tensor | None:
        """Return the trainer's log-probs with the weights rounded to the served dtype.

        None if the engine cannot do this, or if its weights already have that precision.
        """
        return self._within(self.engine.as_served(), sequences)

    def _within(self, block: AbstractContextManager[None] | None, sequences: TensorDict) -> torch.Tensor | None:
        if block is None:
            return None
        with block:
            return self.trainer_logprobs(sequences)

    def compare(self, trainer: torch.Tensor, server: torch.Tensor | None, mask: torch.Tensor) -> LogprobGap | None:
        """Return the log-prob gap over all replicas, or None without tokens or without server log-probs."""
        if server is None:
            return None
        gap = LogprobGap.from_differences(
            torch.cat([tensors["d"] for tensors in self._from_leaders({"d": (trainer - server)[mask].double()})])
        )
        # all ranks use rank 0's result, so that rounding cannot make two ranks decide differently
        fields = self.engine.parallel.broadcast_json(gap and asdict(gap))
        return fields and LogprobGap(**fields)

    def lag_statistics(
        self, sequences: TensorDict, server_logprobs: torch.Tensor, after: torch.Tensor, before: torch.Tensor
    ) -> list[list[float]]:
        """Return the sums per group that `lag.LagTest.add` takes, over the compared tokens of all replicas."""
        pairs, mask = ((server_logprobs, after), (server_logprobs, before), (after, before)), self.compared(sequences)
        sums = torch.stack([((x - y).double().square() * mask).sum(-1) for x, y in pairs], -1)
        shards = self._from_leaders({"groups": sequences["group_ids"], "sums": sums})
        names, index = torch.unique(torch.cat([shard["groups"] for shard in shards]), return_inverse=True)
        total = torch.zeros(len(names), len(pairs), dtype=torch.float64)
        return total.index_add(0, index, torch.cat([shard["sums"] for shard in shards])).tolist()

    def logprob_change(
        self, sequences: TensorDict, before: torch.Tensor | None, after: torch.Tensor | None
    ) -> LogprobChange:
        """Return how the log-probs of the compared tokens changed, over all replicas.

        All ranks return rank 0's result. Without log-probs or tokens, the result is `LogprobChange()`.
        """
        if before is None or after is None:
            return LogprobChange()
        shards = self._from_leaders({"d": (after - before)[self.compared(sequences)].double()})
        d = torch.cat([shard["d"] for shard in shards])
        change = (
            LogprobChange((d != 0).double().mean().item(), d.square().mean().sqrt().item())
            if len(d)
            else LogprobChange()
        )
        return LogprobChange(*self.engine.parallel.broadcast_json(change))

    def ask_scores(self, sequences: TensorDict, score: Score) -> PendingReplies:
        """Request the servers' log-probs of the sequences without waiting; `scores` waits for them."""

        async def score_text(ids: torch.Tensor, temperature: torch.Tensor, images: tuple[Image, ...]) -> list[float]:
            if images:
                raise InferenceError("servers score only sequences without images; omit the others.")
            return await score(ids.tolist(), float(temperature))

        inputs = zip(
            sequences["input_ids"],
            lengths(sequences),
            sequences["temperature"],
            images_of(sequences),
            strict=True,
        )
        return self._request_on_leader(score_text(ids[:size], heat, images) for ids, size, heat, images in inputs)

    def scores(self, sequences: TensorDict, score: Score, pending: PendingReplies = None) -> torch.Tensor:
        """Return the servers' log-probs of the sequences, [B, T].

        Args:
            sequences: the sequences to score.
            score: method of the client that scores one sequence.
            pending: the result of `ask_scores`, or None to send the requests now.

        Raises:
            RLError: the servers did not reply to one of the requests; raised on every rank.
        """
        mask = sequences["attention_mask"]

        def padded(replies: list[list[float]]) -> Tensors:
            values = torch.tensor([value for reply in replies for value in reply])
            return {"scores": torch.zeros(mask.shape).masked_scatter(mask, values)}

        return self._broadcast_from_leader(
            pending or self.ask_scores(sequences, score), padded, "scoring sequences on the servers"
        )["scores"]

    def regenerate(self, sequences: TensorDict, new: bool = False) -> TensorDict:
        """Generate completions of the sequences' prompts on the servers now, as tokens of the current version.

        Completions with a placeholder of an image are omitted: it has no image, so the trainer cannot read it.

        Args:
            sequences: the sequences with the prompts.
            new: whether to reverse each prompt, so that no server can have its prefix in a cache. Prompts with images
                cannot be reversed, so their sequences are omitted.

        Raises:
            RLError: the servers did not reply to one of the requests; raised on every rank.
        """

        async def generate(seed: int, sequence: TensorDict, images: tuple[Image, ...]) -> Trajectory:
            generated, temperature = self.compared(sequence), float(sequence["temperature"])
            prompt = sequence["input_ids"][: int(generated.long().argmax())].tolist()
            max_tokens = min(COMPLETION_TOKENS, int(generated.sum()))
            generation = GenerationConfig(max_new_tokens=max_tokens, temperature=temperature, ignore_eos=True)
            request = ModelRequest(prompt[::-1] if new else prompt, generation, seed=seed, images=images)
            response = await self.inference.agenerate(request)
            return replace(from_response(response, reward=0.0, temperature=temperature), images=images)

        rows, is_generated = images_of(sequences), self.compared(sequences).any(-1).tolist()
        requests = (
            generate(index, sequences[index], images)
            for index, images in enumerate(rows)
            if is_generated[index] and not (new and images)
        )
        tensors = self._broadcast_from_leader(
            self._request_on_leader(requests),
            lambda trajectories: batch_to_tensors(stack(list(filter(self._is_readable, trajectories)))),
            "generating completions for the log-prob gap gate",
        )
        return batch_from_tensors(tensors)

    def _is_readable(self, trajectory: Trajectory) -> bool:
        """Return whether the completion has no placeholder of an image."""
        return self.image_token is None or self.image_token not in trajectory.input_ids[trajectory.versions >= 0]

    def gap_of_regenerated(self, sequences: TensorDict, new: bool) -> LogprobGap | None:
        """Return the log-prob gap of completions that `regenerate` generates now, or None if `regenerate` fails."""
        generated = self.attempt(self.regenerate, sequences, new)
        return (
            None
            if generated is None
            else self.compare(self.trainer_logprobs(generated), generated["logprobs"], generated["versions"] >= 0)
        )

    def attempt[T](self, work: Callable[..., T], *arguments: Any) -> T | None:
        """Return the result of a measurement, or None on every rank if it cannot be made."""
        try:
            return work(*arguments)
        except MEASUREMENT_ERRORS as error:
            log.info("the log-prob gap gate skips an experiment that failed: %s", error)
            return None

    def _from_leaders(self, tensors: Tensors) -> list[Tensors]:
        """Return the tensors of the data-parallel leaders, in order of dp_rank."""
        parallel = self.engine.parallel
        shards = parallel.gather_tensors(tensors if parallel.is_dp_leader else {}, all_ranks=True)
        return [shard for shard in shards if shard]

    def _request_on_leader(self, requests: Iterable[Awaitable[Any]]) -> PendingReplies:
        """Send the requests; only data-parallel leaders create and send them."""

        async def together() -> list[Any]:
            return await asyncio.gather(*requests)

        if not self.engine.parallel.is_dp_leader:
            return None
        try:
            return self.loop.submit(together())
        except RLError as error:  # the loop is dead: `_broadcast_from_leader` raises this on every rank
            pending: Future[list[Any]] = Future()
            pending.set_exception(error)
            return pending

    def _broadcast_from_leader(
        self, pending: PendingReplies, pack: Callable[[list[Any]], Tensors], doing: str
    ) -> Tensors:
        """Return the packed replies that the leader of this rank's replica received.

        Raises:
            RLError: a leader did not receive all replies; raised on every rank.
        """
        parallel, tensors = self.engine.parallel, Tensors()
        with parallel.agree_on_errors(doing):
            if pending is not None:
                tensors = pack(self.loop.wait(pending, doing, REPLY_SECONDS))
        return self._from_leaders(tensors)[parallel.dp_rank]

    def temperature(
        self, sequences: TensorDict, server_logprobs: torch.Tensor, mask: torch.Tensor
    ) -> tuple[float, LogprobGap]:
        """Return the temperature, 0.1 to 10, with the smallest gap between trainer and server, and this gap."""

        def at(value: float) -> tuple[float, LogprobGap]:
            changed = sequences.clone().update({"temperature": torch.full_like(sequences["temperature"], value)})
            gap = self.compare(self.trainer_logprobs(changed), server_logprobs, mask)
            assert gap is not None, "the search is only called with a gap to explain"
            return value, gap

        low, high, best = 0.1, 10.0, 0
        for _ in range(ROUNDS):
            values = torch.logspace(math.log10(low), math.log10(high), POINTS, dtype=torch.float64).tolist()
            tried = [at(value) for value in values]
            best = min(range(POINTS), key=lambda point: tried[point][1].mean_abs)
            low, high = values[max(best - 1, 0)], values[min(best + 1, POINTS - 1)]
        return tried[best]

    def receipts(
        self, sent: WeightReceipt | None, previous: WeightReceipt | None, server: str | None = None
    ) -> Receipts | None:
        """Compare the live tensors of a server with the trainer's receipts of this version and the previous one.

        Rank 0 makes the request.

        Args:
            sent: the trainer's receipt of this version.
            previous: the trainer's receipt of the previous version.
            server: the server to check; None returns the server with the most differing tensors.

        Returns:
            the comparison, or None if the servers have no checksums of live tensors.
        """
        receipts, can = None, self.inference.capabilities
        able = can.checksums and can.live_checksums
        if able and self.engine.parallel.is_main and sent is not None and sent.checksums:
            live = self.attempt(self.loop.run, self.inference.live_receipts(server), REPLY_SECONDS)
            receipts = max(
                (Receipts.from_pair(receipt, sent, previous) for receipt in live or ()),
                key=lambda receipts: len(receipts.differing),
                default=None,
            )
        fields = self.engine.parallel.broadcast_json(receipts and asdict(receipts))
        return fields and Receipts(**fields)
