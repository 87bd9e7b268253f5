"""`rl status`, `rl logs`, `rl stop` and `rl scale`, which need only the run directory."""

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
from rl_launchers import Launcher, LocalScheduler, RunControl
from rl_launchers.supervise import server_scaling
from rl_contracts.conformance.scheduler import SLEEP, python, server
root = Path(sys.argv[1])
server_scaling.DRAIN_SECONDS = 0.1
with LocalScheduler(root / "logs") as scheduler, RunControl(names_of(root), beat=0.4) as control:
    launcher = Launcher(scheduler, control=control)
    sys.exit(launcher.run([server("rollout")], lambda _: [JobSpec("actor", python(SLEEP))]))
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """Yield the directory of a run that continues until it is stopped."""
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


def test_status_of_running_run_lists_workers_but_no_key(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _record(run, 7)
    (run / "recover" / "step_6").mkdir(parents=True)
    (run / "recover" / "step_6" / "manifest.json").write_text('{"files": {}}')

    assert main.main(["status", str(run)]) == 0

    out = capsys.readouterr().out
    assert f"{run}: running (launcher: process " in out
    assert "step 7, version 7, 0:00:0" in out
    assert "rollout-0" in out
    assert "actor-0" in out
    assert main.main(["status", str(run), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert (info["state"], info["step"]) == ("running", 7)
    assert [worker["name"] for worker in info["workers"]] == ["rollout-0", "actor-0"]
    assert "RL_RUN_KEY" not in json.dumps(info)


@pytest.mark.nightly
def test_status_of_killed_launcher_is_lost(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.kill(json.loads(_value(run, "status"))["pid"], signal.SIGKILL)
    wait_until(lambda: status.status_of(run)["state"] == "lost")
    assert main.main(["status", str(run)]) == 0
    assert "sent no heartbeat" in capsys.readouterr().out
    assert main.main(["stop", str(run)]) == 0
    assert "Nothing to stop" in capsys.readouterr().out
    assert main.main(["scale", str(run), "rollout=2"]) == 2
    assert "expected an active run" in capsys.readouterr().err


def test_status_of_ended_run_reports_its_outcome(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError), RunControl(names_of(tmp_path)):
        raise ConfigError("first line\nsecond line")
    assert status.status_of(tmp_path)["state"] == "failed"
    assert status.status_of(tmp_path)["error"] == "first line"
    (tmp_path / FINISHED).touch()
    main.main(["status", str(tmp_path)])
    assert capsys.readouterr().out == f"{tmp_path}: finished\n"


def test_tools_reject_directory_without_run_and_write_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("status", "logs", "stop"):
        assert main.main([command, str(tmp_path)]) == 2
        assert "expected the directory of a run" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


SLURM = """#!/bin/sh
echo "$(basename $0) $*" >> {directory}/calls
echo "JobId=7 JobName=run JobState=$(cat {directory}/state) Restarts=0 ExitCode=0:0"
"""
"""Fake Slurm commands that report the state of a job and record calls."""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of a run that was submitted and whose job is pending."""
    for name in ("scontrol", "scancel"):
        (tmp_path / name).write_text(SLURM.format(directory=tmp_path))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "state").write_text("PENDING Reason=Resources")
    names_of(tmp_path).add(JOB, json.dumps("slurm"))
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "job.json").write_text('{"job": "7"}')
    return tmp_path


def test_status_of_pending_job_reports_reason(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["status", str(job)]) == 0
    assert capsys.readouterr().out == f"{job}: pending (job 7, Slurm's reason is Resources)\n"
    assert status.status_of(job)["state"] == "pending"
    (job / "state").write_text("CANCELLED Reason=None")
    assert status.status_of(job)["state"] == "unknown"
    (job / "scontrol").unlink()  # on a machine without Slurm
    assert status.status_of(job)["state"] == "unknown"


def test_status_of_requeued_job_ignores_last_launcher(job: Path) -> None:
    with RunControl(names_of(job)):
        pass
    assert status.status_of(job)["state"] == "pending"


@pytest.mark.parametrize("state", ["PENDING Reason=Resources", "RUNNING Reason=None"])
def test_stop_of_job_without_live_launcher_cancels_it(
    job: Path, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (job / "state").write_text(state)
    assert main.main(["stop", str(job)]) == 0
    assert "canceled; the job was " + state.partition(" ")[0].lower() in capsys.readouterr().out
    assert "scancel 7\n" in (job / "calls").read_text()


def test_stop_of_ended_job_cancels_nothing(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (job / "state").write_text("FAILED Reason=NonZeroExitCode")
    assert main.main(["stop", str(job)]) == 0
    assert "Nothing to stop: unknown" in capsys.readouterr().out
    assert "scancel" not in (job / "calls").read_text()


def test_stop_ends_run_and_reports_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["stop", str(run)]) == 0
    assert "stopped. No recovery checkpoint was saved" in capsys.readouterr().out
    assert status.status_of(run)["workers"] == []


def test_stop_after_timeout_reports_state_of_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pid = json.loads(_value(run, "status"))["pid"]
    os.kill(pid, signal.SIGSTOP)
    # 0 if the heartbeat already timed out, else 2
    assert main.main(["stop", str(run), "--timeout=0.01"]) in (0, 2)
    output = capsys.readouterr()
    assert "did not stop within --timeout=0.01 s" in output.err or "sent no heartbeat" in output.out


@pytest.mark.slow
def test_scale_waits_until_servers_are_ready(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["scale", str(run), "rollout=03"]) == 0
    assert "rollout: 3 servers, all ready" in capsys.readouterr().out
    expected = {"rollout-0", "rollout-1", "rollout-2", "actor-0"}  # written by the launcher at its next poll
    wait_until(lambda: {worker["name"] for worker in status.status_of(run)["workers"]} == expected, 30)
    assert main.main(["scale", str(run), "rollout=1"]) == 0
    assert main.main(["scale", str(run), "actor=2"]) == 1
    assert "no server role 'actor'" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["=3", "rollout=-1"])
def test_scale_rejects_invalid_target(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["scale", "anywhere", target]) == 2
    assert "ROLE=COUNT" in capsys.readouterr().err


def test_logs_prints_last_lines_of_selected_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").touch()
    (tmp_path / "logs").mkdir()
    for name in ("actor-0", "rollout-0", "rollout-1"):
        (tmp_path / "logs" / f"{name}.log").write_text(f"first of {name}\nlast of {name}\n")

    assert main.main(["logs", str(tmp_path), "rollout", "-n", "1"]) == 0
    assert capsys.readouterr().out == "==> rollout-0 <==\nlast of rollout-0\n==> rollout-1 <==\nlast of rollout-1\n"
    assert main.main(["logs", str(tmp_path), "actor-0"]) == 0
    assert capsys.readouterr().out == "first of actor-0\nlast of actor-0\n"
    assert main.main(["logs", str(tmp_path), "actor-1"]) == 2
    assert "available: actor-0, rollout-0, rollout-1" in capsys.readouterr().err


def test_logs_follow_prints_new_lines_until_run_ends(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "actor-0.log"
    log.write_text("before\n")
    out = io.StringIO()  # capsys may lose output of a thread during a read
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


def test_error_message_in_terminal_without_utf8_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stderr", screen)

    assert main.main(["wörd"]) == 2

    screen.seek(0)
    assert "w?rd" in screen.read()


def test_progress_with_closed_pipe_continues_run() -> None:
    program = """
import pathlib
from rl_monitor.progress import SFT_COLUMNS, RunProgress
with RunProgress(pathlib.Path("metrics.jsonl"), 1, SFT_COLUMNS) as progress:
    for stage in range(1000):
        progress.print_message(f"stage {stage}")
raise SystemExit(7)
"""
    process = subprocess.Popen([sys.executable, "-uc", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()

    assert (process.communicate()[1], process.returncode) == (b"", 7)


def test_last_record_ignores_incomplete_line(tmp_path: Path) -> None:
    assert last_record(tmp_path) == {}
    _record(tmp_path, 4)
    _record(tmp_path, 5, rest='{"step": 6, "vers')
    assert last_record(tmp_path)["step"] == 5


def _raised(error: Exception, cause: Exception | None = None) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConfigError("a setting"), True),
        (AgentError("a custom agent"), True),
        (_raised(EngineError("on rank 1"), RewardError("a custom reward")), True),
        (EngineError("a rank was lost"), False),
        (_raised(EngineError("no servers"), InferenceError("all lost")), False),
        (RuntimeError("somewhere"), False),
    ],
)
def test_is_user_error_of_reproducible_errors_is_true(error: Exception, expected: bool) -> None:
    assert is_user_error(error) is expected


async def test_is_user_error_of_server_lost_in_stream_is_false() -> None:
    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(break_off, "127.0.0.1", 0)
    async with server, aiohttp.ClientSession() as http:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        with pytest.raises(aiohttp.ClientError) as caught:
            async with http.get(url) as response:
                await response.read()

    lost = _raised(InferenceError("two servers ended in a request"), caught.value)
    assert [is_user_error(each) for each in (caught.value, lost, _raised(RLError("too many failed"), lost))] == [
        False
    ] * 3


def test_is_user_error_of_exception_in_user_code_is_true() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile("def custom_reward():\n    return 1 / 0\ncustom_reward()", "/home/user/custom.py", "exec"))
    assert is_user_error(caught.value)


def test_version_prints_packages_torch_and_commit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main.main(["--version"])

    assert exit_info.value.code == 0
    versions = dict(line.split(" ", 1) for line in capsys.readouterr().out.splitlines())
    assert versions["rl-apps"] == rl_apps.__version__
    assert {"rl-contracts", "python", "torch", "transformers"} <= versions.keys()
