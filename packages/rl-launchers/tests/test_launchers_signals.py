"""What signals to a launcher do: a whole program with servers, trainers and grandchildren is run and shot at."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rl_contracts.conformance.scheduler import SERVER
from rl_contracts.testing.waiting import wait_until

PROGRAM = """
import pathlib, subprocess, sys
from rl_contracts.scheduler import JobSpec
from rl_launchers import Launcher, LauncherConfig, LocalScheduler

folder, trainer, delay = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
SERVER, grace, finish = sys.argv[4], float(sys.argv[5]), float(sys.argv[6])

def trainers(servers):
    (folder / "port").write_text(str(servers[0].port))
    (folder / "scratch").mkdir()
    return [JobSpec("actor", (sys.executable, "-c", trainer, str(folder), servers[0].address))]

command = (sys.executable, "-c", SERVER, delay, "{host}", "{port}", str(folder))
rollout = JobSpec("rollout", command, ready_path="/", scratch=(str(folder / "scratch"),))
(folder / "started").touch()
config = LauncherConfig(grace_seconds=grace, finish_seconds=finish)
sys.exit(Launcher(LocalScheduler(folder / "logs"), config).run([rollout], trainers))
"""

TRAINER = """
import pathlib, signal, subprocess, sys, time, urllib.request
folder = pathlib.Path(sys.argv[1])
def recover(*_):
    (folder / "recover").write_text("saved")
    urllib.request.urlopen(sys.argv[2], timeout=5)
    (folder / "recover").write_text("saved while the server answered")
    sys.exit(0)
signal.signal(signal.SIGTERM, recover)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", str(folder)])
(folder / "training").touch()
time.sleep(600)
"""
"""Has a child of its own, and writes a recover point when it is asked to end."""

DEAF_TRAINER = TRAINER.replace("signal.SIGTERM, recover", "signal.SIGTERM, signal.SIG_IGN")

PATIENT_TRAINER = TRAINER.replace(
    "signal.SIGTERM, recover", "signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, recover)"
)
"""Ends at the second request only."""


class Program:
    """A running launcher program, whose processes are known by its folder in their command lines."""

    def __init__(
        self,
        folder: Path,
        trainer: str = TRAINER,
        delay: float = 0.0,
        behind: tuple[str, ...] = (),
        grace: float = 40.0,
        finish: float = 0.0,
        terminal: int | None = None,
    ) -> None:
        self.folder = folder
        options = map(str, (folder, trainer, delay, SERVER, grace, finish))
        command = [*behind, sys.executable, "-c", PROGRAM, *options]
        if terminal is None:
            self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        else:  # that of a shell, whose commands in the foreground all get its ^C
            self.process = subprocess.Popen(
                command,
                stdin=terminal,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
                preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            )

    def reaches(self, milestone: str) -> "Program":
        """Wait until the program has written a file."""
        wait_until((self.folder / milestone).exists)
        return self

    def ends_within(self, seconds: float) -> int:
        """Its exit code."""
        return self.process.wait(timeout=seconds)

    def left_behind(self) -> list[str]:
        """Command lines of its processes that still run, its keeper's included."""
        marks = str(self.folder), f"rl_launchers.local.reaper {self.process.pid}"
        commands = []
        for process in psutil.process_iter():
            try:
                alive = process.status() != psutil.STATUS_ZOMBIE
                command = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if alive and any(mark in command for mark in marks):
                commands.append(command)
        return commands

    def port_is_free(self) -> bool:
        """Whether nobody listens on the server's port."""
        port = int((self.folder / "port").read_text())
        return not any(c.laddr.port == port and c.status == psutil.CONN_LISTEN for c in psutil.net_connections("tcp"))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    programs: list[Program] = []

    def start(**options: object) -> Program:
        programs.append(Program(tmp_path, **options))  # type: ignore[arg-type]
        return programs[-1]

    yield start
    for program in programs:
        program.process.kill()  # the keeper ends the rest
        program.process.communicate(timeout=30)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_trainer_writes_its_recover_point_and_nothing_is_left(
    start: Callable[..., Program], number: signal.Signals, code: int
) -> None:
    program = start().reaches("training")
    assert len(program.left_behind()) >= 5  # launcher, keeper, server, trainer and its child

    program.process.send_signal(number)

    assert program.ends_within(15) == code
    assert (program.folder / "recover").read_text() == "saved while the server answered"
    assert program.left_behind() == []
    assert program.port_is_free()


@pytest.mark.parametrize("behind", [(), ("uv", "run", "--no-project")], ids=["alone", "uv run"])
def test_ctrl_c_at_a_terminal_is_one_request_to_end_for_the_whole_foreground(
    start: Callable[..., Program], behind: tuple[str, ...]
) -> None:
    if behind and shutil.which("uv") is None:
        pytest.skip("uv is not installed")
    master, terminal = os.openpty()
    program = start(behind=behind, terminal=terminal).reaches("training")

    os.write(master, b"\x03")

    assert program.ends_within(15) == 130
    assert (program.folder / "recover").read_text() == "saved while the server answered"
    wait_until(lambda: program.left_behind() == [])
    assert program.port_is_free()
    os.close(master)
    os.close(terminal)


@pytest.mark.slow
def test_third_signal_to_a_launcher_kills_a_deaf_trainer_at_once(start: Callable[..., Program]) -> None:
    program = start(trainer=DEAF_TRAINER).reaches("training")

    for _ in range(2):
        program.process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):  # it would wait for the trainer's 40 seconds
            program.ends_within(1)
    program.process.send_signal(signal.SIGINT)

    assert program.ends_within(5) == 130
    assert program.left_behind() == []


@pytest.mark.slow
def test_first_signal_waits_longer_than_the_grace_second_ends_it(start: Callable[..., Program]) -> None:
    program = start(trainer=PATIENT_TRAINER, grace=1.0).reaches("training")

    program.process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        program.ends_within(2)
    program.process.send_signal(signal.SIGINT)

    assert program.ends_within(20) == 130
    assert (program.folder / "recover").read_text() == "saved while the server answered"
    assert program.left_behind() == []


@pytest.mark.slow
def test_signal_deaf_trainer_is_killed_when_its_grace_is_over(start: Callable[..., Program]) -> None:
    program = start(trainer=DEAF_TRAINER, grace=1.0, finish=0.5).reaches("training")

    program.process.send_signal(signal.SIGINT)

    assert program.ends_within(20) == 130  # the other tests' 40 seconds would be too many
    assert program.left_behind() == []
    assert not (program.folder / "recover").exists()


def test_signal_while_a_server_starts_ends_the_wait(start: Callable[..., Program]) -> None:
    program = start(delay=600.0).reaches("logs/rollout-0.log")
    program.process.send_signal(signal.SIGINT)
    assert program.ends_within(10) == 130
    assert program.left_behind() == []


@pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv")
def test_uv_run_killed_by_sigkill_ends_what_it_ran(start: Callable[..., Program]) -> None:
    program = start(behind=("uv", "run", "--no-project")).reaches("training")

    program.process.kill()

    wait_until(lambda: program.left_behind() == [])
    assert program.port_is_free()
    assert (program.folder / "recover").read_text() == "saved while the server answered"


@pytest.mark.parametrize("keeper_killed_first", [False, True])
def test_launcher_killed_by_sigkill_its_processes_end_by_themselves(
    start: Callable[..., Program], keeper_killed_first: bool
) -> None:
    program = start().reaches("training")
    if keeper_killed_first:
        keeper = find_keeper(program.process.pid)
        keeper.kill()
        wait_until(lambda: find_keeper(program.process.pid) not in (None, keeper))  # the launcher starts another

    program.process.kill()

    wait_until(lambda: program.left_behind() == [])
    assert program.port_is_free()
    assert (program.folder / "recover").exists()  # they were asked first
    assert not (program.folder / "scratch").exists()


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.03, 0.1])
def test_launcher_killed_while_workers_start_none_is_left(start: Callable[..., Program], delay: float) -> None:
    program = start(delay=600.0).reaches("started")
    time.sleep(delay)  # falls before, in or after the start of the server
    program.process.kill()
    wait_until(lambda: program.left_behind() == [])


def find_keeper(launcher: int) -> psutil.Process | None:
    for child in psutil.Process(launcher).children():
        with suppress(psutil.Error):  # a dead one that has not been replaced yet
            if f"rl_launchers.local.reaper {launcher}" in " ".join(child.cmdline()):
                return child
    return None
