"""Files of a split: one file, or all shards of one kind."""

import json
from pathlib import Path
from typing import Any

import pytest

from rl_contracts.errors import DataError
from rl_datasets import GSM8K, Chat


def write(directory: Path, *names: str) -> Path:
    """Write one example, named after its file, to each JSON lines file, and the magic bytes of Parquet to others."""
    for name in names:
        file = directory / name
        file.parent.mkdir(exist_ok=True)
        row: dict[str, Any] = {"question": name, "answer": "1", "messages": name}
        file.write_text(json.dumps(row) + "\n" if ".jsonl" in name else "PAR1PAR1")
    return directory


@pytest.mark.parametrize(
    "names",
    [
        ("train.jsonl", "test.jsonl", "train_notes.txt", "trained.jsonl"),
        ("train-1-of-2.jsonl", "train-2-of-2.jsonl"),
        ("train-0.jsonl", "train-1.jsonl"),
        ("train-00000-of-00002-abcdef0123.jsonl", "train-00001-of-00002-0123abcdef.jsonl", "test-00000-of-00001.jsonl"),
    ],
)
def test_split_in_one_file_or_all_shards_is_read_in_order(tmp_path: Path, names: tuple[str, ...]) -> None:
    rows = Chat(write(tmp_path, *names))

    expected = [name for name in names if name.startswith(("train.", "train-"))]
    assert [row["messages"][0]["content"] for row in rows] == expected


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        (("train-00000-of-00002-abcdef0123.jsonl",), "shard 1 of 2"),
        (
            ("train-00000-of-00001-abcdef.jsonl", "train-00000-of-00001-012345.jsonl"),
            "once, found .*-abcdef.jsonl;",
        ),
        (("train-00001-of-00003.parquet", "train-00002-of-00003.parquet"), "shard 3 of 3"),
        (("train-00000-of-00001.parquet", "train-00000-of-00002.parquet", "train-00001-of-00002.parquet"), "of-00001"),
        (("train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "train-more.jsonl"), "train-more.jsonl"),
        (("train.jsonl", "train.parquet"), "train.parquet"),
        (("train.jsonl", "train-00001.jsonl"), "train-00001.jsonl"),
        (("train.jsonl", "train.jsonl.gz"), "train.jsonl.gz"),
    ],
)
def test_split_with_missing_shard_or_several_candidates_is_rejected(
    tmp_path: Path, names: tuple[str, ...], pattern: str
) -> None:
    with pytest.raises(DataError, match=pattern):
        Chat(write(tmp_path, *names))


def test_split_in_a_directory_and_its_subset_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"main/train\.jsonl"):
        GSM8K(write(tmp_path, "train.jsonl", "main/train.jsonl"))


@pytest.mark.parametrize("name", ["test.jsonl", "test-00000-of-00001-abcdef0123.jsonl"])
def test_file_or_shard_of_another_split_is_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="'test'"):
        Chat(write(tmp_path, name) / name)
