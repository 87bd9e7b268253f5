"""Output to a terminal or a pipe: closed pipes, and characters that the encoding lacks."""

from __future__ import annotations

import io
import os
import signal
import sys


def replace_what_no_terminal_shows() -> None:
    """Let characters that the encoding of the terminal lacks be printed as `?`, instead of ending the command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def leave_pipe() -> int:
    """Write nothing more to a reader that is gone; a shell's code for that."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE
