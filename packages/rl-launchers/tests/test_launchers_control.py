"""Tests of `RunControl`: the status that a launcher writes, and the requests that it reads."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rl_contracts.conformance.scheduler import python, server
from rl_contracts.runtime.name_service import FileNames
from rl_contracts.runtime.run_files import read_json, seconds_since_heartbeat
from rl_contracts.scheduler import JobSpec, Worker
from rl_contracts.testing.waiting import wait_until
from rl_launchers import Launcher, LauncherConfig, LocalScheduler, RunControl

BEAT = 0.1

LAUNCHER = """
import sys
from pathlib import Path
from rl_contracts.runtime.name_service import FileNames
from rl_contracts.scheduler import JobSpec
from rl_launchers import Launcher, LocalScheduler, RunControl
root = Path(sys.argv[1])
with LocalScheduler(root / "logs") as scheduler, RunControl(FileNames(root / "names"), beat=0.1) as control:
    command = (sys.executable, "-c", sys.argv[2], str(root / "pid"))
    sys.exit(Launcher(scheduler, control=control).run([], lambda _: [JobSpec("actor", command)]))
"""

WRITES_ON_SIGTERM = """
import os, pathlib, signal, sys, time
def stop(*_):
    pathlib.Path(sys.argv[1]).with_suffix(".stopped").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(600)
"""

IGNORES_SIGTERM = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(600)
"""


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[LocalScheduler]:
    with LocalScheduler(tmp_path / "logs") as scheduler:
        yield scheduler


class Command:
    """Launcher in a separate process. Its trainer runs when the constructor returns."""

    def __init__(self, directory: Path, trainer: str) -> None:
        self.names, self.directory = FileNames(directory / "names"), directory
        self.process = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(directory), trainer])
        wait_until(lambda: (directory / "pid").exists() and (directory / "pid").read_text() != "", 60)
        wait_until(lambda: bool(read_json(self.names, "workers")) and self.status["state"] == "running", 60)

    @property
    def status(self) -> dict[str, object]:
        status = read_json(self.names, "status")
        assert isinstance(status, dict)
        return status

    @property
    def trainer(self) -> int:
        return int((self.directory / "pid").read_text())


@pytest.fixture
def command(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Command]:
    command = Command(tmp_path, getattr(request, "param", WRITES_ON_SIGTERM))
    yield command
    command.process.send_signal(signal.SIGCONT)
    command.process.kill()
    command.process.wait(10)


@pytest.mark.slow
def test_status_follows_run_to_its_end(scheduler: LocalScheduler, tmp_path: Path) -> None:
    names, states = FileNames(tmp_path / "names"), list[str]()

    def record(workers: list[Worker]) -> None:
        states.append(read_json(names, "status")["state"])

    with RunControl(names, beat=BEAT) as control:
        assert read_json(names, "status")["state"] == "preparing"
        trainer = JobSpec("actor", python("import time; time.sleep(1)"))
        code = Launcher(scheduler, control=control).run(
            [server("rollout", delay=2.0)], lambda _: [trainer], on_tick=record
        )

    status = read_json(names, "status")
    assert code == 0
    assert (status["state"], status["pid"]) == ("finished", os.getpid())
    assert status["beat"] >= 3
    assert sorted(set(states) - {"preparing"}) == ["running", "starting"]
    assert read_json(names, "workers") == []


def test_status_of_failed_run_has_first_line_of_error(scheduler: LocalScheduler, tmp_path: Path) -> None:
    names = FileNames(tmp_path / "names")
    with pytest.raises(Exception, match="exit code 3"), RunControl(names, beat=BEAT) as control:
        Launcher(scheduler, control=control).run([], lambda _: [JobSpec("actor", python("raise SystemExit(3)"))])
    status = read_json(names, "status")
    assert status["state"] == "failed"
    assert status["error"] == "actor-0 ended with exit code 3 while the run needed it."  # without lines of the log


def test_names_have_no_run_key_and_only_owner_can_read_them(scheduler: LocalScheduler, tmp_path: Path) -> None:
    names = FileNames(tmp_path / "names")
    texts: list[str] = []

    def read(workers: list[Worker]) -> None:
        files = [path for path in (tmp_path / "names").rglob("=value") if path.exists()]
        assert all(path.stat().st_mode & 0o077 == 0 for path in files if path.exists())
        texts.extend(names.children().values())

    with RunControl(names, beat=BEAT) as control:
        launcher = Launcher(scheduler, control=control)
        trainer = JobSpec("actor", python("import time; time.sleep(0.5)"))
        launcher.run([server("rollout")], lambda _: [trainer], on_tick=read)

    assert any("rollout-0" in text for text in texts)
    assert not any(launcher.key in text for text in texts)


def test_control_enter_deletes_names_of_earlier_command(tmp_path: Path) -> None:
    names = FileNames(tmp_path / "names")
    for key in ("servers/rollout/7", "control/stop", "control/scale/rollout", "heartbeat/actor-0", "workers"):
        names.add(key, "1")
    with RunControl(names, beat=BEAT):
        assert list(names.children()) == ["status", "workers"]
        assert read_json(names, "workers") == []


def test_heartbeat_of_killed_launcher_ages_also_on_other_host(command: Command) -> None:
    def age() -> float:
        return seconds_since_heartbeat(command.names, command.status)

    def age_on_other_host() -> float:
        """Return the age without a comparison of the clocks of the two hosts."""
        other = {"host": "elsewhere", "time": time.time() - 1000}
        return seconds_since_heartbeat(command.names, command.status | other)

    assert age() < 10 * BEAT
    wait_until(lambda: age_on_other_host() == 0.0)
    command.process.kill()
    command.process.wait(10)
    assert command.status["state"] == "running"  # a killed launcher cannot update it
    wait_until(lambda: age() > 3 * BEAT)
    assert age_on_other_host() > 3 * BEAT


@pytest.mark.slow
def test_busy_launcher_sends_heartbeats_and_reports_last_poll(scheduler: LocalScheduler, tmp_path: Path) -> None:
    names, ages = FileNames(tmp_path / "names"), list[float]()

    def be_busy(workers: list[Worker]) -> None:
        if not ages:
            wait_until(lambda: read_json(names, "status")["looked"] > 1.0)
            ages.append(seconds_since_heartbeat(names, read_json(names, "status")))

    with RunControl(names, beat=BEAT) as control:
        Launcher(scheduler, control=control).run([], lambda _: [JobSpec("actor", python("pass"))], on_tick=be_busy)

    assert ages[0] < 1.0


def test_stop_request_terminates_trainers_like_sigterm(command: Command, tmp_path: Path) -> None:
    command.names.add("control/stop", "gracefully")
    assert command.process.wait(60) == 143
    assert (tmp_path / "pid.stopped").exists()
    assert command.status["state"] == "stopped"
    assert command.names.children("control") == {}


@pytest.mark.parametrize("command", [IGNORES_SIGTERM], indirect=True)
def test_stop_now_kills_trainers_before_grace_period_ends(command: Command) -> None:
    begin = time.monotonic()
    command.names.add("control/stop", "now")
    assert command.process.wait(60) == 143
    assert time.monotonic() - begin < LauncherConfig().grace_seconds
    assert not psutil.pid_exists(command.trainer)


def test_temporarily_full_disk_is_logged_and_run_finishes(
    scheduler: LocalScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names, failed = FileNames(tmp_path / "names"), list[str]()
    add = FileNames.add

    def full(self: FileNames, key: str, value: str, replace: bool = False) -> None:
        if len(failed) < 20:
            failed.append(key)
            raise OSError(28, "No space left on device")
        add(self, key, value, replace)

    def tick(workers: list[Worker]) -> None:
        if len(failed) >= 20 and read_json(names, "status")["state"] == "running" and names.children("servers"):
            (tmp_path / "done").touch()

    with RunControl(names, beat=0.02) as control:
        monkeypatch.setattr(FileNames, "add", full)
        program = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)"
        trainer = JobSpec("actor", python(program, str(tmp_path / "done")))
        code = Launcher(scheduler, control=control).run([server("rollout")], lambda _: [trainer], on_tick=tick)

    assert code == 0
    assert "No space left on device" in caplog.text
    assert json.loads((tmp_path / "names" / "status" / "=value").read_text())["state"] == "finished"


PREPARES = """
import sys, time
from rl_contracts.runtime.name_service import FileNames
from rl_launchers import RunControl
from rl_launchers.supervise.interrupts import Interrupted
try:
    with RunControl(FileNames(sys.argv[1] + "/names"), 0.1) as control:
        if sys.argv[2] != "preparing":
            control.set_status(state=sys.argv[2])
        time.sleep(float(sys.argv[3]))
except Interrupted as stop:
    sys.exit(128 + stop.number)
"""
"""Program with a `RunControl` but without a launcher, like a command before or after its launcher runs."""


@pytest.mark.slow
@pytest.mark.parametrize(("state", "code", "kind"), [("preparing", 143, "gracefully"), ("stopping", 0, "now")])
def test_stop_before_or_after_launcher_sets_status_stopped(tmp_path: Path, state: str, code: int, kind: str) -> None:
    names = FileNames(tmp_path / "names")
    seconds = "60" if state == "preparing" else "1.5"
    process = subprocess.Popen([sys.executable, "-c", PREPARES, str(tmp_path), state, seconds])
    wait_until(lambda: (read_json(names, "status") or {}).get("beat", 0) > 1)
    names.add("control/stop", kind, replace=True)
    assert process.wait(20) == code
    assert read_json(names, "status")["state"] == "stopped"


def test_unreadable_control_names_are_ignored(tmp_path: Path) -> None:
    names = FileNames(tmp_path / "names")
    with RunControl(names, beat=0.05) as control:
        for key in ("stop", "unknown key"):  # values that are not UTF-8
            (tmp_path / "names" / "control" / key).mkdir(parents=True)
            (tmp_path / "names" / "control" / key / "=value").write_bytes(b"\xff\xfe")
        names.add("control/scale/rollout", "3")
        wait_until(lambda: control.scale_requests() == {"rollout": "3"})
        assert control._thread.is_alive()
