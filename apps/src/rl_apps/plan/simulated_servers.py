"""Simulated inference servers on a simulated clock; completions take the time that the rates give.

A server repeats decoding passes. Each pass generates one token for each running completion and takes

    decode_seconds + decode_seconds_per_completion * completions + decode_seconds_per_context_token * tokens of context

Between two events (a completion begins or ends, the server is paused), the elapsed time is a quadratic function of the
number of passes, so the number of passes has a closed form. The simulation needs one timer per completion and none per
token.
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
"""Rounding tolerance in tokens at the end of a completion."""


@dataclass(slots=True)
class _Completion:
    """Requested completion."""

    prompt: int
    tokens: int
    unread: int
    """Prompt tokens to prefill: 0 if another completion of the group has already put the prompt into the cache."""
    done: asyncio.Future[None]


@dataclass(eq=False, slots=True)
class Server:
    """State of one server."""

    rates: Rates
    clock: SimulatedClock
    busy: float = 0.0
    """Seconds in which the server had running completions and was not paused."""
    generated: float = 0.0
    """Number of generated tokens."""
    completing: float = 0.0
    """Sum of the generation seconds of all completions."""
    _waiting: deque[_Completion] = field(default_factory=deque)
    _running: list[tuple[float, int, _Completion]] = field(default_factory=list)
    _order: Iterator[int] = field(default_factory=count)
    _passes: float = 0.0
    _context: float = 0.0
    _advanced_at: float = 0.0
    _paused_until: float = 0.0
    _timer: float = inf
    _planned: bool = False

    def ask(self, answer: _Completion) -> None:
        """Queue a completion, which starts as soon as fewer than `max_running` run."""
        self._waiting.append(answer)
        self._plan_soon()

    def stand_still(self, seconds: float) -> None:
        """Pause generation for `seconds`, in addition to the current pause."""
        self._advance()
        self._paused_until = max(self._paused_until, self._advanced_at) + seconds
        self._plan_soon()

    def recompute(self) -> None:
        """Pause for the prefill of the context of all running completions."""
        self._advance()
        self.stand_still(self._context / self.rates.prefill_tokens_per_s)

    def totals(self) -> tuple[float, float, float]:
        """Return `busy`, `generated` and `completing` up to now."""
        self._advance()
        return self.busy, self.generated, self.completing

    def _pass_seconds(self) -> tuple[float, float]:
        """Return the seconds of the next pass, and half of the increase from each pass to the next."""
        rates, running = self.rates, len(self._running)
        seconds = rates.decode_seconds + rates.decode_seconds_per_completion * running
        per_token = rates.decode_seconds_per_context_token
        return seconds + per_token * self._context, per_token * running / 2

    def _advance(self) -> None:
        """Advance the state to now: add the passes that fit into the time since the last call."""
        now, begin, running = self.clock.now(), max(self._advanced_at, self._paused_until), len(self._running)
        self._advanced_at = now
        if not running or now <= begin:
            return
        first, half_increase = self._pass_seconds()
        passes = 2 * (now - begin) / (first + sqrt(first * first + 4 * half_increase * (now - begin)))
        self._passes += passes
        self._context += passes * running
        self.generated += passes * running
        self.busy += now - begin
        self.completing += (now - begin) * running

    def _plan_soon(self) -> None:
        """Schedule one call of `_plan`, since many completions begin at the same moment."""
        if not self._planned:
            self._planned = True
            asyncio.get_running_loop().call_soon(self._plan)

    def _plan(self) -> None:
        """End finished completions, begin waiting ones, and set a timer for the next end."""
        self._planned = False
        self._advance()
        running = self._running
        while running and running[0][0] <= self._passes + TOGETHER:
            self._end(heapq.heappop(running)[2])
        while self._waiting and len(running) < self.rates.max_running:
            self._begin(self._waiting.popleft())
        if running:
            first, half_increase = self._pass_seconds()
            passes = max(running[0][0] - self._passes, 0.0)
            when = max(self._advanced_at, self._paused_until) + first * passes + half_increase * passes * passes
            if when < self._timer:
                self._timer = when
                self.clock.call_later(when - self._advanced_at, partial(self._on_timer, when))

    def _on_timer(self, when: float) -> None:
        if self._timer == when:  # otherwise an earlier timer replaced this one
            self._timer = inf
        self._plan()

    def _begin(self, completion: _Completion) -> None:
        if completion.unread:
            self._paused_until = (
                max(self._paused_until, self._advanced_at) + completion.unread / self.rates.prefill_tokens_per_s
            )
        self._context += completion.prompt
        heapq.heappush(self._running, (self._passes + completion.tokens, next(self._order), completion))

    def _end(self, completion: _Completion) -> None:
        self._context -= completion.prompt + completion.tokens
        if not completion.done.done():
            completion.done.set_result(None)


class SimulatedServers(NullInferenceEngine):
    """Simulated servers of a run, and the client that routes groups to them.

    As with the client of real servers, all requests of a group go to one server: the one with the fewest open requests
    when the group begins. `output_ids` of a response contains one number, the number of tokens of the completion.

    Args:
        servers: number of servers.
        rates: rates of each server, and the completion lengths.
        longest: maximum number of tokens of a completion.
        clock: simulated clock.
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
        completion = _Completion(prompt, tokens, unread, asyncio.get_running_loop().create_future())
        server.ask(completion)
        try:
            await completion.done
        finally:
            self._leave(group)
        return ModelResponse(request.input_ids, [tokens], [0.0], [self._served], StopReason.STOP)

    async def publish(self, version: int, seconds: float, interrupt: str) -> None:
        """Serve `version` after `seconds`; running completions continue according to `rollout.interrupt`."""
        await self.clock.sleep(seconds)
        self._served = version
        if interrupt == "recompute":
            for server in self.fleet:
                server.recompute()

    def sleep_for(self, seconds: float) -> None:
        """Pause generation on all servers for `seconds`, while the trainer uses the same devices."""
        for server in self.fleet:
            server.stand_still(seconds)

    def _server_of(self, group: str) -> Server:
        """Return the server of the group, or the server with the fewest open requests for a new group."""
        index, members = self._groups.get(group) or (self._open.index(min(self._open)), 0)
        self._open[index] += 1
        self._groups[group] = (index, members + 1)
        return self.fleet[index]

    def _leave(self, group: str) -> None:
        index, members = self._groups.pop(group)
        self._open[index] -= 1
        if members > 1:
            self._groups[group] = (index, members - 1)
