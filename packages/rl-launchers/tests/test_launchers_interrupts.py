"""Tests of `Interrupts`: signals during waits, and repeated signals."""

import signal
import subprocess
import sys

import pytest

from rl_launchers.supervise.interrupts import Interrupted, Interrupts, SecondInterrupt

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


def test_interrupts_first_signal_sets_flag_second_raises_in_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of signals, as from a terminal and a parent that forwards the signal, count as one request."""
    previous, clock = signal.getsignal(signal.SIGTERM), [0.0]
    with Interrupts(0) as interrupts, monkeypatch.context() as patch:
        patch.setattr("rl_launchers.supervise.interrupts.time.monotonic", lambda: clock[0])
        interrupts.check()
        clock[0] = 1.0
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted) as caught:
            interrupts.check()
        assert caught.value.number == signal.SIGTERM
        with interrupts.raise_on_second():
            clock[0] = 1.2
            signal.raise_signal(signal.SIGTERM)
            assert interrupts.requests == 1
            clock[0] = 5.0
            with pytest.raises(SecondInterrupt) as second:
                signal.raise_signal(signal.SIGINT)
            assert second.value.number == signal.SIGTERM  # the first request decides the exit code
            clock[0] = 5.2
            signal.raise_signal(signal.SIGINT)
        assert interrupts.requests == 2
        clock[0] = 9.0
        signal.raise_signal(signal.SIGINT)
        assert interrupts.requests == 3
    assert signal.getsignal(signal.SIGTERM) is previous
