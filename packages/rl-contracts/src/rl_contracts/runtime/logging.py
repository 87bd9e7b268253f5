"""One logger per component, and one place where a process says how its lines look.

A library only calls `get_logger`; importing anything of ours configures nothing. A program calls `configure` once.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import sys
from pathlib import Path
from typing import TextIO

from rl_contracts.errors import ConfigError

ROOT = "rl"
"""Name of the logger above all of ours; the root logger and other libraries' loggers are left alone."""


REMEMBERED = 1000
"""Different warnings whose repetitions are noticed."""
LEVEL_VARIABLE = "RL_LOG_LEVEL"
"""Environment variable with the level of all our loggers. Workers inherit it from the command that starts them."""


def get_logger(component: str) -> logging.Logger:
    """The logger of a component: `get_logger("trainer")` is the standard logger `rl.trainer`."""
    return logging.getLogger(f"{ROOT}.{component}")


def configure(
    level: str | int | None = None,
    rank: int | None = None,
    file: str | Path | None = None,
    role: str = "",
) -> None:
    """Send the lines of all our loggers to one handler. A second call replaces what the first one set up.

    A line reads `2026-01-31 12:00:00.000 INFO [actor/0] rl.trainer: message`; the bracket is left out where neither
    role nor rank is known. A warning or error that is repeated word for word is shown at growing intervals.

    Args:
        level: lowest level that is shown, by name or number; None: what `RL_LOG_LEVEL` says, or INFO.
        rank: rank (or index) of this process within its role.
        file: append here instead of standard error; its directory is made.
        role: what this process is, for example `actor` or `server`.

    Raises:
        ConfigError: there is no such level.
    """
    if level is None:
        level = os.environ.get(LEVEL_VARIABLE) or "INFO"
    levels = logging.getLevelNamesMapping()
    if isinstance(level, str) and level.upper() not in levels:
        raise ConfigError(
            f"logging level ({LEVEL_VARIABLE}): expected one of {', '.join(levels)} or a number, found {level!r}."
        )
    if file is not None:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
    handler: logging.Handler = _StandardErrorHandler() if file is None else logging.FileHandler(file, encoding="utf-8")
    who = "/".join(part for part in (role, "" if rank is None else str(rank)) if part)
    # a percent sign in a role would otherwise be read as a field of the format
    bracket = f"[{who}] ".replace("%", "%%") if who else ""
    line = f"%(asctime)s.%(msecs)03d %(levelname)s {bracket}%(name)s: %(message)s"
    handler.setFormatter(logging.Formatter(line, "%Y-%m-%d %H:%M:%S"))
    logger = logging.getLogger(ROOT)
    for previous in [known for known in logger.handlers if known.name == ROOT]:
        logger.removeHandler(previous)
        previous.close()
    handler.name = ROOT
    handler.addFilter(Repeats())
    logger.addHandler(handler)
    logger.setLevel(level.upper() if isinstance(level, str) else level)
    # Otherwise a program that also configures the root logger would show each line twice.
    logger.propagate = False


class Repeats(logging.Filter):
    """Lets a repeated warning through after 1, 2, 4, ... seconds, up to an hour, with the number of those left out."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[tuple[str, str], tuple[float, float, int]] = {}
        """When each was shown, the seconds before it is shown again, and how often it was left out."""

    def filter(self, record: logging.LogRecord) -> bool | logging.LogRecord:
        if record.levelno < logging.WARNING:
            return True
        key, now = (record.name, record.getMessage()), record.created
        shown, pause, left_out = self._known.pop(key, (-math.inf, 1.0, 0))
        if now - shown < pause:
            self._known[key] = (shown, pause, left_out + 1)
            return False
        self._known[key] = (now, min(2 * pause, 3600.0) if now - shown < 4 * pause else 1.0, 0)
        if len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]
        if left_out:
            record = copy.copy(record)
            record.msg, record.args = f"{key[1]} (and {left_out} times since it was last shown)", ()
        return record


class _StandardErrorHandler(logging.StreamHandler):
    """Writes to whatever `sys.stderr` is when a line comes, since programs and tests redirect it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr
