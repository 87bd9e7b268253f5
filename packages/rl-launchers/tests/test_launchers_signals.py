"""Tests of signals to a launcher program that runs a server, a trainer and the trainer's child."""

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
SERVER, grace = sys.argv[4], float(sys.argv[5])

def trainers(servers):
    (folder / "port").write_text(str(servers[0].port))
    (folder / "scratch").mkdir()
    return [JobSpec("actor", (sys.executable, "-c", trainer, str(folder), servers[0].address))]

command = (sys.executable, "-c", SERVER, delay, "{host}", "{port}", str(folder))
rollout = JobSpec("rollout", command, ready_path="/", scratch=(str(folder / "scratch"),))
(folder / "started").touch()
sys.exit(Launcher(LocalScheduler(folder / "logs"), LauncherConfig(grace_seconds=grace)).run([rollout], trainers))
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
"""Trainer with a child process that writes a recovery checkpoint on SIGTERM."""

IGNORING_TRAINER = TRAINER.replace("signal.SIGTERM, recover", "signal.SIGTERM, signal.SIG_IGN")

PATIENT_TRAINER = TRAINER.replace(
    "signal.SIGTERM, recover", "signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, recover)"
)
"""Trainer that ends only at the second SIGTERM."""


class Program:
    """Running launcher program. Its processes have its folder in their command lines."""

    def __init__(
        self,
        folder: Path,
        trainer: str = TRAINER,
        delay: float = 0.0,
        prefix: tuple[str, ...] = (),
        grace: float = 40.0,
        terminal: int | None = None,
    ) -> None:
        self.folder = folder
        options = map(str, (folder, trainer, delay, SERVER, grace))
        command = [*prefix, sys.executable, "-c", PROGRAM, *options]
        if terminal is None:
            self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        else:  # with a controlling terminal, which sends Ctrl-C to the whole foreground process group
            self.process = subprocess.Popen(
                command,
                stdin=terminal,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
                preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            )

    def wait_for_file(self, milestone: str) -> "Program":
        """Wait until the program has written a file."""
        wait_until((self.folder / milestone).exists)
        return self

    def exit_code_within(self, seconds: float) -> int:
        """Wait for the end of the program and return its exit code."""
        return self.process.wait(timeout=seconds)

    def remaining_commands(self) -> list[str]:
        """Return the command lines of processes that still run, including the reaper's."""
        marks = str(self.folder), f"rl_launchers.local.reaper {self.process.pid}"
        commands = []
        for process in psutil.process_iter():
            try:
                is_running = process.status() != psutil.STATUS_ZOMBIE
                command = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if is_running and any(mark in command for mark in marks):
                commands.append(command)
        return commands

    def port_is_free(self) -> bool:
        """Return whether no process listens on the server's port."""
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
        program.process.kill()  # the reaper ends the others
        program.process.communicate(timeout=30)


def test_sigterm_saves_checkpoint_and_leaves_no_process(start: Callable[..., Program]) -> None:
    program = start().wait_for_file("training")
    assert len(program.remaining_commands()) >= 5  # launcher, reaper, server, trainer and its child

    program.process.send_signal(signal.SIGTERM)

    assert program.exit_code_within(15) == 143
    assert (program.folder / "recover").read_text() == "saved while the server answered"
    assert program.remaining_commands() == []
    assert program.port_is_free()


@pytest.mark.parametrize("prefix", [(), ("uv", "run", "--no-project")], ids=["alone", "uv run"])
def test_ctrl_c_in_terminal_counts_as_one_stop_request(start: Callable[..., Program], prefix: tuple[str, ...]) -> None:
    if prefix and shutil.which("uv") is None:
        pytest.skip("uv is not installed")
    master, terminal = os.openpty()
    program = start(prefix=prefix, terminal=terminal).wait_for_file("training")

    os.write(master, b"\x03")

    assert program.exit_code_within(15) == 130
    assert (program.folder / "recover").read_text() == "saved while the server answered"
    wait_until(lambda: program.remaining_commands() == [])
    assert program.port_is_free()
    os.close(master)
    os.close(terminal)


@pytest.mark.slow
def test_third_signal_kills_trainer_that_ignores_sigterm(start: Callable[..., Program]) -> None:
    program = start(trainer=IGNORING_TRAINER).wait_for_file("training")

    for _ in range(2):
        program.process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):  # the launcher waits up to 40 s for the trainer
            program.exit_code_within(1)
    program.process.send_signal(signal.SIGINT)

    assert program.exit_code_within(5) == 130
    assert program.remaining_commands() == []


@pytest.mark.slow
def test_first_signal_waits_beyond_grace_and_second_ends_run(start: Callable[..., Program]) -> None:
    program = start(trainer=PATIENT_TRAINER, grace=1.0).wait_for_file("training")

    program.process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        program.exit_code_within(2)
    program.process.send_signal(signal.SIGINT)

    assert program.exit_code_within(20) == 130
    assert (program.folder / "recover").read_text() == "saved while the server answered"
    assert program.remaining_commands() == []


@pytest.mark.slow
def test_trainer_that_ignores_sigterm_is_killed_after_grace(start: Callable[..., Program]) -> None:
    program = start(trainer=IGNORING_TRAINER, grace=1.0).wait_for_file("training")

    program.process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        program.exit_code_within(1)
    program.process.send_signal(signal.SIGINT)

    assert program.exit_code_within(20) == 130  # less than the grace period of 40 s in the other tests
    assert program.remaining_commands() == []
    assert not (program.folder / "recover").exists()


def test_signal_during_server_start_ends_run(start: Callable[..., Program]) -> None:
    program = start(delay=600.0).wait_for_file("logs/rollout-0.log")
    program.process.send_signal(signal.SIGINT)
    assert program.exit_code_within(10) == 130
    assert program.remaining_commands() == []


@pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv")
def test_uv_run_killed_by_sigkill_stops_run(start: Callable[..., Program]) -> None:
    program = start(prefix=("uv", "run", "--no-project")).wait_for_file("training")

    program.process.kill()

    wait_until(lambda: program.remaining_commands() == [])
    assert program.port_is_free()
    assert (program.folder / "recover").read_text() == "saved while the server answered"


@pytest.mark.guarantee(
    "After SIGKILL of the launcher, all processes of the run end and the port of the server is free.", area="failures"
)
@pytest.mark.parametrize("reaper_killed_first", [False, True])
def test_launcher_killed_by_sigkill_reaper_ends_all_processes(
    start: Callable[..., Program], reaper_killed_first: bool
) -> None:
    program = start().wait_for_file("training")
    if reaper_killed_first:
        reaper = find_reaper(program.process.pid)
        reaper.kill()
        wait_until(lambda: find_reaper(program.process.pid) not in (None, reaper))  # the launcher starts a new one

    program.process.kill()

    wait_until(lambda: program.remaining_commands() == [])
    assert program.port_is_free()
    assert (program.folder / "recover").exists()  # the reaper sends SIGTERM first
    assert not (program.folder / "scratch").exists()


@pytest.mark.parametrize("delay", [0.0, 0.03])
def test_launcher_killed_during_start_leaves_no_process(start: Callable[..., Program], delay: float) -> None:
    program = start(delay=600.0).wait_for_file("started")
    time.sleep(delay)  # the kill comes before, during or after the start of the server
    program.process.kill()
    wait_until(lambda: program.remaining_commands() == [])


def find_reaper(launcher: int) -> psutil.Process | None:
    for child in psutil.Process(launcher).children():
        with suppress(psutil.Error):  # a dead reaper before the launcher replaces it
            if f"rl_launchers.local.reaper {launcher}" in " ".join(child.cmdline()):
                return child
    return None
