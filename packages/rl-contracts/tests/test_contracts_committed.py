"""The record of the last commit: what is read is what was written, all of it or none."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_contracts.data import ParamSpec, WeightPart, WeightReceipt, WeightUpdateMeta
from rl_contracts.errors import WeightUpdateError
from rl_contracts.weights import read_committed, write_committed
from rl_contracts.weights.committed_record import RECORD_FILE


def record(version: int) -> tuple[WeightUpdateMeta, WeightReceipt]:
    params = (ParamSpec("head.weight", (3, 4), "bfloat16"),)
    meta = WeightUpdateMeta("shm", version, (WeightPart(f"/somewhere/slot-{version % 2}.weights", params),))
    return meta, WeightReceipt("trainer", version, {"head.weight": 2**64 - version})


def test_read_committed_gives_the_last_one_written_with_all_64_bits(tmp_path: Path) -> None:
    for version in (3, 4):
        write_committed(tmp_path / "weights", *record(version))

    found = read_committed(tmp_path / "weights")

    assert found is not None
    assert (found.meta, found.receipt) == record(4)
    assert found.version == 4
    assert [path.name for path in (tmp_path / "weights").iterdir()] == [RECORD_FILE]


def test_read_committed_before_the_first_commit_is_none(tmp_path: Path) -> None:
    assert read_committed(tmp_path) is None
    assert read_committed(tmp_path / "missing") is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"meta": {"route": "shm"}, "receipt": {"sums": 3}}'])
def test_read_committed_of_something_else_raises_naming_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / RECORD_FILE).write_text(text)

    with pytest.raises(WeightUpdateError, match=RECORD_FILE):
        read_committed(tmp_path)
