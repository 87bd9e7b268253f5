"""The timer of the null engine completes each wait at its time, regardless of other waits and pauses."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_contracts.errors import RLError
from rl_contracts.runtime.clock import SystemClock
from rl_contracts.testing import SimulatedClock
from rl_contracts.testing.null_timeline import Timeline


def quarters(minimum: int, maximum: int) -> st.SearchStrategy[float]:
    """Return a strategy for seconds in multiples of 0.25, which floats represent exactly."""
    return st.integers(minimum, maximum).map(lambda steps: steps / 4)


@settings(max_examples=150, deadline=None)
@given(
    waits=st.lists(st.tuples(quarters(0, 40), quarters(0, 40), st.booleans()), min_size=1, max_size=12),
    pauses=st.lists(st.tuples(quarters(0, 40), quarters(1, 12)), max_size=4),
)
def test_after_completes_after_exact_generation_time(
    waits: list[tuple[float, float, bool]], pauses: list[tuple[float, float]]
) -> None:
    clock = SimulatedClock()
    timeline = Timeline(clock, 0)
    differences: list[tuple[float, float]] = []

    async def wait(start: float, seconds: float, is_cancelled: bool) -> None:
        await clock.sleep(start + 0.125)  # so that no wait begins at the moment of a pause
        began = timeline.generated_until_now()
        future = timeline.after(seconds)
        if is_cancelled:
            future.cancel()
            return
        await future
        elapsed = timeline.generated_until_now() - began
        if elapsed != seconds:
            differences.append((seconds, elapsed))

    async def pause(number: int, start: float, seconds: float) -> None:
        await clock.sleep(start)
        timeline.pause(str(number))
        await clock.sleep(seconds)
        timeline.resume(str(number))

    async def main() -> None:
        await asyncio.gather(
            *(wait(*entry) for entry in waits), *(pause(number, *entry) for number, entry in enumerate(pauses))
        )

    clock.run(main())

    assert differences == []


def test_after_zero_seconds_is_done_during_pause() -> None:
    async def main() -> None:
        timeline = Timeline(SimulatedClock(), 0)
        timeline.pause("test")
        assert timeline.after(0.0).done()
        assert not timeline.after(1.0).done()

    asyncio.run(main())


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_after_on_new_loop_ignores_waits_of_closed_loop(turns: int) -> None:
    """The number of turns decides whether the timer runs before the first loop ends."""
    timeline = Timeline(SystemClock(), 0)

    async def start_wait() -> asyncio.Task[None]:
        waiting = asyncio.ensure_future(_await(timeline, 60.0))
        for _ in range(turns):
            await asyncio.sleep(0)
        return waiting

    assert asyncio.run(start_wait()).cancelled()
    asyncio.run(asyncio.wait_for(_await(timeline, 0.1), 10.0))


def test_clock_error_reaches_all_waits() -> None:
    class BrokenClock(SimulatedClock):
        async def sleep(self, seconds: float) -> None:
            raise RLError("the clock is broken")

    async def main() -> list[BaseException | None]:
        timeline = Timeline(BrokenClock(), 0)
        waiting = [timeline.after(seconds) for seconds in (2.0, 1.0)]
        return await asyncio.gather(*waiting, return_exceptions=True)

    assert [str(error) for error in asyncio.run(main())] == ["the clock is broken"] * 2


def test_timer_has_empty_context() -> None:
    caller: ContextVar[str | None] = ContextVar("caller", default=None)

    async def main() -> list[str | None]:
        caller.set("an episode")
        Timeline(SimulatedClock(), 0).after(1.0)
        timers = [task for task in asyncio.all_tasks() if task.get_name() == "null-engine-timer"]
        return [timer.get_context().get(caller) for timer in timers]

    assert asyncio.run(main()) == [None]


async def _await(timeline: Timeline, seconds: float) -> None:
    await timeline.after(seconds)
