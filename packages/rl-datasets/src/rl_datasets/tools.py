"""Read the tools of a record, and remove the nulls that Arrow adds to them and to messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_contracts.errors import DataError
from rl_datasets.columns import UNUSED, Record
from rl_datasets.conversations import has_messages, parsed

COLUMNS = ("tools", "tool_defs", "functions", "available_tools")
"""Names of the tools column in public data sets."""


def read_tools(record: Record) -> dict[str, list[dict[str, Any]]]:
    """Return `{"tools": JSON schemas in OpenAI's format}`, or an empty dict if the record has no tools.

    Args:
        record: location and columns of the record. A column named in `COLUMNS`, ignoring case, is a list of schemas or
            its JSON text. A schema without the outer `{"type": "function"}` gets it.

    Raises:
        DataError: a column is not a list of schemas, or two columns differ.
    """
    where, row = record
    tools: list[dict[str, Any]] = []
    for name in filter(is_tools, row):
        value = parsed(row[name]) or []
        schemas = [_schema(where, name, schema) for schema in (value if isinstance(value, list) else [value])]
        if tools and schemas and tools != schemas:
            raise DataError(f"{where}: expected one list of tools, found another in the column {name!r}; keep one")
        tools = tools or schemas
    return {"tools": tools} if tools else {}


def _schema(where: str, name: str, value: Any) -> dict[str, Any]:
    schema = parsed(value)
    function = schema.get("function", schema) if isinstance(schema, Mapping) else {}
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(
            f"{where}: expected JSON schemas of functions in the column {name!r}, found {value!r:.60}; correct it, or "
            f"exclude the column by data.columns.{UNUSED}{name}={name}"
        )
    return dict(schema) if "function" in schema else {"type": "function", "function": dict(schema)}


def is_tools(name: str) -> bool:
    """Return whether a column of this name contains the tools of a record."""
    return name.lower() in COLUMNS


def without_added_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Return a record of Parquet or Arrow without the null entries of its messages and tools.

    Arrow adds these entries, because all structs of a column have the same keys.
    """
    return {
        name: _without_nulls(value) if is_tools(name) or has_messages(value) else value for name, value in row.items()
    }


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
