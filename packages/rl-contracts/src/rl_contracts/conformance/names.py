"""What every name service promises. Subclass `NameServiceConformance`, give it a `names` fixture: an empty service."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rl_contracts.errors import ConfigError, StalledError
from rl_contracts.runtime.name_service import NameService, NameTakenError, UnknownNameError

__all__ = ["NameServiceConformance"]


class NameServiceConformance:
    def test_add_then_get_gives_the_value(self, names: NameService) -> None:
        names.add("run/servers/0", "127.0.0.1:30000\n ü")

        assert names.get("run/servers/0") == "127.0.0.1:30000\n ü"

    def test_add_taken_key_is_refused_unless_replaced(self, names: NameService) -> None:
        names.add("run/trainer", "old")

        with pytest.raises(NameTakenError, match="already taken by 'old'"):
            names.add("run/trainer", "new")
        names.add("run/trainer", "newer", replace=True)

        assert names.get("run/trainer") == "newer"

    def test_add_by_many_at_once_one_succeeds(self, names: NameService) -> None:
        barrier = threading.Barrier(8)

        def add(index: int) -> bool:
            barrier.wait(5)
            try:
                names.add("run/leader", str(index))
            except NameTakenError:
                return False
            return True

        with ThreadPoolExecutor(8) as pool:
            won = [index for index, success in enumerate(pool.map(add, range(8))) if success]

        assert [names.get("run/leader")] == [str(index) for index in won]

    def test_get_or_delete_unknown_key(self, names: NameService) -> None:
        names.delete("run/nobody")

        with pytest.raises(UnknownNameError, match="run/nobody"):
            names.get("run/nobody")

    def test_delete_frees_the_key(self, names: NameService) -> None:
        names.add("run/x", "1")
        names.delete("run/x")

        names.add("run/x", "2")

        assert names.get("run/x") == "2"

    def test_children_are_the_keys_below_in_order(self, names: NameService) -> None:
        for key in ("run/servers/1", "run/servers", "run/servers/0", "run/servers2/0", "run/servers/0/control"):
            names.add(key, key.upper())
        names.add("run/servers/2", "gone")
        names.delete("run/servers/2")

        below = ["run/servers/0", "run/servers/0/control", "run/servers/1"]

        assert list(names.children("run/servers").items()) == [(key, key.upper()) for key in below]
        assert set(names.children()) == {*below, "run/servers", "run/servers2/0"}
        assert names.children("nothing/here") == {}

    def test_wait_returns_as_soon_as_the_key_is_there(self, names: NameService) -> None:
        waiting = threading.Event()

        def add() -> None:
            waiting.wait(5)
            names.add("run/trainer", "here")

        thread = threading.Thread(target=add)
        thread.start()
        waiting.set()

        assert names.wait("run/trainer", timeout=10) == "here"
        thread.join()

    def test_wait_past_its_deadline_names_the_key_and_what_is_there(self, names: NameService) -> None:
        names.add("run/servers/0", "a")
        names.add("run/trainer", "b")
        start = time.monotonic()

        with pytest.raises(StalledError, match=r"'run/servers/1' did not appear within 0\.05 s.*: run/servers/0$"):
            names.wait("run/servers/1", timeout=0.05)
        with pytest.raises(StalledError, match=r"run/servers/0, run/trainer$"):
            names.wait("nowhere/x", timeout=0)
        assert time.monotonic() - start < 5

    def test_wait_lists_no_endless_neighbours(self, names: NameService) -> None:
        for index in range(30):
            names.add(f"run/servers/{index}", "a")

        with pytest.raises(StalledError, match="and 10 more"):
            names.wait("run/servers/x", timeout=0)

    @pytest.mark.parametrize(
        "key", ["", "/", "/etc/passwd", "a//b", "a/", "../x", "a/../b", ".", "a/...", "a b", "=value", "a\n"]
    )
    def test_key_that_is_no_plain_path_is_refused(self, names: NameService, key: str) -> None:
        for call in (lambda: names.add(key, "x"), lambda: names.get(key), lambda: names.delete(key)):
            with pytest.raises(ConfigError, match="expected a key like"):
                call()
