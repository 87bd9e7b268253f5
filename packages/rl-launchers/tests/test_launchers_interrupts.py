"""Tests of `Interrupts`: signals during waits, and repeated signals."""

import signal
import subprocess
import sys

import pytest

from rl_launchers.supervise.interrupts import Interrupts

AT_EVERY_LINE = """
import signal, sys
from rl_launchers.supervise.interrupts import Interrupts
for line in range(1, 80):
    with Interrupts(0) as interrupts:
        lines = 0

        def trace(frame, event, argument):
            global lines
            lines += 1
            if lines == line:
                interrupts._receive(signal.SIGTERM, frame)
            return trace

        sys.settrace(trace)
        interrupts.wait(1e-3)
        sys.settrace(None)
"""


def test_wait_with_signal_at_any_line_returns():
    subprocess.run([sys.executable, "-c", AT_EVERY_LINE], check=True, timeout=100)


def test_interrupts_signals_within_window_count_as_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, interrupts = [0.0], Interrupts(0)
    with monkeypatch.context() as patch:
        patch.setattr("rl_launchers.supervise.interrupts.time.monotonic", lambda: clock[0])
        for clock[0] in (1.0, 1.2, 5.0, 5.2):  # pairs, as from a terminal and a parent that forwards the signal
            interrupts._receive(signal.SIGINT, None)

    assert interrupts.requests == 2
