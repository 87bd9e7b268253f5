"""One logger per component, and one function that configures the output of a process.

Libraries only call `get_logger`; importing these packages configures nothing. A program calls `configure` once.
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
from rl_contracts.runtime.terminal import colored

ROOT = "rl"
"""Name of the parent of all project loggers; the root logger and other libraries' loggers stay unchanged."""


REMEMBERED = 1000
"""Number of distinct warnings whose repetitions are tracked."""
LEVEL_VARIABLE = "RL_LOG_LEVEL"
"""Environment variable with the level of all project loggers. Workers inherit it from the command that starts them."""


def get_logger(component: str) -> logging.Logger:
    """Return the logger of a component: `get_logger("trainer")` is the standard logger `rl.trainer`."""
    return logging.getLogger(f"{ROOT}.{component}")


def configure(
    level: str | int | None = None,
    rank: int | None = None,
    file: str | Path | None = None,
    role: str = "",
) -> None:
    """Send the lines of all project loggers to one handler. A second call replaces the handler of the first.

    A line reads `2026-01-31 12:00:00.000 INFO [actor/0] rl.trainer: message`, without the bracket if neither role nor
    rank is set. In a terminal, the name of each component has its own color, unless `NO_COLOR` is set. An identical
    warning or error is shown at growing intervals.

    Args:
        level: lowest level to show, by name or number; None uses the level in `RL_LOG_LEVEL`, or INFO.
        rank: rank (or index) of this process within its role.
        file: file to append to, instead of standard error; its directory is created.
        role: role of this process, for example `actor` or `server`.

    Raises:
        ConfigError: the level does not exist.
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
    source = "/".join(part for part in (role, "" if rank is None else str(rank)) if part)
    # A percent sign in a role would otherwise be read as a field of the format.
    bracket = f"[{source}] ".replace("%", "%%") if source else ""
    line = f"%(asctime)s.%(msecs)03d %(levelname)s {bracket}%(name)s: %(message)s"
    formatter = _TerminalFormatter if file is None else logging.Formatter
    handler.setFormatter(formatter(line, "%Y-%m-%d %H:%M:%S"))
    logger = logging.getLogger(ROOT)
    for previous in [existing for existing in logger.handlers if existing.name == ROOT]:
        logger.removeHandler(previous)
        previous.close()
    handler.name = ROOT
    handler.addFilter(Repeats())
    logger.addHandler(handler)
    logger.setLevel(level.upper() if isinstance(level, str) else level)
    # Otherwise a program that also configures the root logger would show each line twice.
    logger.propagate = False


class Repeats(logging.Filter):
    """Rate limit for repeated warnings: a repetition passes after 1, 2, 4, ... up to 3600 seconds.

    It shows the number of repetitions skipped since the last one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shown: dict[tuple[str, str], tuple[float, float, int]] = {}
        """Per warning: time when it was last shown, seconds before it is shown again, and number skipped since."""

    def filter(self, record: logging.LogRecord) -> bool | logging.LogRecord:
        if record.levelno < logging.WARNING:
            return True
        key, now = (record.name, record.getMessage()), record.created
        last_shown, pause, skipped = self._shown.pop(key, (-math.inf, 1.0, 0))
        if now - last_shown < pause:
            self._shown[key] = (last_shown, pause, skipped + 1)
            return False
        self._shown[key] = (now, min(2 * pause, 3600.0) if now - last_shown < 4 * pause else 1.0, 0)
        if len(self._shown) > REMEMBERED:
            del self._shown[next(iter(self._shown))]
        if skipped:
            record = copy.copy(record)
            record.msg, record.args = f"{key[1]} (repeated {skipped} times since it was last shown)", ()
        return record


class _StandardErrorHandler(logging.StreamHandler):
    """Handler that writes to the current `sys.stderr` of each line, since programs and tests redirect it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr


class _TerminalFormatter(logging.Formatter):
    """Formatter that colors the names of components if standard error is a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        component = record.name.removeprefix(f"{ROOT}.").partition(".")[0]
        shown = copy.copy(record)
        shown.name = colored(record.name, component, sys.stderr)
        return super().format(shown)
