"""Map columns of a file to the expected names (`data.columns`), and report missing columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rl_contracts.errors import ConfigError, DataError

Record = tuple[str, dict[str, Any]]
"""Location of a record (`train.jsonl:17`), and the record."""

QUESTION = ("system", "history", "input", "tools")
"""Columns that every file-based data set reads in addition to its question."""

UNUSED = "unused_"
"""Prefix of names that exclude a column from the question (`data.columns.unused_context=context`)."""

USUAL: dict[str, tuple[str, ...]] = {
    "question": ("problem", "prompt", "query", "instruction", "input"),
    "answer": ("solution", "response", "completion", "output", "target", "label", "reward_model.ground_truth"),
    "messages": ("conversations", "conversation", "prompt", "problem", "question", "query", "instruction", "input"),
    "problem": ("question", "prompt", "query", "instruction", "input", "text"),
    "images": ("image", "image_path", "image_url", "picture"),
    "prompt": ("question", "query", "problem", "instruction", "input"),
    "chosen": ("accepted", "preferred", "winner", "answer_w"),
    "rejected": ("refused", "dispreferred", "loser", "answer_l"),
}
"""Names of each expected column in public data sets, the likeliest first."""


def renamed(records: Iterable[Record], columns: Mapping[str, str]) -> Iterator[Record]:
    """Yield the records with their columns renamed to the expected names.

    Args:
        records: records as read from the file.
        columns: map from expected names to columns of the file, with dots for nested values
            (`reward_model.ground_truth`).

    Raises:
        DataError: a record lacks a column of the map, or renaming would overwrite a question column of the record.
    """
    sources = {name for source in columns.values() for name in (source, source.partition(".")[0])}
    for where, row in records:
        if not columns:
            yield where, row
            continue
        values = {}
        for field, source in columns.items():
            exists, values[field] = _lookup(row, source)
            if not exists:
                raise DataError(
                    f"{where}: expected a column {source!r} (data.columns.{field}={source}), found {_names(row)}; "
                    f"set data.columns.{field} to the right column, or complete the example"
                )
            if field in QUESTION and field not in sources and row.get(field) not in (None, "", [], {}, values[field]):
                raise DataError(
                    f"{where}: expected no column {field!r} beside {source!r} (data.columns.{field}={source}), found "
                    f"{row[field]!r:.60}; exclude it by data.columns.{UNUSED}{field}={field}, or read it instead"
                )
        yield where, {name: value for name, value in row.items() if name not in columns.values()} | values


def require_known(name: str, columns: Mapping[str, str] | None, expected: tuple[str, ...]) -> None:
    """Reject names that the data set does not know and that do not begin with `UNUSED`.

    Raises:
        ConfigError: a name is unknown.
    """
    unknown = sorted(name for name in columns or () if name not in expected and not name.startswith(UNUSED))
    if unknown:
        raise ConfigError(f"data.columns of {name} data: expected names of its columns {expected}, found {unknown}")


def missing(where: str, row: Mapping[str, Any], column: str) -> DataError:
    """Return the error for a missing column. It lists the columns of the record and the setting that selects one."""
    likely = [name for name in USUAL.get(column, ()) if _lookup(row, name)[0]]
    return DataError(
        f"{where}: expected a column {column!r}, found {_names(row)}; select it with "
        f"data.columns.{column}={likely[0] if likely else 'NAME'}, or complete the example"
    )


def _lookup(row: Mapping[str, Any], name: str) -> tuple[bool, Any]:
    """Return whether a record has a column of this exact name or nested path, and its value."""
    if name in row:
        return True, row[name]
    outer, _, rest = name.partition(".")
    inner = row.get(outer)
    return _lookup(inner, rest) if rest and isinstance(inner, Mapping) else (False, None)


def _names(row: Mapping[str, Any]) -> str:
    paths = [path for name, value in row.items() for path in _paths(name, value)]
    return f"only {', '.join(map(repr, paths))}" if paths else "no columns"


def _paths(name: str, value: Any) -> list[str]:
    """Return the names that can select a column: its name, or the paths of its nested columns."""
    return [f"{name}.{inner}" for inner in value] if isinstance(value, Mapping) and value else [name]
