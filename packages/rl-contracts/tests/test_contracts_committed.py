"""Record of the last commit: a reader gets exactly what was written, or nothing."""

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


def test_read_committed_returns_last_record_with_64_bit_checksums(tmp_path: Path) -> None:
    for version in (3, 4):
        write_committed(tmp_path / "weights", *record(version))

    committed = read_committed(tmp_path / "weights")

    assert committed is not None
    assert (committed.meta, committed.receipt) == record(4)
    assert committed.version == 4
    assert [path.name for path in (tmp_path / "weights").iterdir()] == [RECORD_FILE]


def test_read_committed_before_first_commit_is_none(tmp_path: Path) -> None:
    assert read_committed(tmp_path) is None
    assert read_committed(tmp_path / "missing") is None


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"meta": {"route": "shm"}, "receipt": {"sums": 3}}'])
def test_read_committed_invalid_record_raises_naming_file(tmp_path: Path, text: str) -> None:
    (tmp_path / RECORD_FILE).write_text(text)

    with pytest.raises(WeightUpdateError, match=RECORD_FILE):
        read_committed(tmp_path)
