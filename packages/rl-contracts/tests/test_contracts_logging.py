"""Logging: destination and format of lines, and no configuration on import."""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_contracts.errors import ConfigError
from rl_contracts.runtime.logging import ROOT, configure, get_logger


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    logger = logging.getLogger(ROOT)
    level, propagate, handlers = logger.level, logger.propagate, list(logger.handlers)
    yield
    for handler in set(logger.handlers) - set(handlers):
        handler.close()
    logger.handlers[:] = handlers
    logger.propagate = propagate
    logger.setLevel(level)


def test_get_logger_returns_unconfigured_logger_below_rl() -> None:
    logger = get_logger("trainer")

    assert logger is logging.getLogger("rl.trainer")
    assert not logger.handlers
    assert logger.level == logging.NOTSET


def test_configure_line_shows_time_level_role_rank_and_component(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info", rank=3, role="actor")

    get_logger("trainer").info("step %d", 7)

    line = capsys.readouterr().err
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO \[actor/3\] rl\.trainer: step 7\n", line)


@pytest.mark.parametrize(
    ("role", "rank", "bracket"),
    [("", None, ""), ("", 0, "[0] "), ("server", None, "[server] "), ("5%s", 1, "[5%s/1] ")],
)
def test_configure_bracket_shows_role_and_rank_if_set(
    role: str, rank: int | None, bracket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(role=role, rank=rank)

    get_logger("x").warning("hello")

    assert capsys.readouterr().err.endswith(f" WARNING {bracket}rl.x: hello\n")


class Terminal(io.StringIO):
    """Stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_configure_terminal_shows_components_in_stable_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    configure()

    for name in ("trainers", "trainers.gap", "launcher"):
        get_logger(name).info("hello")
    monkeypatch.setenv("NO_COLOR", "1")
    get_logger("trainers").info("plain")

    *colored, plain = terminal.getvalue().splitlines()
    colors = [re.search(r" INFO \x1b\[(\d+)mrl\.[a-z.]+\x1b\[0m: hello$", line)[1] for line in colored]  # type: ignore[index]
    assert colors[0] == colors[1] != colors[2]
    assert "\x1b" not in plain


def test_configure_twice_uses_second_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configure("DEBUG")
    configure("WARNING", file=tmp_path / "logs" / "actor-0.log")

    get_logger("x").info("quiet")
    get_logger("x").warning("loud")

    lines = (tmp_path / "logs" / "actor-0.log").read_text().splitlines()
    assert len(lines) == 1
    assert lines[0].endswith("loud")
    assert capsys.readouterr().err == ""


def test_configure_keeps_other_handlers() -> None:
    foreign = logging.NullHandler()
    logging.getLogger(ROOT).addHandler(foreign)

    configure()
    configure()

    assert foreign in logging.getLogger(ROOT).handlers
    assert len(logging.getLogger(ROOT).handlers) == 2


@pytest.mark.parametrize(("variable", "level"), [("debug", logging.DEBUG), ("", logging.INFO)])
def test_configure_without_level_uses_environment(monkeypatch: pytest.MonkeyPatch, variable: str, level: int) -> None:
    monkeypatch.setenv("RL_LOG_LEVEL", variable)
    configure()
    assert logging.getLogger(ROOT).level == level
    configure("WARNING")
    assert logging.getLogger(ROOT).level == logging.WARNING


def test_configure_unknown_level_names_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"INFO.*found 'LOUD'"):
        configure("LOUD")
    monkeypatch.setenv("RL_LOG_LEVEL", "QUIET")
    with pytest.raises(ConfigError, match=r"RL_LOG_LEVEL.*found 'QUIET'"):
        configure()


def test_configure_repeated_warning_shown_at_growing_intervals(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure()
    handler = logging.getLogger(ROOT).handlers[-1]

    shown = []
    for second in range(0, 30, 2):
        record = logging.makeLogRecord({"name": "rl.trainer", "levelno": logging.WARNING, "msg": "the disk is full"})
        record.created = float(second)
        if handler.handle(record):
            shown.append(second)

    assert shown == [0, 2, 4, 8, 16]
    assert capsys.readouterr().err.count("3 times") == 1
