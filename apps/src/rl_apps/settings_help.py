"""`--help`: every setting with its default and its meaning, taken from the docstrings under the config fields."""

from __future__ import annotations

import textwrap
from dataclasses import fields, is_dataclass
from typing import Any

from rl_contracts.config import field_docs


def describe(config: Any, prefix: str = "") -> list[tuple[str, str, str]]:
    """(key, value, meaning) of every leaf setting of a config object."""
    docs = field_docs(type(config))
    rows: list[tuple[str, str, str]] = []
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value) and not isinstance(value, type):
            rows += describe(value, f"{prefix}{item.name}.")
        else:
            rows.append((prefix + item.name, repr(value), docs.get(item.name, "")))
    return rows


def render(title: str, config: Any, width: int = 120) -> str:
    """The help text."""
    lines = [title, "", "Flags: --dry-run, --cfg job, --help. Settings (key=value):", ""]
    for key, value, meaning in describe(config):
        lines.append(f"  {key}={value}")
        lines += textwrap.wrap(meaning, width, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)
