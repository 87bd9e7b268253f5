"""Files of lines on a disk that is full for a while."""

from __future__ import annotations

import json
import math
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rl_contracts.runtime.json_lines import LineFile, append, json_lines, to_json

FULL = Path("/dev/full")


@contextmanager
def room(size: int) -> Iterator[None]:
    """Files may have so many bytes, meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_to_json_of_numbers_that_are_not_finite_is_null() -> None:
    value = {"a": [math.nan, 1.5, (math.inf, {"b": -math.inf})], math.nan: 1, 2: "é"}
    text = to_json(value)
    assert text == '{"a": [null, 1.5, [null, {"b": null}]], "nan": 1, "2": "é"}'
    assert to_json({"a": math.nan, "b": Path("c")}, default=str, separators=(",", ":")) == '{"a":null,"b":"c"}'
    with pytest.raises(TypeError):
        to_json({"a": math.nan, "b": Path("c")})


def test_json_lines_end_with_line_feeds_alone_and_half_of_the_last_one_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    answers = [{"text": f"one{odd}two"} for odd in "\u2028\u2029\x85\x0b\x0c\x1c\r\n"]
    written = "".join(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers)
    file.write_text(written + '{"text": "thr', encoding="utf-8", newline="")
    assert list(json_lines(file)) == answers
    file.write_text(written + '{"text": "three"}', encoding="utf-8", newline="")
    assert list(json_lines(file)) == [*answers, {"text": "three"}]


def test_json_lines_that_are_none_are_an_error_where_the_line_is_whole(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text('{"a": 1}\n{"b":\n{"c": 3}\n')
    with pytest.raises(ValueError, match="Expecting value"):
        list(json_lines(tmp_path / "lines"))


def test_append_that_has_room_for_a_part_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    append(file, "one\n")
    with room(6), pytest.raises(OSError, match="No space left on device"):
        append(file, "two\nthree\n")
    assert file.read_text() == "one\n"


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full, which is a disk that is full")
def test_lines_for_which_there_is_no_room_wait_for_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = LineFile(tmp_path / "lines")
    file.path.symlink_to(FULL)
    file.write("one\n")
    file.write("two\n")
    with pytest.raises(OSError, match="No space left on device"):
        file.flush()
    file.path.unlink()

    file.write("three\n")

    assert file.path.read_text() == "one\ntwo\nthree\n"
    assert caplog.text.count("cannot be written, and will be again") == 1


def test_line_that_can_never_be_written_is_an_error_at_once(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "lines")
    file.path.mkdir()
    with pytest.raises(IsADirectoryError):
        file.write("one\n")
