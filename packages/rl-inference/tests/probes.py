"""Health probes with other intervals and timeouts than in a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rl_inference.client import health, transport

NEVER = 1e6
"""Interval in seconds between probes that no test reaches. Probes after a failure remain."""


@contextmanager
def probes(interval: float = health.PROBE_INTERVAL, timeout: float = transport.PROBE_TIMEOUT) -> Iterator[None]:
    """Set the seconds between two probes of a server, and the seconds to wait for a response."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(health, "PROBE_INTERVAL", interval)
        patch.setattr(transport, "PROBE_TIMEOUT", timeout)
        yield
