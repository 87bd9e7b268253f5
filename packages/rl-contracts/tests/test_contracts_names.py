"""Run the conformance suite on both name services, and test `FileNames` for faults specific to shared files."""

from __future__ import annotations

import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rl_contracts.conformance.names import NameServiceConformance
from rl_contracts.runtime.name_service import FileNames, MemoryNames, NameService, UnknownNameError


class TestMemoryNames(NameServiceConformance):
    @pytest.fixture
    def names(self) -> NameService:
        return MemoryNames()


class TestFileNames(NameServiceConformance):
    @pytest.fixture
    def names(self, tmp_path: Path) -> NameService:
        return FileNames(tmp_path / "run" / "names")


def test_file_names_are_accessible_to_the_owner_only(tmp_path: Path) -> None:
    FileNames(tmp_path / "names").add("run/trainer", "x")

    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in [tmp_path / "names", *(tmp_path / "names").rglob("*")]}

    assert modes == {"names": 0o700, "run": 0o700, "trainer": 0o700, "=value": 0o600}


def test_file_names_replace_is_atomic_for_readers(tmp_path: Path) -> None:
    names = FileNames(tmp_path)
    values = {"a" * 20_000, "b" * 20_000}
    names.add("k", "a" * 20_000)
    done = threading.Event()

    def write() -> None:
        for _ in range(20):
            for value in values:
                names.add("k", value, replace=True)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    observed = set()
    while not done.is_set():
        observed.add(FileNames(tmp_path).get("k"))
    writer.join()

    assert observed <= values
    assert [path.name for path in (tmp_path / "k").iterdir()] == ["=value"]


def test_file_names_wait_sees_key_of_another_process(tmp_path: Path) -> None:
    names = FileNames(tmp_path / "names")
    code = (
        "from rl_contracts.runtime.name_service import FileNames; "
        f"FileNames({str(tmp_path / 'names')!r}).add('run/x', 'hello')"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        assert names.wait("run/x", timeout=60) == "hello"
        assert process.wait(60) == 0


def test_file_names_reader_creates_no_files(tmp_path: Path) -> None:
    names = FileNames(tmp_path / "run" / "names")

    assert names.children("servers/rollout") == {}
    with pytest.raises(UnknownNameError):
        names.get("servers/rollout/0")
    names.delete("servers/rollout/0")

    assert not list(tmp_path.iterdir())
