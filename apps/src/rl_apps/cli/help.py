"""The text of an app's `--help`: usage, an example, the most used settings, flags and sections.

Each setting has its default and the docstring under its field.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from typing import Any

from rl_apps.run.app import App
from rl_apps.settings.compose import FILLED_IN, describe, sections_of
from rl_contracts.errors import ConfigError, did_you_mean

EVERYTHING = "all"
"""Topic that lists every setting."""

FLAGS = f"""Flags:
  --config FILE.yaml  read settings from a file; key=value on the command line overrides it
  --dry-run           check the settings and print what would run, without starting it
  --cfg job           print the settings as YAML
  --help SECTION      list the settings of a section, such as rollout or rollout.server; {EVERYTHING}: every section"""

FREQUENT = (
    "model.path",
    "data.path",
    "data.name",
    "data.columns",
    "data.batch_size",
    "rollout.reward",
    "rollout.group_size",
    "rollout.generation.max_new_tokens",
    "rollout.generation.temperature",
    "rollout.max_staleness",
    "actor.optimizer.lr",
    "actor.micro_batch.max_tokens",
    "model.dtype",
    "actor.engine.lora",
    "allocation",
    "total_steps",
    "evaluation.every",
    "checkpoint.every",
    "recover.every_minutes",
    "run_dir",
    "trackers.kind",
)
"""Settings that most runs change. An app has some of them."""

WIDTH = 120
"""Maximum characters of a line."""
_COLUMN = 46
"""Column of the meanings in a table of settings."""

Row = tuple[str, str, str]
"""Key, value and meaning of a setting."""


def render_help(app: App, config: Any, topic: str = "", command: str = "") -> str:
    """Return the help text of an app.

    Args:
        config: config of the app, which has the printed values.
        topic: a section, a setting or `all`; empty: the overview.
        command: the command that runs the app. Empty: the name of the app.

    Raises:
        ConfigError: there is no such section or setting.
    """
    rows = [row for row in describe(config) if row[0] not in (*app.rejected, *FILLED_IN)]
    sections = sections_of(config)
    if not topic:
        return _overview(app, command or app.name, rows, sections)
    shown = [row for row in rows if topic == EVERYTHING or f"{row[0]}.".startswith(f"{topic}.")]
    if not shown:
        hint = did_you_mean(topic, [*sections, *(key for key, _, _ in rows)], 0.5)
        top = ", ".join(key for key in sections if "." not in key)
        raise ConfigError(f"--help {topic}: no such section or setting.{hint} Sections: {top}.")
    by_section: dict[str, list[Row]] = {}
    for row in shown:
        by_section.setdefault(row[0].rpartition(".")[0], []).append(row)
    lines = [f"{topic}: {sections[topic]}" if topic in sections else f"{app.name}: {app.title}"]
    for section, inside in by_section.items():
        lines += ["", f"{section}: {sections[section]}"] if section not in ("", topic) else [""]
        for key, value, meaning in inside:
            lines.append(f"  {key}={value}")
            lines += textwrap.wrap(meaning, WIDTH, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)


def _overview(app: App, command: str, rows: list[Row], sections: dict[str, str]) -> str:
    """Return usage, example, most used settings, flags, and sections."""
    required = "".join(f"{key}=... " for key in app.required)
    by_key = {row[0]: row for row in rows}
    counts = {key: sum(row[0].startswith(f"{key}.") for row in rows) for key in sections if "." not in key}
    parts = [
        [f"usage: {command} {required}[key=value ...] [--config FILE.yaml] [--dry-run]"],
        [f"{app.name}: {app.title}"],
        ["Example:", *([f"  {app.starts_from}"] if app.starts_from else []), f"  {command} {app.example}"],
        ["The settings that most runs change, with their defaults:"],
        _table(by_key[key] for key in FREQUENT if key in by_key),
        [FLAGS],
        ["Other settings without a section:"],
        _table(row for row in rows if "." not in row[0] and row[0] not in FREQUENT),
        ["Sections and their number of settings (--help SECTION):"],
        [line for key, count in counts.items() for line in _wrapped(f"  {key:<12}{count:>4}  ", sections[key])],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts)


def _table(rows: Iterable[Row]) -> list[str]:
    """Return the lines of settings with the first sentence of each meaning."""
    return [
        line
        for key, value, meaning in rows
        for line in _wrapped(f"  {key}={value}".ljust(_COLUMN - 2) + "  ", split_sentences(meaning)[0])
    ]


def _wrapped(beginning: str, text: str) -> list[str]:
    """Return the lines of a text that is indented after its beginning."""
    return textwrap.wrap(beginning + text, WIDTH, subsequent_indent=" " * len(beginning))


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a docstring."""
    return re.split(r"(?:(?<=\.)|(?<=\.\))) (?=[A-Z0-9`(])", text)
