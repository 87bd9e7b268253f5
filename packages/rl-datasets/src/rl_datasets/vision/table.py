"""Records of a data set with images, read on access, because all images of a data set do not fit in memory."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_contracts.errors import DataError
from rl_datasets.columns import Record
from rl_datasets.files import check_parquet, find_files, load_hub, read_jsonl
from rl_datasets.tools import without_added_nulls

if TYPE_CHECKING:
    from datasets import Dataset

_LOCAL_FOLDER = "data"
"""Folder of the data files in a local copy of a hub repository."""
_OUTLINE_ROWS = 1000
"""Records per read of `ArrowTable.outlines`."""


_IMAGE = re.compile(r"(large_)?binary|struct<bytes: (large_)?binary, path: (large_)?string>")
"""Arrow types of an image."""


class LinesTable:
    """Records of JSON lines files, in memory. They usually contain the paths of the images."""

    def __init__(self, files: list[Path]) -> None:
        self.directory: Path | None = files[0].parent
        """Directory that relative paths of images refer to."""
        self._records = list(read_jsonl(files))

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Record:
        """Return a record and its location."""
        return self._records[index]

    def outlines(self) -> Iterator[Record]:
        """Yield all records."""
        return iter(self._records)


class ArrowTable:
    """Records of Parquet files or the hub, in memory-mapped files of the cache of `datasets`."""

    def __init__(self, dataset: Dataset, location: Callable[[int], str], directory: Path | None = None) -> None:
        """Open a table.

        Args:
            dataset: records, images undecoded or not.
            location: function from the index of a record to its location, for errors.
            directory: directory that relative paths of images refer to.
        """
        self.directory = directory
        """Directory that relative paths of images refer to; None on the hub."""
        self._dataset = dataset.with_format("arrow")  # its other formats decode all images of a record
        self._location = location

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Record:
        """Return a record and its location."""
        (row,) = self._dataset[index].to_pylist()
        return self._location(index), without_added_nulls(row)

    def outlines(self) -> Iterator[Record]:
        """Yield all records with None instead of each image whose bytes are in a column."""
        for start in range(0, len(self), _OUTLINE_ROWS):
            table = self._dataset[start : start + _OUTLINE_ROWS]
            columns = {name: _outline(table[name]) for name in table.column_names}
            for offset, values in enumerate(zip(*columns.values(), strict=True)):
                yield self._location(start + offset), without_added_nulls(dict(zip(columns, values, strict=True)))


def _outline(column: Any) -> list[Any]:
    """Return the values of a column of Arrow, with None instead of each image."""
    kind = str(column.type)
    if _IMAGE.fullmatch(kind):
        return [None if is_null else [None] for is_null in column.is_null().to_pylist()]
    if kind.startswith(("list<", "large_list<")) and _IMAGE.fullmatch(str(column.type.value_type)):
        lengths = [length for chunk in column.chunks for length in chunk.value_lengths().to_pylist()]
        return [None if length is None else [None] * length for length in lengths]
    values: list[Any] = column.to_pylist()
    return values


def open_table(path: str | Path, split: str, subset: str | None = None) -> LinesTable | ArrowTable:
    """Open the records of one split.

    The first use of Parquet files writes them to the cache of `datasets`, as uncompressed Arrow files.

    Args:
        path: directory, file or hub id; see `rl_datasets.files.read_records`. The files of a directory may also be
            in its folder `data`.
        split: `train` or `test`, for example.
        subset: configuration name on the hub, and the folder of that name in a directory.

    Raises:
        DataError: the data cannot be read.
    """
    files = find_files(path, split, subset or _LOCAL_FOLDER)
    if not files:
        return ArrowTable(load_hub(str(path), split, subset), lambda index: f"{path} {split} row {index}")
    return LinesTable(files) if files[0].suffix == ".jsonl" else _open_parquet(files)


def _open_parquet(files: list[Path]) -> ArrowTable:
    for file in files:
        check_parquet(file)
    from datasets import concatenate_datasets, exceptions, load_dataset  # the import takes seconds

    try:
        parts = [load_dataset("parquet", data_files=str(file), split="train") for file in files]
        dataset = concatenate_datasets(parts)
    except (OSError, ValueError, exceptions.DatasetsError) as error:  # pyarrow raises ValueErrors
        raise DataError(
            f"{files[0]}: cannot be read as parquet: {error}; write or download it again, or free disk space for the "
            "cache of datasets"
        ) from error
    starts = [0, *accumulate(map(len, parts))]

    def location(index: int) -> str:
        file = bisect_right(starts, index) - 1
        return f"{files[file]} row {index - starts[file]}"

    return ArrowTable(dataset, location, files[0].parent)
