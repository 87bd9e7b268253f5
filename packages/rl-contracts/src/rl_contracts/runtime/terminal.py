"""Output to a terminal or a pipe: closed pipes, characters that the encoding lacks, and colors of names."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import warnings
import zlib
from typing import TextIO

_COLORS = (32, 33, 34, 35, 36, 91, 92, 93, 94, 95, 96)
"""ANSI codes of the colors that are readable on a dark and on a light background."""


def colored(text: str, name: str, stream: TextIO) -> str:
    """Return `text` in the color of `name`, or unchanged if `stream` is not a terminal or `NO_COLOR` is set.

    The color depends only on the name, so it is the same in all processes and runs.
    """
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty():
        return text
    return f"\x1b[{_COLORS[zlib.crc32(name.encode()) % len(_COLORS)]}m{text}\x1b[0m"


def replace_what_no_terminal_shows() -> None:
    """Print characters that the terminal's encoding lacks as `?`, instead of failing with UnicodeEncodeError."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def hide_deprecations() -> None:
    """Hide deprecation warnings of libraries in this process; the logs of worker processes contain them."""
    for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
        warnings.simplefilter("ignore", category)
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # warns about enums of torchao at each import


def leave_pipe() -> int:
    """Redirect standard output to /dev/null after its reader has gone, and return a shell's exit code for SIGPIPE."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE
