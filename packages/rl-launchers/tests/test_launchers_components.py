"""Unit tests of launcher components: messages, logs, templates, ports, heartbeats."""

import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_contracts.errors import ConfigError, LaunchError
from rl_contracts.runtime.name_service import MemoryNames
from rl_contracts.runtime.run_files import TAIL_BYTES, tail
from rl_contracts.testing.waiting import wait_until
from rl_launchers.local.process import fill_in
from rl_launchers.local.resources import PortReservation
from rl_launchers.supervise import exit_report
from rl_launchers.supervise.exit_report import ERRORS_BEFORE, describe_exit, informative_tail, with_log
from rl_launchers.supervise.heartbeat import Heartbeats
from rl_launchers.supervise.server_health import probe


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (1, "ended with exit code 1"),
        (-9, "was killed by SIGKILL (out of memory?)"),
        (-15, "was killed by SIGTERM"),
        (137, "ended with exit code 137, which a shell gives for SIGKILL (out of memory?)"),
        (None, "ended"),
    ],
)
def test_describe_exit_names_cause(code: int | None, expected: str) -> None:
    assert describe_exit(code) == expected


@given(st.lists(st.text("abc é", min_size=1, max_size=8), max_size=30), st.integers(1, 40), st.integers(0, 30))
def test_tail_of_any_log_returns_last_lines_after_offset(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], count: int, earlier: int
) -> None:
    log = tmp_path_factory.mktemp("logs") / "log"
    log.write_text("".join(f"{line}\n" for line in lines))
    offset = len("".join(f"{line}\n" for line in lines[:earlier]).encode())
    assert tail(log, count, offset).splitlines() == lines[earlier:][-count:]


def test_tail_of_huge_log_reads_only_its_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"\xff\n" * TAIL_BYTES + b"the end\n")
    assert tail(log, 2).splitlines() == ["�", "the end"]


def test_tail_of_missing_log_is_empty(tmp_path: Path) -> None:
    assert tail(tmp_path / "none", 5) == ""
    assert "is empty" in with_log("problem", tmp_path / "none", "")


@pytest.mark.parametrize(("free", "full"), [(4096, True), (1 << 20, False)])
def test_with_log_on_full_disk_warns_of_missing_lines(
    free: int, full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exit_report.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    message = with_log("it ended", tmp_path / "log", "half a li")
    assert message.startswith("it ended\n")
    assert message.endswith("\n    half a li")
    assert ("No space left on device" in message) == full


def test_informative_tail_shows_each_earlier_error_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    before = "ValueError: from an earlier start\n"
    cause = "(EngineCore pid=7) ERROR 11-23 [core.py:9] ValueError: the model has no such layer"
    stack = [f"(APIServer pid=6)   File {i}" for i in range(50)]
    warning = "WARNING This can cause errors like `OSError: too many open files`."
    last = "RuntimeError: Engine core failed. See above."
    lines = ["started", warning, cause, cause.replace("pid=7", "pid=8"), *stack, last]
    log.write_text(before + "\n".join(lines) + "\n")

    assert informative_tail(log, 2, len(before)).splitlines() == [cause, "...", stack[-1], lines[-1]]
    assert informative_tail(log, 99, len(before)).splitlines() == lines
    assert informative_tail(log, 0) == ""


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("[core.py:9] Exception: the worker is gone", True),
        ("torch.OutOfMemoryError: 9 GiB", True),
        ("Error in the weather report", False),
    ],
)
def test_informative_tail_recognizes_lines_that_name_an_error(line: str, shown: bool, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(f"{line}\nthe end\n")

    assert informative_tail(log, 1) == (f"{line}\n...\nthe end" if shown else "the end")


def test_informative_tail_shows_only_first_of_many_errors(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"KeyError: {i}\n" for i in range(100)) + "the end\n")

    assert informative_tail(log, 1).splitlines() == [
        *(f"KeyError: {i}" for i in range(ERRORS_BEFORE)),
        "...",
        "the end",
    ]


@given(st.text(), st.integers(0, 99), st.integers(1, 65535))
def test_fill_in_keeps_other_text(text: str, index: int, port: int) -> None:
    plain = text.replace("{index}", "").replace("{host}", "").replace("{port}", "")
    assert fill_in(plain + "|{index}|{host}|{port}", index, "::", port) == f"{plain}|{index}|::|{port}"


def test_fill_in_port_without_port_raises() -> None:
    with pytest.raises(ConfigError, match="needs_port"):
        fill_in("{port}", 0, "localhost", None)


def test_port_reservation_on_foreign_address_raises() -> None:
    with pytest.raises(LaunchError, match=r"192\.0\.2\.1"):
        PortReservation("192.0.2.1")


def test_port_reservation_released_port_is_free() -> None:
    reservation = PortReservation()
    reservation.release()
    reservation.release()
    with socket.create_server(("127.0.0.1", reservation.port)) as listener:
        assert listener.getsockname()[1] == reservation.port


def test_port_reservation_after_hand_over_lets_server_listen() -> None:
    reservation = PortReservation()
    reservation.hand_over()
    with socket.create_server(("127.0.0.1", reservation.port)):
        assert probe("127.0.0.1", reservation.port, "/", timeout=0.2) == "timed out"
    reservation.release()
    assert "refused" in str(probe("127.0.0.1", reservation.port, "/"))


def test_heartbeats_cleared_during_read_stay_cleared() -> None:
    """A restarted rank must not inherit the time without a heartbeat of its predecessor."""
    names = MemoryNames()
    heartbeats = Heartbeats(names)
    heartbeats.timeout = 0.2
    names.add("heartbeat/actor-0", "7")
    wait_until(lambda: _read(heartbeats).is_hung("actor-0"))
    names.children = lambda prefix="": HookedEntries(heartbeats.clear)  # type: ignore[method-assign]
    time.sleep(heartbeats.timeout / 4)
    heartbeats.read()

    assert not heartbeats.is_hung("actor-0")


class HookedEntries(dict[str, str]):
    """Store entries with one heartbeat; the first iteration over them ends with a call of `hook`."""

    def __init__(self, hook: Callable[[], None]) -> None:
        self._hook: Callable[[], None] | None = hook

    def items(self) -> Any:
        yield "heartbeat/actor-0", "7"
        hook, self._hook = self._hook, None
        if hook:
            hook()


def _read(heartbeats: Heartbeats) -> Heartbeats:
    heartbeats.read()
    return heartbeats
