"""`rl status`, `rl logs`, `rl stop`, `rl scale`: by the directory of a run alone."""

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import aiohttp
import pytest

import rl_apps
from rl_apps.cli import main
from rl_apps.run.worker import is_user_error
from rl_contracts.errors import AgentError, ConfigError, EngineError, InferenceError, RewardError, RLError
from rl_contracts.testing.waiting import wait_until
from rl_launchers import RunControl
from rl_monitor import status
from rl_monitor.run_directory import FINISHED, JOB, last_record, names_of

RUN = """
import sys, time
from pathlib import Path
from rl_monitor.run_directory import names_of
from rl_contracts.runtime.name_service import FileNames
from rl_contracts.scheduler import JobSpec
from rl_launchers import Launcher, LauncherConfig, LocalScheduler, RunControl
from rl_contracts.conformance.scheduler import SLEEP, python, server
root = Path(sys.argv[1])
config = LauncherConfig(drain_seconds=0.1, health_interval=0.1)
with LocalScheduler(root / "logs") as scheduler, RunControl(names_of(root), beat=0.4) as control:
    launcher = Launcher(scheduler, config, control=control)
    sys.exit(launcher.run([server("rollout")], lambda _: [JobSpec("actor", python(SLEEP))]))
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A run that goes on until it is stopped."""
    with subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path)]) as process:
        wait_until(lambda: len(json.loads(_value(tmp_path, "workers") or "[]")) == 2, 60)
        wait_until(lambda: (json.loads(_value(tmp_path, "status"))["state"]) == "running", 60)
        yield tmp_path
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait(60)


def _value(directory: Path, key: str) -> str:
    path = directory / "names" / key / "=value"
    return path.read_text() if path.exists() else ""


def _record(directory: Path, step: int, rest: str = "") -> None:
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "version": step}) + "\n" + rest)


def test_status_of_a_run_that_goes_on_says_what_runs_where(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _record(run, 7)
    (run / "recover" / "step_6").mkdir(parents=True)
    (run / "recover" / "step_6" / "manifest.json").write_text('{"files": {}}')

    assert main.main(["status", str(run)]) == 0

    out = capsys.readouterr().out
    assert f"{run}: running (launcher: process " in out
    assert "step 7, version 7, 0:00:0" in out
    assert "rollout-0" in out
    assert "actor-0" in out


def test_status_as_json_holds_everything(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["status", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["state"] == "running"
    assert [worker["name"] for worker in found["workers"]] == ["rollout-0", "actor-0"]
    assert found["step"] == 0
    assert "RL_RUN_KEY" not in json.dumps(found)


@pytest.mark.nightly
def test_status_of_a_killed_launcher_says_that_it_is_lost(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.kill(json.loads(_value(run, "status"))["pid"], signal.SIGKILL)
    wait_until(lambda: status.status_of(run)["state"] == "lost")
    assert main.main(["status", str(run)]) == 0
    assert "gave no sign of life" in capsys.readouterr().out
    assert main.main(["stop", str(run)]) == 0
    assert "Nothing to stop" in capsys.readouterr().out
    assert main.main(["scale", str(run), "rollout=2"]) == 2
    assert "expected a run that goes on" in capsys.readouterr().err


def test_status_of_a_run_that_is_over_says_how_it_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError), RunControl(names_of(tmp_path)):
        raise ConfigError("planted\nand more")
    assert status.status_of(tmp_path)["state"] == "failed"
    assert status.status_of(tmp_path)["error"] == "planted"
    (tmp_path / FINISHED).touch()
    main.main(["status", str(tmp_path)])
    assert capsys.readouterr().out == f"{tmp_path}: finished\n"


def test_status_of_a_directory_without_a_run_is_refused_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("status", "logs", "stop"):
        assert main.main([command, str(tmp_path)]) == 2
        assert "expected the directory of a run" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


SLURM = """#!/bin/sh
echo "$(basename $0) $*" >> {directory}/asked
echo "JobId=7 JobName=run JobState=$(cat {directory}/state) Restarts=0 ExitCode=0:0"
"""
"""Slurm's commands, as far as a job is looked at and cancelled."""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that was handed in, and whose job waits."""
    for name in ("scontrol", "scancel"):
        (tmp_path / name).write_text(SLURM.format(directory=tmp_path))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "state").write_text("PENDING Reason=Resources")
    names_of(tmp_path).add(JOB, json.dumps("slurm"))
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "job.json").write_text('{"job": "7"}')
    return tmp_path


def test_status_of_a_job_that_waits_says_why(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["status", str(job)]) == 0
    assert capsys.readouterr().out == f"{job}: pending (job 7, Slurm's reason is Resources)\n"
    assert status.status_of(job)["state"] == "pending"
    (job / "state").write_text("CANCELLED Reason=None")
    assert status.status_of(job)["state"] == "unknown"
    (job / "scontrol").unlink()  # on a machine without Slurm
    assert status.status_of(job)["state"] == "unknown"


def test_status_of_a_job_that_waits_again_is_not_what_its_last_launcher_said(job: Path) -> None:
    with RunControl(names_of(job)):
        pass
    assert status.status_of(job)["state"] == "pending"


@pytest.mark.parametrize("state", ["PENDING Reason=Resources", "RUNNING Reason=None"])
def test_stop_of_a_job_whose_launcher_hears_nothing_cancels_it(
    job: Path, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (job / "state").write_text(state)
    assert main.main(["stop", str(job)]) == 0
    assert "cancelled; the job was " + state.partition(" ")[0].lower() in capsys.readouterr().out
    assert "scancel 7\n" in (job / "asked").read_text()


def test_stop_of_a_job_that_is_over_cancels_nothing(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (job / "state").write_text("FAILED Reason=NonZeroExitCode")
    assert main.main(["stop", str(job)]) == 0
    assert "Nothing to stop: unknown" in capsys.readouterr().out
    assert "scancel" not in (job / "asked").read_text()


def test_stop_ends_the_run_and_says_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["stop", str(run)]) == 0
    assert "stopped. No recovery checkpoint was saved" in capsys.readouterr().out
    assert status.status_of(run)["workers"] == []


def test_stop_that_takes_too_long_says_what_the_run_does(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pid = json.loads(_value(run, "status"))["pid"]
    os.kill(pid, signal.SIGSTOP)
    assert main.main(["stop", str(run), "--timeout=0.01"]) in (0, 2)  # silent already, or not yet
    said = capsys.readouterr()
    assert "did not stop within --timeout=0.01 s" in said.err or "gave no sign of life" in said.out


@pytest.mark.slow
def test_scale_waits_until_the_servers_are_ready(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["scale", str(run), "rollout=03"]) == 0
    assert "rollout: 3 servers, all ready" in capsys.readouterr().out
    there = {"rollout-0", "rollout-1", "rollout-2", "actor-0"}  # which the launcher writes down at its next look
    wait_until(lambda: {worker["name"] for worker in status.status_of(run)["workers"]} == there, 30)
    assert main.main(["scale", str(run), "rollout=1"]) == 0
    assert main.main(["scale", str(run), "actor=2"]) == 1
    assert "no server role 'actor'" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["rollout", "=3", "rollout=many", "rollout=-1"])
def test_scale_target_that_is_none_is_refused(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["scale", "anywhere", target]) == 2
    assert "ROLE=COUNT" in capsys.readouterr().err


def test_logs_shows_the_last_lines_of_those_that_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").touch()
    (tmp_path / "logs").mkdir()
    for name in ("actor-0", "rollout-0", "rollout-1"):
        (tmp_path / "logs" / f"{name}.log").write_text(f"first of {name}\nlast of {name}\n")

    assert main.main(["logs", str(tmp_path), "rollout", "-n", "1"]) == 0
    assert capsys.readouterr().out == "==> rollout-0 <==\nlast of rollout-0\n==> rollout-1 <==\nlast of rollout-1\n"
    assert main.main(["logs", str(tmp_path), "actor-0"]) == 0
    assert capsys.readouterr().out == "first of actor-0\nlast of actor-0\n"
    assert main.main(["logs", str(tmp_path), "actor-1"]) == 2
    assert "there are: actor-0, rollout-0, rollout-1" in capsys.readouterr().err


def test_logs_follow_shows_what_is_written_until_the_run_is_over(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "actor-0.log"
    log.write_text("before\n")
    out = io.StringIO()  # capsys may lose what a thread prints while it is read
    with RunControl(names_of(tmp_path), beat=0.4), redirect_stdout(out):
        follower = threading.Thread(target=main.main, args=(["logs", str(tmp_path), "-f"],))
        follower.start()
        wait_until(lambda: "before" in out.getvalue(), 30)
        with log.open("a") as file:
            file.write("after\nhalf")
        wait_until(lambda: "after" in out.getvalue(), 30)
    follower.join(30)
    assert not follower.is_alive()
    assert out.getvalue().startswith("==> actor-0 <==\nbefore\nafter\n")


@pytest.mark.parametrize("name", ["status", "logs", "stop", "scale", "replay"])
def test_help_names_each_tool_and_what_it_does(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["--help"])
    assert ended.value.code == 0
    assert f"    {name} " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main.main([name, "--help"])
    assert "run" in capsys.readouterr().out


def test_command_in_a_terminal_without_utf8_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stderr", screen)

    assert main.main(["wörd"]) == 2

    screen.seek(0)
    assert "w?rd" in screen.read()


def test_progress_of_a_run_whose_reader_is_gone_goes_on() -> None:
    program = """
import pathlib
from rl_monitor.progress import SFT_COLUMNS, RunProgress
with RunProgress(pathlib.Path("metrics.jsonl"), 1, SFT_COLUMNS) as progress:
    for stage in range(1000):
        progress.say(f"stage {stage}")
raise SystemExit(7)
"""
    process = subprocess.Popen([sys.executable, "-uc", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()

    assert (process.communicate()[1], process.returncode) == (b"", 7)


def test_last_record_of_a_killed_trainer_is_the_last_whole_one(tmp_path: Path) -> None:
    assert last_record(tmp_path) == {}
    _record(tmp_path, 4)
    _record(tmp_path, 5, rest='{"step": 6, "vers')
    assert last_record(tmp_path)["step"] == 5


def _raised(error: Exception, cause: Exception | None = None) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "users"),
    [
        (ConfigError("a setting"), True),
        (AgentError("their agent"), True),
        (_raised(EngineError("on rank 1"), RewardError("their reward")), True),
        (EngineError("a rank was lost"), False),
        (_raised(EngineError("no servers"), InferenceError("all lost")), False),
        (RuntimeError("somewhere"), False),
    ],
)
def test_users_fault_is_what_would_come_again(error: Exception, users: bool) -> None:
    assert is_user_error(error) is users


async def test_users_fault_of_a_server_that_dies_in_a_stream_is_false() -> None:
    async def dies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(dies, "127.0.0.1", 0)
    async with server, aiohttp.ClientSession() as http:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        with pytest.raises(aiohttp.ClientError) as caught:
            async with http.get(url) as response:
                await response.read()

    lost = _raised(InferenceError("two servers ended in a request"), caught.value)
    assert [is_user_error(each) for each in (caught.value, lost, _raised(RLError("too many failed"), lost))] == [
        False
    ] * 3


def test_users_fault_of_an_error_in_the_users_code_is_theirs() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile("def their_reward():\n    return 1 / 0\ntheir_reward()", "/home/anybody/theirs.py", "exec"))
    assert is_user_error(caught.value)


def test_version_prints_those_of_packages_torch_and_the_commit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["--version"])

    assert ended.value.code == 0
    versions = dict(line.split(" ", 1) for line in capsys.readouterr().out.splitlines())
    assert versions["rl-apps"] == rl_apps.__version__
    assert {"rl-contracts", "python", "torch", "transformers"} <= versions.keys()
