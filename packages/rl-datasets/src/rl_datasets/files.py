"""Read the records of a data set from a directory, a file or the Hugging Face hub.

Every error is a `DataError` that names the file, and the line if there is one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_contracts.chat.rendering import SURROGATE
from rl_contracts.errors import DataError
from rl_datasets.columns import Record, renamed
from rl_datasets.tools import without_added_nulls

if TYPE_CHECKING:
    from datasets import Dataset

_SPLITS = ("train", "test", "validation")
_FILE_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".txt", ".gz", ".zip", ".arrow")
_READ_SUFFIXES = (".jsonl", ".parquet")
_SHARD = re.compile(r"(?P<name>.*)-(?P<number>\d+)-of-(?P<total>\d+)(?:-[0-9a-f]+)?\.\w+")
PARQUET = b"PAR1"
"""First and last bytes of a Parquet file."""
HUB_SECONDS = 10.0
"""Timeout in seconds of the check whether the hub is reachable."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def read_records(
    path: str | Path, split: str, subset: str | None = None, columns: Mapping[str, str] | None = None
) -> Iterator[Record]:
    """Yield the records of one split. Messages and tools from Parquet files and the hub have no null entries.

    Args:
        path: a directory with `<split>.jsonl`, `<split>.parquet`, or shards `<split>-*` of one of these kinds (there
            or in `subset/`); a `.jsonl` or `.parquet` file; or a hub id `owner/name`. A file serves as any requested
            split, unless it is named after another split.
        split: `train` or `test`, for example.
        subset: configuration name on the hub, for a data set that has several.
        columns: see `rl_datasets.columns.renamed`.

    Raises:
        DataError: the path does not exist, or the file is of an unknown kind or cannot be read. Also if a shard is
            missing, there are several candidates, or a record lacks one of `columns`.
    """
    files = find_files(path, split, subset)
    is_arrow = not files or files[0].suffix != ".jsonl"  # all structs of a column have the same keys
    records = _read_hub(str(path), split, subset) if not files else (_read_parquet if is_arrow else read_jsonl)(files)
    for where, row in renamed(records, columns or {}):
        yield where, without_added_nulls(row) if is_arrow else row


def find_files(path: str | Path, split: str, subset: str | None = None) -> list[Path]:
    """Return the files of a split, all `.jsonl` or all `.parquet`; none if the path is a hub id.

    Raises:
        DataError: see `read_records`.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        return _files_of_split(local, split, subset)
    if local.exists():
        _check_file(local, split)
        return [local]
    if _HUB_ID.fullmatch(str(path)) and local.suffix not in _FILE_SUFFIXES:
        return []
    raise DataError(
        f"{path}: expected a directory, a .jsonl or .parquet file or a hub id, found nothing there; correct the "
        f"path, which is relative to {Path.cwd()}"
    )


def _files_of_split(directory: Path, split: str, subset: str | None) -> list[Path]:
    folders = [directory, directory / subset] if subset else [directory]
    name = re.compile(rf"{re.escape(split)}(-.*)?({'|'.join(map(re.escape, _FILE_SUFFIXES))})+", re.DOTALL)
    files = sorted(
        file for folder in folders if folder.is_dir() for file in folder.iterdir() if name.fullmatch(file.name)
    )
    if any(file.suffix in _READ_SUFFIXES for file in files):
        _check_shards(directory, split, files)
        return files
    names = ", ".join(sorted(p.name for p in directory.iterdir())[:8]) or "nothing"
    raise DataError(
        f"{directory}: expected {split}.jsonl or {split}.parquet for the split {split!r}, found "
        f"{names}; "
        "add the file, name another split (data.train_split, data.test_split), or set evaluation.examples=0 to train "
        "without held-out examples"
    )


def _check_shards(directory: Path, split: str, files: list[Path]) -> None:
    """Reject a split that is neither one file nor all shards of one kind in one folder."""
    names = [str(file.relative_to(directory)) for file in files]
    shards = [_SHARD.fullmatch(name) for name in names]
    kinds = {
        (file.parent, file.suffix, file.stem == split, shard and shard["name"], shard and shard["total"])
        for file, shard in zip(files, shards, strict=True)
    }
    if len(kinds) > 1:
        raise DataError(
            f"{directory}: expected the split {split!r} in one file, or in shards of one kind, found "
            f"{', '.join(names[:8])}; remove or rename the other files"
        )
    if shards[0]:
        total = int(shards[0]["total"])
        numbers = sorted(int(shard["number"]) for shard in shards if shard)
        first = int(0 not in numbers)
        if numbers != [*range(first, total + first)]:
            missing = sorted({*range(first, total + first)} - {*numbers})
            gaps = f"; shard {', '.join(map(str, missing[:8]))} of {total} is missing" if missing else ""
            raise DataError(
                f"{directory}: expected each shard of the split {split!r} once, found {', '.join(names[:8])}{gaps}; "
                "download or write the shards again"
            )


def _check_file(file: Path, split: str) -> None:
    if file.suffix not in _READ_SUFFIXES:
        raise DataError(f"{file}: expected a .jsonl or .parquet file, found the extension {file.suffix!r}; convert it")
    split_of_name = re.sub(r"-\d+(-of-\d+(-[0-9a-f]+)?)?", "", file.stem)
    if split_of_name in _SPLITS and split_of_name != split:
        raise DataError(
            f"{file}: expected the split {split!r}, found a file named after the split {split_of_name!r}; "
            f"give its directory, so that each split is read from its own file"
        )


def read_jsonl(files: list[Path]) -> Iterator[Record]:
    """Yield the records of JSON lines files."""
    for file in files:
        try:
            with file.open(encoding="utf-8-sig", errors="surrogateescape") as lines:  # checked per example
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield f"{file}:{number}", _parse_line(f"{file}:{number}", line)
        except OSError as error:
            raise DataError(f"{file}: cannot be read: {error}") from error


def _parse_line(where: str, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        if not line.isascii() and SURROGATE.search(line):
            raise DataError(f"{where}: cannot be read as UTF-8 text; save it as UTF-8") from error
        raise DataError(
            f"{where}: expected one JSON object per line, found {line[:60]!r}: {error}; correct the line"
        ) from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected one JSON object per line, found {line[:60]!r}; correct the line")
    return record


def _read_parquet(files: list[Path]) -> Iterator[Record]:
    for file in files:
        check_parquet(file)
    from datasets import load_dataset  # the import takes seconds, and JSON lines do not need it

    for file in files:
        try:
            # Streaming writes nothing to a cache directory.
            rows = load_dataset("parquet", data_files=str(file), split="train", streaming=True)
            for index, row in enumerate(rows):
                yield f"{file} row {index}", dict(row)
        except (OSError, ValueError) as error:  # pyarrow raises ValueErrors
            raise DataError(f"{file}: cannot be read as parquet: {error}; write or download it again") from error


def check_parquet(file: Path) -> None:
    """Reject a truncated file, or a placeholder of a file that was not downloaded, before reading it.

    Raises:
        DataError: the file does not begin and end as a Parquet file.
    """
    try:
        with file.open("rb") as data:
            begin = data.read(len(PARQUET))
            data.seek(-min(len(PARQUET), file.stat().st_size), os.SEEK_END)
            end = data.read()
    except OSError as error:
        raise DataError(f"{file}: cannot be read as parquet: {error}") from error
    if (begin, end) != (PARQUET, PARQUET):
        raise DataError(
            f"{file}: cannot be read as parquet: expected it to begin and end with {PARQUET!r}, found {begin!r} and "
            f"{end!r}; write or download it again"
        )


def _read_hub(hub_id: str, split: str, subset: str | None) -> Iterator[Record]:
    for index, row in enumerate(load_hub(hub_id, split, subset)):
        yield f"{hub_id} {split} row {index}", dict(row)


def load_hub(hub_id: str, split: str, subset: str | None) -> Dataset:
    """Download a split of a data set of the hub, or read it from the cache.

    Raises:
        DataError: the hub cannot be reached and the cache does not have it, or the data set has no such split.
    """
    from datasets import config, exceptions, load_dataset

    offline = config.HF_HUB_OFFLINE
    try:
        config.HF_HUB_OFFLINE = offline or not _is_hub_reachable(hub_id)  # else the client retries for a minute
        return load_dataset(hub_id, subset, split=split)
    except (OSError, ValueError, exceptions.DatasetsError) as error:
        raise DataError(
            f"{hub_id}: expected a directory, a file, or a data set of the hub with the split {split!r}; the hub "
            f"reports: {error}. Without a network, set data.path to a directory that contains {split}.jsonl"
        ) from error
    finally:
        config.HF_HUB_OFFLINE = offline


def _is_hub_reachable(hub_id: str) -> bool:
    """Return whether the hub responds to a request for a data set, even with an error."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().dataset_info(hub_id, timeout=HUB_SECONDS)
    except HfHubHTTPError:  # for example, no such data set
        return True
    except Exception:  # noqa: BLE001 - the exception class depends on the HTTP library of the hub's client
        return False
    return True
