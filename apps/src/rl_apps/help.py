"""`--help`: every setting with its default and its meaning, taken from the docstrings under the config fields."""

from __future__ import annotations

import textwrap
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

from rl_contracts.config import field_docs


def describe(config: Any, prefix: str = "") -> list[tuple[str, str, str]]:
    """(key, value, meaning) of every leaf setting of a config object, of sections that are left out (None) too."""
    docs, types = field_docs(type(config)), get_type_hints(type(config))
    rows: list[tuple[str, str, str]] = []
    for item in fields(config):
        key, section = prefix + item.name, getattr(config, item.name)
        if not is_dataclass(section):
            rows.append((key, repr(section), docs.get(item.name, "")))
            kinds: list[Any] = [kind for kind in get_args(types[item.name]) if is_dataclass(kind)]
            section = kinds[0]() if kinds else None
        if section is not None:
            rows += describe(section, f"{key}.")
    return rows


def render(title: str, config: Any, width: int = 120) -> str:
    """The help text."""
    lines = [title, "", "Flags: --dry-run, --cfg job, --help. Settings (key=value):", ""]
    for key, value, meaning in describe(config):
        lines.append(f"  {key}={value}")
        lines += textwrap.wrap(meaning, width, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)
