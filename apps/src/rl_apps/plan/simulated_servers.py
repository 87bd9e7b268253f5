"""Inference servers that answer after the time that rates say, on a simulated clock.

A server passes over all of its running answers again and again, and each pass gives each of them a token. A pass takes

    decode_seconds + decode_seconds_per_answer * answers + decode_seconds_per_context_token * tokens of context

so that between two events (an answer begins or ends, the server stands still) the number of passes is a quadratic
function of time that can be solved: a server costs one timer per answer and nothing per token.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf, sqrt

from rl_apps.plan.rates import Rates
from rl_contracts.data import ModelRequest, ModelResponse, StopReason
from rl_contracts.testing import NullInferenceEngine, SimulatedClock

TOGETHER = 1e-6
"""Tokens by which an answer may be short at its end, for rounding."""


@dataclass(slots=True)
class _Answer:
    """What a server was asked for."""

    prompt: int
    tokens: int
    unread: int
    """Tokens of its prompt that no other answer of the group has had read: they stay in the cache."""
    done: asyncio.Future[None]


@dataclass(eq=False, slots=True)
class Server:
    """One server: what it generates, and how far it is."""

    rates: Rates
    clock: SimulatedClock
    busy: float = 0.0
    """Seconds in which it had answers and did not stand still for something else."""
    generated: float = 0.0
    """Tokens."""
    answering: float = 0.0
    """Seconds of all answers that were generated, added up."""
    _waiting: deque[_Answer] = field(default_factory=deque)
    _running: list[tuple[float, int, _Answer]] = field(default_factory=list)
    _order: Iterator[int] = field(default_factory=count)
    _passes: float = 0.0
    _context: float = 0.0
    _since: float = 0.0
    _still_until: float = 0.0
    _alarm: float = inf
    _planned: bool = False

    def ask(self, answer: _Answer) -> None:
        """Begin an answer as soon as there is a place."""
        self._waiting.append(answer)
        self._plan_soon()

    def stand_still(self, seconds: float) -> None:
        """Generate nothing for so long, after what it stands still for already."""
        self._move()
        self._still_until = max(self._still_until, self._since) + seconds
        self._plan_soon()

    def recompute(self) -> None:
        """Read the whole context of all running answers again."""
        self._move()
        self.stand_still(self._context / self.rates.prefill_tokens_per_s)

    def so_far(self) -> tuple[float, float, float]:
        """`busy`, `generated` and `answering` until now."""
        self._move()
        return self.busy, self.generated, self.answering

    def _pass_seconds(self) -> tuple[float, float]:
        """Seconds of the next pass, and half of what each further one takes more."""
        rates, answers = self.rates, len(self._running)
        seconds = rates.decode_seconds + rates.decode_seconds_per_answer * answers
        per_token = rates.decode_seconds_per_context_token
        return seconds + per_token * self._context, per_token * answers / 2

    def _move(self) -> None:
        """Generate what there was time for since this was last called."""
        now, begin, answers = self.clock.now(), max(self._since, self._still_until), len(self._running)
        self._since = now
        if not answers or now <= begin:
            return
        first, more = self._pass_seconds()
        passes = 2 * (now - begin) / (first + sqrt(first * first + 4 * more * (now - begin)))
        self._passes += passes
        self._context += passes * answers
        self.generated += passes * answers
        self.busy += now - begin
        self.answering += (now - begin) * answers

    def _plan_soon(self) -> None:
        """Many answers begin at the same moment: what comes next is looked at once."""
        if not self._planned:
            self._planned = True
            asyncio.get_running_loop().call_soon(self._plan)

    def _plan(self) -> None:
        """End what is complete, begin what waits, and set the alarm for the next end."""
        self._planned = False
        self._move()
        running = self._running
        while running and running[0][0] <= self._passes + TOGETHER:
            self._end(heapq.heappop(running)[2])
        while self._waiting and len(running) < self.rates.max_running:
            self._begin(self._waiting.popleft())
        if running:
            first, more = self._pass_seconds()
            passes = max(running[0][0] - self._passes, 0.0)
            when = max(self._since, self._still_until) + first * passes + more * passes * passes
            if when < self._alarm:
                self._alarm = when
                self.clock.call_later(when - self._since, partial(self._ring, when))

    def _ring(self, when: float) -> None:
        if self._alarm == when:  # else an earlier one was set, which looks for itself
            self._alarm = inf
        self._plan()

    def _begin(self, answer: _Answer) -> None:
        if answer.unread:
            self._still_until = max(self._still_until, self._since) + answer.unread / self.rates.prefill_tokens_per_s
        self._context += answer.prompt
        heapq.heappush(self._running, (self._passes + answer.tokens, next(self._order), answer))

    def _end(self, answer: _Answer) -> None:
        self._context -= answer.prompt + answer.tokens
        if not answer.done.done():
            answer.done.set_result(None)


class SimulatedServers(NullInferenceEngine):
    """All servers of a run, and the client that divides groups among them: a group goes, whole, to the server with the
    fewest open answers, as the client of real servers has it.

    `output_ids` of an answer is one number: how many tokens it would have.

    Args:
        servers: how many.
        rates: of each server, and the lengths of answers.
        longest: tokens of an answer at most.
        clock: the simulated one.
    """

    def __init__(self, servers: int, rates: Rates, longest: int, clock: SimulatedClock) -> None:
        super().__init__(clock=clock)
        self.rates, self.longest = rates, longest
        self.fleet = [Server(rates, clock) for _ in range(servers)]
        self._open = [0] * servers
        self._groups: dict[str, tuple[int, int]] = {}
        self._served = 0

    @property
    def version(self) -> int:
        return self._served

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        lengths, prompt = self.rates.lengths, len(request.input_ids)
        tokens = min(lengths[(request.seed or 0) % len(lengths)], self.longest)
        group = request.group or request.request_id
        unread = 0 if group in self._groups else prompt
        server = self._server_of(group)
        answer = _Answer(prompt, tokens, unread, asyncio.get_running_loop().create_future())
        server.ask(answer)
        try:
            await answer.done
        finally:
            self._leave(group)
        return ModelResponse(request.input_ids, [tokens], [0.0], [self._served], StopReason.STOP)

    async def publish(self, version: int, seconds: float, interrupt: str) -> None:
        """Serve another version after `seconds`; what runs goes on as `rollout.interrupt` says."""
        await self.clock.sleep(seconds)
        self._served = version
        if interrupt == "recompute":
            for server in self.fleet:
                server.recompute()

    def sleep_for(self, seconds: float) -> None:
        """Generate nothing, on any server, while a trainer has the same devices."""
        for server in self.fleet:
            server.stand_still(seconds)

    def _server_of(self, group: str) -> Server:
        """The group's server; the least busy one for a new group."""
        index, members = self._groups.get(group) or (self._open.index(min(self._open)), 0)
        self._open[index] += 1
        self._groups[group] = (index, members + 1)
        return self.fleet[index]

    def _leave(self, group: str) -> None:
        index, members = self._groups.pop(group)
        self._open[index] -= 1
        if members > 1:
            self._groups[group] = (index, members - 1)
