"""Signals in the waits of the launcher."""

import subprocess
import sys

AT_EVERY_LINE = """
import signal, sys
from rl_launchers.interrupts import Interrupts
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


def test_signal_at_any_line_of_a_wait_is_heard_and_stops_nothing_forever():
    subprocess.run([sys.executable, "-c", AT_EVERY_LINE], check=True, timeout=100)
