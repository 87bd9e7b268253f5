"""A data set as a sequence of rows that are made when they are asked for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, ClassVar, overload

from rl_contracts.errors import ConfigError


class Rows[T](Sequence[dict[str, Any]]):
    """Indexing and slicing over `_row`, which makes a row of an item. It is made anew each time: changing it changes
    nothing here."""

    reads_files: ClassVar[bool] = False
    """Whether `path` may be one file, which is then any split that is asked for."""

    def __init__(self, items: Sequence[T]) -> None:
        self._items = items

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        """The row, or the rows of a slice."""
        positions = range(len(self))[index]
        if isinstance(positions, int):
            return self._row(positions, self._items[positions])
        return [self._row(i, self._items[i]) for i in positions]

    @abstractmethod
    def _row(self, index: int, item: T) -> dict[str, Any]:
        """Row `index`, 0 to len - 1, made of its item."""


def require_form(name: str, form: str, forms: tuple[str, ...]) -> None:
    """Refuse a form that a data set does not have.

    Raises:
        ConfigError: names those that it has.
    """
    if form not in forms:
        raise ConfigError(
            f"data.name={name}: expected to be read in the form {' or '.join(forms)}, found {form!r}, which this "
            "command learns from; take another data set, or the command that goes with this one"
        )


def read_options[T](cls: type[T], name: str, given: dict[str, Any]) -> T:
    """The options of a data set, a dataclass, from a config's keys.

    Raises:
        ConfigError: a key is unknown.
    """
    known = [item.name for item in fields(cls)]  # type: ignore[arg-type]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ConfigError(f"data.options of data.name={name}: expected {', '.join(known)}, found {', '.join(unknown)}")
    return cls(**given)
