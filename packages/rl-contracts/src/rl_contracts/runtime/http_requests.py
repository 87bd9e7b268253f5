"""Read the JSON bodies of HTTP requests, with errors that name the field."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from reprlib import repr as shown

import msgspec
from msgspec import Struct

from rl_contracts.errors import InferenceError


def decode[T: Struct](body: bytes, kind: type[T], nested: Mapping[str, type[Struct]] | None = None) -> T:
    """Return a body as its route's schema; an empty body stands for `{}`.

    Args:
        body: JSON.
        kind: the schema.
        nested: schemas of fields that are structs, by name; their field names are suggested for unknown ones.

    Raises:
        InferenceError: names the field, the expected and the actual value.
    """
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise InferenceError(_sentence(str(error), kind, nested or {})) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InferenceError(f"the body is not JSON: {error}.") from error


def _sentence(text: str, kind: type[Struct], nested: Mapping[str, type[Struct]]) -> str:
    """msgspec's message in the form of all others; a field that does not exist with the nearest that does."""
    said, _, place = text.partition(" - at `$")
    place = place.strip(".`") or "body"
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", said, re.DOTALL):
        schema = next((inner for name, inner in nested.items() if name in place), kind)
        known = schema.__struct_fields__
        near = difflib.get_close_matches(unknown[1], known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known) or 'none'}."
        return f"{place}: unknown parameter {shown(unknown[1])}{hint}"
    said = said.replace("`", "").replace(", got ", ", found ")
    return f"{place}: {said[0].lower()}{said[1:]}."
