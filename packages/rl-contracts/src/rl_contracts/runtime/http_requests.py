"""Decoding of the JSON bodies of HTTP requests, with errors that name the field."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from reprlib import repr as shown

import msgspec
from msgspec import Struct

from rl_contracts.errors import InferenceError


def decode[T: Struct](body: bytes, kind: type[T], nested: Mapping[str, type[Struct]] | None = None) -> T:
    """Decode a request body into the schema of its route. An empty body stands for `{}`.

    Args:
        body: JSON.
        kind: the schema.
        nested: schemas of the fields that are structs, by field name; used to suggest names for unknown parameters.

    Raises:
        InferenceError: the body is not JSON or does not match the schema. The message names the field, the expected and
            the actual value.
    """
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise InferenceError(_sentence(str(error), kind, nested or {})) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InferenceError(f"the request body cannot be decoded as JSON: {error}.") from error


def _sentence(text: str, kind: type[Struct], nested: Mapping[str, type[Struct]]) -> str:
    """Convert a message of msgspec to "field: expected ..., found ...", with a suggestion for an unknown field."""
    message, _, path = text.partition(" - at `$")
    path = path.strip(".`") or "body"
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", message, re.DOTALL):
        schema = next((inner for name, inner in nested.items() if name in path), kind)
        fields = schema.__struct_fields__
        matches = difflib.get_close_matches(unknown[1], fields, 1)
        hint = f"; did you mean {matches[0]!r}?" if matches else f"; valid parameters: {', '.join(fields) or 'none'}."
        return f"{path}: unknown parameter {shown(unknown[1])}{hint}"
    message = message.replace("`", "").replace(", got ", ", found ")
    return f"{path}: {message[0].lower()}{message[1:]}."
