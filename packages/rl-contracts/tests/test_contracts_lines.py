"""Files of lines on a disk that is temporarily full."""

from __future__ import annotations

import json
import math
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rl_contracts.runtime.json_lines import LineFile, LineReader, append, json_lines, to_json

FULL = Path("/dev/full")


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Limit files to `size` bytes in the block."""
    previous = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, previous[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, previous)


def test_to_json_non_finite_numbers_become_null() -> None:
    value = {"a": [math.nan, 1.5, (math.inf, {"b": -math.inf})], math.nan: 1, 2: "é"}
    text = to_json(value)
    assert text == '{"a": [null, 1.5, [null, {"b": null}]], "nan": 1, "2": "é"}'
    assert to_json({"a": math.nan, "b": Path("c")}, default=str, separators=(",", ":")) == '{"a":null,"b":"c"}'
    with pytest.raises(TypeError):
        to_json({"a": math.nan, "b": Path("c")})


def test_json_lines_split_at_line_feeds_and_skip_unfinished_line(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    records = [{"text": f"one{separator}two"} for separator in "\u2028\u2029\x85\x0b\x0c\x1c\r\n"]
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    file.write_text(text + '{"text": "thr', encoding="utf-8", newline="")
    assert list(json_lines(file)) == records
    file.write_text(text + '{"text": "three"}', encoding="utf-8", newline="")
    assert list(json_lines(file)) == [*records, {"text": "three"}]


def test_json_lines_complete_line_without_json_raises(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text('{"a": 1}\n{"b":\n{"c": 3}\n')
    with pytest.raises(ValueError, match="Expecting value"):
        list(json_lines(tmp_path / "lines"))


def test_append_partial_write_leaves_file_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    append(file, "one\n")
    with file_size_limit(6), pytest.raises(OSError, match="No space left on device"):
        append(file, "two\nthree\n")
    assert file.read_text() == "one\n"


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full, which acts as a full disk")
def test_line_file_full_disk_keeps_lines_for_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = LineFile(tmp_path / "lines")
    file.path.symlink_to(FULL)
    file.write("one\n")
    file.write("two\n")
    with pytest.raises(OSError, match="No space left on device"):
        file.flush()
    file.path.unlink()

    file.write("three\n")

    assert file.path.read_text() == "one\ntwo\nthree\n"
    assert caplog.text.count(f"{file.path} cannot be written") == 1


def test_line_file_permanent_error_raises_at_once(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "lines")
    file.path.mkdir()
    with pytest.raises(IsADirectoryError):
        file.write("one\n")


def test_line_reader_yields_each_complete_line_once(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    reader = LineReader(path)
    assert not list(reader.read())
    path.write_text('{"a": 1}\nnot JSON\n{"a": 2')
    assert list(reader.read()) == [{"a": 1}]
    append(path, "2}\n")
    assert list(reader.read()) == [{"a": 22}]
    assert not list(LineReader(path, skip=True).read())


def test_line_reader_replaced_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text("1\n")
    reader = LineReader(path, skip=True)
    assert not reader.replaced()
    (tmp_path / "new").write_text("2\n")
    (tmp_path / "new").rename(path)
    assert reader.replaced()
