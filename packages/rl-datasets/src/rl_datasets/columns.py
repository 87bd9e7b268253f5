"""Columns by the names that they have elsewhere (`data.columns`), and what is said where one is missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rl_contracts.errors import ConfigError, DataError

Record = tuple[str, dict[str, Any]]
"""Where a record stands (`train.jsonl:17`), and the record."""

QUESTION = ("system", "history", "input", "tools")
"""Columns that every data set of files reads beside its question."""

UNUSED = "unused_"
"""Beginning of the names by which columns are left out (`data.columns.unused_context=context`)."""

USUAL: dict[str, tuple[str, ...]] = {
    "question": ("problem", "prompt", "query", "instruction", "input"),
    "answer": ("solution", "response", "completion", "output", "target", "label", "reward_model.ground_truth"),
    "messages": ("conversations", "conversation", "prompt", "problem", "question", "query", "instruction", "input"),
    "prompt": ("question", "query", "problem", "instruction", "input"),
    "chosen": ("accepted", "preferred", "winner", "answer_w"),
    "rejected": ("refused", "dispreferred", "loser", "answer_l"),
}
"""What others call a column of ours, the likeliest first."""


def renamed(records: Iterable[Record], columns: Mapping[str, str]) -> Iterator[Record]:
    """Records whose columns have our names.

    Args:
        records: as they were read.
        columns: our name of a column to the one that it has there, with dots for what lies inside of another
            (`reward_model.ground_truth`).

    Raises:
        DataError: a record has no such column, or another part of the question by our name, which would be lost.
    """
    sources = {name for theirs in columns.values() for name in (theirs, theirs.partition(".")[0])}
    for where, row in records:
        if not columns:
            yield where, row
            continue
        found = {}
        for ours, theirs in columns.items():
            there, found[ours] = _inside(row, theirs)
            if not there:
                raise DataError(
                    f"{where}: expected a column {theirs!r} (data.columns.{ours}={theirs}), found {_names(row)}; name "
                    f"the right one by data.columns.{ours}, or complete the row"
                )
            if ours in QUESTION and ours not in sources and row.get(ours) not in (None, "", [], {}, found[ours]):
                raise DataError(
                    f"{where}: expected no column {ours!r} beside {theirs!r} (data.columns.{ours}={theirs}), found "
                    f"{row[ours]!r:.60}; leave it out by data.columns.{UNUSED}{ours}={ours}, or read it instead"
                )
        yield where, {name: value for name, value in row.items() if name not in columns.values()} | found


def require_known(name: str, columns: Mapping[str, str] | None, known: tuple[str, ...]) -> None:
    """Reject names that are none of a data set's columns, and do not begin with `UNUSED`.

    Raises:
        ConfigError: names them.
    """
    odd = sorted(name for name in columns or () if name not in known and not name.startswith(UNUSED))
    if odd:
        raise ConfigError(f"data.columns of {name} data: expected names of its columns {known}, found {odd}")


def missing(where: str, row: Mapping[str, Any], column: str) -> DataError:
    """The error of a record without a column that it needs: which, what is there, and the setting that maps it."""
    likely = [name for name in USUAL.get(column, ()) if _inside(row, name)[0]]
    return DataError(
        f"{where}: expected a column {column!r}, found {_names(row)}; say which one it is by "
        f"data.columns.{column}={likely[0] if likely else 'NAME'}, or complete the row"
    )


def _inside(row: Mapping[str, Any], name: str) -> tuple[bool, Any]:
    """Whether a row has a column, and its value: one of that very name, or a path into others."""
    if name in row:
        return True, row[name]
    outer, _, rest = name.partition(".")
    inner = row.get(outer)
    return _inside(inner, rest) if rest and isinstance(inner, Mapping) else (False, None)


def _names(row: Mapping[str, Any]) -> str:
    paths = [path for name, value in row.items() for path in _paths(name, value)]
    return f"only {', '.join(map(repr, paths))}" if paths else "an empty row"


def _paths(name: str, value: Any) -> list[str]:
    """The names by which a column can be called: of one that holds others, theirs."""
    return [f"{name}.{inner}" for inner in value] if isinstance(value, Mapping) and value else [name]
