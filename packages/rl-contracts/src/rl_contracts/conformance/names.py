"""Conformance suite for name services.

Subclass `NameServiceConformance` and add a `names` fixture that returns an empty service.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rl_contracts.errors import ConfigError, StalledError
from rl_contracts.runtime.name_service import NameService, NameTakenError, UnknownNameError

__all__ = ["NameServiceConformance"]


class NameServiceConformance:
    """Tests of the `NameService` contract."""

    def test_add_then_get_returns_the_value(self, names: NameService) -> None:
        names.add("run/servers/0", "127.0.0.1:30000\n ü")

        assert names.get("run/servers/0") == "127.0.0.1:30000\n ü"

    def test_add_taken_key_raises_unless_replace_is_set(self, names: NameService) -> None:
        names.add("run/trainer", "old")

        with pytest.raises(NameTakenError, match=r"run/trainer.*'old'"):
            names.add("run/trainer", "new")
        names.add("run/trainer", "newer", replace=True)

        assert names.get("run/trainer") == "newer"

    def test_add_concurrently_exactly_one_succeeds(self, names: NameService) -> None:
        barrier = threading.Barrier(8)

        def add(index: int) -> bool:
            barrier.wait(5)
            try:
                names.add("run/leader", str(index))
            except NameTakenError:
                return False
            return True

        with ThreadPoolExecutor(8) as pool:
            winners = [index for index, success in enumerate(pool.map(add, range(8))) if success]

        assert [names.get("run/leader")] == [str(index) for index in winners]

    def test_get_unknown_key_raises_and_delete_ignores_it(self, names: NameService) -> None:
        names.delete("run/unknown")

        with pytest.raises(UnknownNameError, match="run/unknown"):
            names.get("run/unknown")

    def test_delete_frees_the_key(self, names: NameService) -> None:
        names.add("run/x", "1")
        names.delete("run/x")

        names.add("run/x", "2")

        assert names.get("run/x") == "2"

    def test_children_returns_sorted_keys_below_prefix(self, names: NameService) -> None:
        for key in ("run/servers/1", "run/servers", "run/servers/0", "run/servers2/0", "run/servers/0/control"):
            names.add(key, key.upper())
        names.add("run/servers/2", "gone")
        names.delete("run/servers/2")

        expected = ["run/servers/0", "run/servers/0/control", "run/servers/1"]

        assert list(names.children("run/servers").items()) == [(key, key.upper()) for key in expected]
        assert set(names.children()) == {*expected, "run/servers", "run/servers2/0"}
        assert names.children("nothing/here") == {}

    def test_wait_returns_once_the_key_is_added(self, names: NameService) -> None:
        waiting = threading.Event()

        def add() -> None:
            waiting.wait(5)
            names.add("run/trainer", "here")

        thread = threading.Thread(target=add)
        thread.start()
        waiting.set()

        assert names.wait("run/trainer", timeout=10) == "here"
        thread.join()

    def test_wait_timeout_names_the_key_and_existing_keys(self, names: NameService) -> None:
        names.add("run/servers/0", "a")
        names.add("run/trainer", "b")
        start = time.monotonic()

        with pytest.raises(StalledError, match=r"'run/servers/1'.* 0\.05 s.*: run/servers/0$"):
            names.wait("run/servers/1", timeout=0.05)
        with pytest.raises(StalledError, match=r"run/servers/0, run/trainer$"):
            names.wait("nowhere/x", timeout=0)
        assert time.monotonic() - start < 5

    def test_wait_timeout_truncates_long_list_of_keys(self, names: NameService) -> None:
        for index in range(30):
            names.add(f"run/servers/{index}", "a")

        with pytest.raises(StalledError, match=r"\b10 more"):
            names.wait("run/servers/x", timeout=0)

    @pytest.mark.parametrize(
        "key", ["", "/", "/etc/passwd", "a//b", "a/", "../x", "a/../b", ".", "a/...", "a b", "=value", "a\n"]
    )
    def test_invalid_key_raises_config_error(self, names: NameService, key: str) -> None:
        for call in (lambda: names.add(key, "x"), lambda: names.get(key), lambda: names.delete(key)):
            with pytest.raises(ConfigError, match=r"names: .*run/servers/0"):
                call()
