"""Time as a dependency, so that the same code runs on the real and on a simulated clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, Protocol


class Clock(Protocol):
    """Source of time for asynchronous code: `SystemClock` or `rl_contracts.testing.SimulatedClock`."""

    def now(self) -> float:
        """Return the seconds since an arbitrary fixed moment; never decreases."""

    async def sleep(self, seconds: float) -> None:
        """Wait until `seconds` of this clock's time have passed."""


class SystemClock:
    """The real clock."""

    now = staticmethod(time.monotonic)
    """`time.monotonic()`, in seconds. It is the builtin itself because every episode calls it about ten times."""

    def sleep(self, seconds: float) -> Coroutine[Any, Any, None]:
        """Return the coroutine of `asyncio.sleep`, so that a sleeper costs one coroutine and not two."""
        return asyncio.sleep(seconds)
