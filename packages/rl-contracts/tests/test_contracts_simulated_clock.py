"""The simulated clock: order of sleepers, idle loops, cancelled sleepers, deadlocks."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_contracts.errors import ConfigError, StalledError
from rl_contracts.testing import SimulatedClock


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.001, 100.0), min_size=1, max_size=20))
def test_sleepers_wake_in_order_of_time_then_arrival(delays: list[float]) -> None:
    clock = SimulatedClock()
    woken: list[tuple[float, int]] = []

    async def sleeper(index: int) -> None:
        await clock.sleep(delays[index])
        woken.append((clock.now(), index))

    async def main() -> None:
        await asyncio.gather(*(sleeper(i) for i in range(len(delays))))

    clock.run(main())

    assert woken == sorted((d, i) for i, d in enumerate(delays))


def test_call_later_runs_between_sleepers() -> None:
    clock, events = SimulatedClock(), list[tuple[float, str]]()

    async def main() -> None:
        clock.call_later(2.0, lambda: events.append((clock.now(), "called")))
        for _ in range(3):
            await clock.sleep(1.5)
            events.append((clock.now(), "woken"))

    clock.run(main())
    assert events == [(1.5, "woken"), (2.0, "called"), (3.0, "woken"), (4.5, "woken")]


async def test_time_does_not_advance_while_a_task_is_ready() -> None:
    clock = SimulatedClock()
    times: list[float] = []

    async def busy() -> None:
        for _ in range(100):
            await asyncio.sleep(0)
            times.append(clock.now())

    await asyncio.gather(clock.sleep(1.0), busy())

    assert set(times) == {0.0}


async def test_cancelled_sleeper_does_not_advance_time() -> None:
    clock = SimulatedClock()
    long_sleepers = [asyncio.ensure_future(clock.sleep(1e6)) for _ in range(500)]
    await asyncio.sleep(0)

    for task in long_sleepers:
        task.cancel()
    await asyncio.gather(*long_sleepers, return_exceptions=True)
    await clock.sleep(2.0)

    assert clock.now() == 2.0
    assert clock.sleepers == 0


def test_run_deadlock_raises_stalled_error_naming_the_task() -> None:
    clock = SimulatedClock()

    async def waits_forever() -> None:
        await clock.sleep(7.0)
        await asyncio.Event().wait()

    with pytest.raises(StalledError, match=r"7 s: deadlock.*waits_forever"):
        clock.run(waits_forever())


def test_hold_stops_time_and_deadlock_detection_during_thread() -> None:
    clock = SimulatedClock()
    release = threading.Event()

    async def main() -> float:
        sleeper = asyncio.ensure_future(clock.sleep(10.0))
        with clock.hold():
            worker = asyncio.get_running_loop().run_in_executor(None, release.wait, 5.0)
            for _ in range(10):
                await asyncio.sleep(0)
            release.set()
            await worker
            before = clock.now()
        await sleeper
        return before

    assert clock.run(main()) == 0.0
    assert clock.now() == 10.0


def test_sleep_on_second_loop_while_first_sleeps_raises() -> None:
    clock = SimulatedClock()
    first = asyncio.SelectorEventLoop()
    sleeping = first.create_task(clock.sleep(1.0))
    first.call_soon(first.stop)
    first.run_forever()

    with pytest.raises(ConfigError, match="two event loops"):
        asyncio.run(clock.sleep(1.0))

    first.run_until_complete(sleeping)
    first.close()


def test_sleep_on_uvloop_raises() -> None:
    uvloop = pytest.importorskip("uvloop")

    with pytest.raises(ConfigError, match=r"asyncio.*found uvloop"):
        uvloop.run(SimulatedClock().sleep(1.0))


@pytest.mark.nightly
def test_hundred_thousand_sleepers_are_cheap() -> None:
    clock, started = SimulatedClock(), time.monotonic()

    async def main() -> None:
        await asyncio.gather(*(clock.sleep(1.0 + i % 977) for i in range(100_000)))

    clock.run(main())

    assert clock.now() == 977.0
    assert time.monotonic() - started < 20.0
