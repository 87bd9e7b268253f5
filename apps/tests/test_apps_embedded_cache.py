import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rl_apps.embedded.prepare import cached, key_of
from rl_contracts.errors import ModelError

PARTS = 200


def make(directory: Path) -> None:
    for part in range(PARTS):
        (directory / str(part)).write_text("x" * 1000)


def test_cached_second_call_reuses_the_directory(tmp_path: Path) -> None:
    first = cached(tmp_path / "new", "key", make)

    second = cached(tmp_path / "new", "key", lambda directory: pytest.fail("built twice"))

    assert first == second == tmp_path / "new" / "key"
    assert len(list(first.iterdir())) == PARTS


def test_cached_failing_make_leaves_no_files(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "half").write_text("")
        raise RuntimeError("injected")

    with pytest.raises(RuntimeError, match="injected"):
        cached(tmp_path, "key", fail)

    assert list(tmp_path.iterdir()) == []


def test_cached_concurrent_makes_keep_one_complete_directory(tmp_path: Path) -> None:
    barrier = threading.Barrier(3)

    def make_together(directory: Path) -> None:
        barrier.wait(30)
        make(directory)

    with ThreadPoolExecutor(3) as executor:
        futures = [executor.submit(cached, tmp_path, "key", make_together) for _ in range(3)]
        paths = {future.result(30) for future in futures}

    assert paths == {tmp_path / "key"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["key"]
    assert {len(part.read_text()) for part in (tmp_path / "key").iterdir()} == {1000}


def test_cached_unwritable_directory_raises_model_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ModelError, match="HF_HOME"):
        cached(tmp_path / "file", "key", make)


def test_key_of_changed_ingredients_or_sources_differs(tmp_path: Path) -> None:
    source = tmp_path / "code.py"
    source.write_text("a = 1")
    before = key_of({"seed": 1}, [source])

    assert key_of({"seed": 2}, [source]) != before
    source.write_text("a = 2")
    assert key_of({"seed": 1}, [source]) != before
    source.write_text("a = 1")
    assert key_of({"seed": 1}, [source]) == before
