"""A data set as a sequence of rows that are made when they are asked for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, overload

from rl_contracts.errors import ConfigError


class Rows(Sequence[dict[str, Any]]):
    """Indexing and slicing over `_row`. A row is made anew each time: changing it changes nothing here."""

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        """The row, or the rows of a slice."""
        positions = range(len(self))[index]
        return self._row(positions) if isinstance(positions, int) else [self._row(i) for i in positions]

    @abstractmethod
    def _row(self, index: int) -> dict[str, Any]:
        """Row `index`, 0 to len - 1."""


def read_options[T](cls: type[T], name: str, given: dict[str, Any]) -> T:
    """The options of a data set, a dataclass, from a config's keys.

    Raises:
        ConfigError: a key is unknown.
    """
    known = [item.name for item in fields(cls)]  # type: ignore[arg-type]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ConfigError(f"{name} data: expected the options {', '.join(known)}, found {', '.join(unknown)}")
    return cls(**given)
