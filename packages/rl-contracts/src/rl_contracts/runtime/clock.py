"""Time as a dependency, so that the same code runs on the real and on a simulated clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, Protocol


class Clock(Protocol):
    """What asynchronous code may know of time. `rl_contracts.testing.SimulatedClock` is the other implementation."""

    def now(self) -> float:
        """Seconds since an arbitrary fixed moment; never goes backwards."""

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds` of this clock's time."""


class SystemClock:
    """The real clock."""

    now = staticmethod(time.monotonic)
    """`time.monotonic()`, in seconds; the builtin itself, because every episode asks about ten times."""

    def sleep(self, seconds: float) -> Coroutine[Any, Any, None]:
        """`asyncio.sleep` itself, so that a sleeper is one coroutine and not two."""
        return asyncio.sleep(seconds)
