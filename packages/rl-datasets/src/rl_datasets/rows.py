"""Data set as a sequence of examples that are built on access."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, ClassVar, Protocol, overload

from rl_contracts.errors import ConfigError


class Items[T](Protocol):
    """Values that `Rows` builds examples from: a list, or a table that reads a record on access."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> T: ...


class Rows[T](Sequence[dict[str, Any]]):
    """Sequence of examples with indexing and slicing.

    `_row` builds a new example from an item on each access, so callers may change the example.
    """

    reads_files: ClassVar[bool] = False
    """True if `path` may be one file, which then serves as any requested split."""
    has_images: ClassVar[bool] = False
    """True if messages may have images, so that a vision-language model is needed."""

    def __init__(self, items: Items[T]) -> None:
        self._items = items

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        """Return the example, or the examples of a slice."""
        positions = range(len(self))[index]
        if isinstance(positions, int):
            return self._row(positions, self._items[positions])
        return [self._row(i, self._items[i]) for i in positions]

    def gold_completion(self, row: dict[str, Any]) -> str:
        """Return a completion with the gold answer of an example in RL form, as the prompt requests it."""
        return str(row["answer"])

    @abstractmethod
    def _row(self, index: int, item: T) -> dict[str, Any]:
        """Build example `index`, 0 to len - 1, from its item."""


def require_form(name: str, form: str, forms: tuple[str, ...]) -> None:
    """Reject a form that the data set does not support.

    Raises:
        ConfigError: `form` is not one of `forms`.
    """
    if form not in forms:
        raise ConfigError(
            f"data.name={name}: expected the form {' or '.join(forms)}, found {form!r}, which this "
            "command requires; choose another data set, or a command that trains on this one"
        )


def read_options[T](cls: type[T], name: str, values: dict[str, Any]) -> T:
    """Build the options of a data set, a dataclass, from `data.options`.

    Raises:
        ConfigError: an option is unknown.
    """
    names = [item.name for item in fields(cls)]  # type: ignore[arg-type]
    unknown = sorted(set(values) - set(names))
    if unknown:
        raise ConfigError(f"data.options of data.name={name}: expected {', '.join(names)}, found {', '.join(unknown)}")
    return cls(**values)
