"""Output to a terminal or a pipe: closed pipes, and characters that the encoding lacks."""

from __future__ import annotations

import io
import os
import signal
import sys


def replace_what_no_terminal_shows() -> None:
    """Print characters that the terminal's encoding lacks as `?`, instead of failing with UnicodeEncodeError."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def leave_pipe() -> int:
    """Redirect standard output to /dev/null after its reader has gone, and return a shell's exit code for SIGPIPE."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE
