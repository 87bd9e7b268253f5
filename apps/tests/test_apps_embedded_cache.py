import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rl_apps.embedded.prepare import cached, default_cache_dir, key_of
from rl_contracts.errors import ModelError

PARTS = 200


def make(directory: Path) -> None:
    for part in range(PARTS):
        (directory / str(part)).write_text("x" * 1000)


def test_cached_second_call_finds_what_the_first_made(tmp_path: Path) -> None:
    first = cached(tmp_path / "new", "key", make)

    again = cached(tmp_path / "new", "key", lambda directory: pytest.fail("made again"))

    assert first == again == tmp_path / "new" / "key"
    assert len(list(first.iterdir())) == PARTS


def test_cached_maker_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "half").write_text("")
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        cached(tmp_path, "key", fail)

    assert list(tmp_path.iterdir()) == []


def test_cached_concurrent_makers_agree_on_one_whole_directory(tmp_path: Path) -> None:
    all_are_there = threading.Barrier(3)

    def make_together(directory: Path) -> None:
        all_are_there.wait(30)
        make(directory)

    with ThreadPoolExecutor(3) as makers:
        made = [makers.submit(cached, tmp_path, "key", make_together) for _ in range(3)]
        paths = {future.result(30) for future in made}

    assert paths == {tmp_path / "key"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["key"]
    assert {len(part.read_text()) for part in (tmp_path / "key").iterdir()} == {1000}


def test_cached_unwritable_directory_names_it_and_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ModelError, match="HF_HOME"):
        cached(tmp_path / "file", "key", make)


def test_key_of_changes_with_ingredients_and_with_code(tmp_path: Path) -> None:
    source = tmp_path / "code.py"
    source.write_text("a = 1")
    before = key_of({"seed": 1}, [source])

    assert key_of({"seed": 2}, [source]) != before
    source.write_text("a = 2")
    assert key_of({"seed": 1}, [source]) != before
    source.write_text("a = 1")
    assert key_of({"seed": 1}, [source]) == before


def test_default_cache_dir_follows_hugging_face(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "rl" / "embedded"

    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "rl" / "embedded"
