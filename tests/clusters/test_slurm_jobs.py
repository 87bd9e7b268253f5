"""Runs as jobs of the real four-node Slurm: submit, follow, detach, cancel and requeue."""

import json
import signal
import subprocess
import sys
import time

import pytest
from slurm_cluster import slurm

from rl_apps.cli.run_tools import stop
from rl_contracts.errors import ConfigError
from rl_contracts.scheduler import JobSubmission
from rl_launchers import SlurmSchedulerConfig
from rl_monitor.run_directory import JOB, names_of
from rl_monitor.status import status_of

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

FOLLOW = """
import json, sys
from pathlib import Path
from rl_contracts.errors import RLError
from rl_contracts.scheduler import JobSubmission
from rl_launchers import SlurmSchedulerConfig
from rl_launchers.slurm import batch_job, scheduler
command, run_dir, options = json.loads(sys.argv[1])
batch_job.POLL_SECONDS = 0.3
scheduler.MAX_REQUEUES = options.pop("max_requeues", scheduler.MAX_REQUEUES)
nodes = options.pop("nodes", 0)
config = SlurmSchedulerConfig(**options)
config.use_cluster(nodes)
submission = JobSubmission(tuple(command), Path(run_dir), (), grace=1.0)
code = config.attach(submission.run_dir)
sys.exit(config.submit(submission) if code is None else code)
"""
"""Program that attaches to the job of a run or submits it, as the driver does. `max_requeues` sets `MAX_REQUEUES`."""

LAUNCHER = """
import os, pathlib, signal, sys, time
starts, ends, signals = pathlib.Path(sys.argv[1]), sys.argv[2], []
def on_sigterm(*_):
    signals.append(1)
    if len(signals) > 1:
        print("second SIGTERM", flush=True)
signal.signal(signal.SIGTERM, on_sigterm)
with starts.open("a") as file:
    file.write(os.environ.get("SLURM_RESTART_COUNT", "0") + " " + os.environ["SLURMD_NODENAME"] + "\\n")
print("launched", flush=True)
if ends == "on_second_start" and len(starts.read_text().splitlines()) > 1:
    sys.exit(0)
while not signals:
    time.sleep(0.05)
print("saved", flush=True)
time.sleep(float(sys.argv[3]) if len(sys.argv) > 3 else 0)
sys.exit(143)
"""
"""Program of a launcher that ends on SIGTERM, or with `on_second_start` immediately when it starts again.

It appends a line to a file at each start: the restart count and the node.
"""


@pytest.fixture(scope="module")
def cluster():
    with slurm(lost_after=4, requeue_after=8, kill_wait=5, grace=0) as running:
        yield running


def _follow(command, run_dir, **options):
    arguments = json.dumps([list(command), str(run_dir), options])
    return subprocess.Popen(
        [sys.executable, "-c", FOLLOW, arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _wait_until(condition, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still waiting after {seconds:g} s"
        time.sleep(0.1)


def _starts(file):
    return file.read_text().splitlines() if file.exists() else []


def _job(run_dir):
    return json.loads((run_dir / "slurm" / "job.json").read_text())["job"]


def _launcher(starts, ends="on_sigterm", *delay):
    return (sys.executable, "-c", LAUNCHER, str(starts), ends, *delay)


@pytest.mark.parametrize("code", [1, 143])
def test_submit_prints_the_output_and_returns_the_exit_code(cluster, tmp_path, code):
    command = (sys.executable, "-c", f"print('some output'); raise SystemExit({code})")
    follower = _follow(command, tmp_path / "path with spaces")

    output, _ = follower.communicate(timeout=240)

    assert follower.returncode == code
    assert "some output" in output
    assert f"exit code {code}" in output
    assert cluster.run("squeue", "-h", "-t", "PENDING") == ""  # the job was not requeued


def test_submit_job_purged_by_slurm_returns_its_exit_code(tmp_path):
    with slurm(nodes=1, forget_after=2):
        wait = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.05)\nsys.exit(7)"
        follower = _follow((sys.executable, "-c", wait, str(tmp_path / "go")), tmp_path)
        _wait_until(lambda: (tmp_path / "slurm" / "job.json").exists())
        follower.send_signal(signal.SIGSTOP)  # its next poll comes after Slurm has purged the job
        (tmp_path / "go").touch()
        _wait_until(lambda: _is_purged(tmp_path))
        follower.send_signal(signal.SIGCONT)

        output, _ = follower.communicate(timeout=240)

    assert (follower.returncode, "exit code 7" in output) == (7, True)


def _is_purged(run_dir):
    done = subprocess.run(["scontrol", "show", "job", _job(run_dir)], capture_output=True, text=True)
    return "Invalid job id" in done.stderr


def test_status_and_stop_of_a_pending_job(cluster, tmp_path):
    names_of(tmp_path / "run").add(JOB, json.dumps("slurm"))  # the command that submits a run writes it
    other = cluster.run("sbatch", "--parsable", "-N4", "--exclusive", "-o/dev/null", "--wrap", "sleep 600")
    follower = _follow(_launcher(tmp_path / "starts"), tmp_path / "run")
    _wait_until(lambda: (tmp_path / "run" / "slurm" / "job.json").exists())
    job = _job(tmp_path / "run")

    _wait_until(lambda: "Slurm's reason is" in status_of(tmp_path / "run").get("job", ""))
    status = status_of(tmp_path / "run")
    assert status["state"] == "pending"
    assert f"pending (job {job}, Slurm's reason is " in status["job"]
    assert stop(tmp_path / "run", now=False, timeout=60) == 0
    output, _ = follower.communicate(timeout=240)

    assert follower.returncode != 0
    assert "CANCELLED" in output
    assert cluster.run("squeue", "-h", "-o", "%A") == other
    cluster.run("scancel", other)
    _wait_until(lambda: cluster.run("squeue", "-h") == "")
    assert not _starts(tmp_path / "starts")


def test_submit_job_signaled_before_its_time_limit_is_requeued(cluster, tmp_path):
    starts = tmp_path / "starts"
    follower = _follow(_launcher(starts, "on_second_start"), tmp_path)
    _wait_until(lambda: _starts(starts))

    cluster.run("scancel", "--batch", "--signal=USR1", _job(tmp_path))  # sbatch --signal=B:USR1@... sends it
    output, _ = follower.communicate(timeout=240)

    assert follower.returncode == 0
    assert [line.split()[0] for line in _starts(starts)] == ["0", "1"]
    assert "saved" in output
    assert "second SIGTERM" not in output


def test_submit_slurm_signals_the_job_before_its_time_limit(cluster, tmp_path):
    starts = tmp_path / "starts"
    # The limit is one minute, so Slurm may send the signal at any time.
    follower = _follow(_launcher(starts, "on_second_start"), tmp_path, time_limit="1")

    follower.communicate(timeout=240)

    assert follower.returncode == 0
    assert len(_starts(starts)) == 2


def test_submit_without_requeues_returns_the_launchers_exit_code(cluster, tmp_path):
    for name, options in (("off", {"requeue": False}), ("exhausted", {"max_requeues": 0})):
        starts = tmp_path / f"{name}-starts"
        follower = _follow(_launcher(starts), tmp_path / name, **options)
        _wait_until(lambda starts=starts: _starts(starts))

        cluster.run("scancel", "--batch", "--signal=USR1", _job(tmp_path / name))
        follower.communicate(timeout=240)

        assert (follower.returncode, len(_starts(starts))) == (143, 1)


def test_submit_job_canceled_by_scancel_gets_one_sigterm_and_no_requeue(cluster, tmp_path):
    starts = tmp_path / "starts"
    follower = _follow(_launcher(starts, "on_sigterm", "0.5"), tmp_path)
    _wait_until(lambda: _starts(starts))

    cluster.run("scancel", _job(tmp_path))
    output, _ = follower.communicate(timeout=240)

    assert follower.returncode != 0
    assert "CANCELLED" in output
    assert "second SIGTERM" not in output
    _wait_until(lambda: cluster.run("squeue", "-h") == "")
    assert len(_starts(starts)) == 1


def test_submit_preempted_job_saves_and_is_requeued(cluster, tmp_path):
    starts = tmp_path / "starts"
    follower = _follow(_launcher(starts, "on_second_start"), tmp_path, partition="front")
    _wait_until(lambda: _starts(starts))

    cluster.run("sbatch", "-purgent", "-N4", "--exclusive", "-o/dev/null", "--wrap", "sleep 2")
    output, _ = follower.communicate(timeout=240)

    assert (follower.returncode, len(_starts(starts))) == (0, 2)
    assert "saved" in output
    assert "second SIGTERM" not in output


def test_submit_job_with_a_lost_node_is_requeued_by_slurm(cluster, tmp_path):
    starts = tmp_path / "starts"
    follower = _follow(_launcher(starts, "on_second_start"), tmp_path, nodes=2)
    _wait_until(lambda: _starts(starts))
    first = _starts(starts)[0].split()[1]

    cluster.kill_node(first)
    follower.communicate(timeout=240)
    cluster.revive(first)

    assert follower.returncode == 0
    assert _starts(starts)[1].split()[1] != first


RUN = """
import os, pathlib, sys, time
from rl_contracts.scheduler import JobSpec
from rl_launchers import SlurmScheduler, SlurmSchedulerConfig
starts, logs = map(pathlib.Path, sys.argv[1:])
with SlurmScheduler(logs, SlurmSchedulerConfig(spare_nodes=2)) as scheduler:
    scheduler.create_workers(JobSpec("role", (sys.executable, "-c", "import time; time.sleep(600)"), cpus=2))
    scheduler.resize_workers("role", 1)
    scheduler._add_new_machines()
    with starts.open("a") as file:
        file.write(os.environ.get("SLURM_RESTART_COUNT", "0") + " " + os.environ["SLURMD_NODENAME"] + "\\n")
    while len(starts.read_text().splitlines()) < 2:
        time.sleep(0.1)
"""
"""Program of a launcher that also has node agents on its spare nodes."""


def test_submit_job_with_spares_and_lost_launcher_node_is_requeued(cluster, tmp_path):
    starts = tmp_path / "starts"
    follower = _follow(
        (sys.executable, "-c", RUN, str(starts), str(tmp_path / "own")), tmp_path, nodes=1, spare_nodes=2
    )
    _wait_until(lambda: _starts(starts))
    first = _starts(starts)[0].split()[1]

    cluster.kill_node(first)
    follower.communicate(timeout=240)
    cluster.revive(first)

    assert follower.returncode == 0
    assert [line.split()[0] for line in _starts(starts)] == ["0", "1"]


LOST = """
import os, pathlib, sys, time
from rl_contracts.scheduler import JobSpec, WorkerStatus
from rl_launchers import SlurmScheduler, SlurmSchedulerConfig
starts, logs = map(pathlib.Path, sys.argv[1:])
with SlurmScheduler(logs, SlurmSchedulerConfig()) as scheduler:
    spec = JobSpec("role", (sys.executable, "-c", "import time; time.sleep(600)"), count=2, cpus=2)
    one, two = scheduler.create_workers(spec)
    with starts.open("a") as file:
        file.write(os.environ.get("SLURM_RESTART_COUNT", "0") + " " + two.node + "\\n")
    if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        while scheduler.poll()[1].status is not WorkerStatus.FAILED:
            time.sleep(0.1)
        scheduler.delete_workers(grace=0.0)
        scheduler.create_workers(spec)
"""
"""Program of a launcher that restarts its workers after it lost a node."""


def test_submit_launcher_requeues_the_job_if_slurm_misses_a_lost_node(tmp_path):
    starts = tmp_path / "starts"
    with slurm(lost_after=200, requeue_after=5) as cluster:  # Slurm would need eight minutes to notice
        follower = _follow((sys.executable, "-c", LOST, str(starts), str(tmp_path / "own")), tmp_path, nodes=2)
        _wait_until(lambda: _starts(starts))
        lost = _starts(starts)[0].split()[1]

        cluster.kill_node(lost)  # and never revive it
        output, _ = follower.communicate(timeout=240)

    assert follower.returncode == 0, output
    assert f"nodes {lost} were lost" in output
    assert [line.split()[0] for line in _starts(starts)] == ["0", "1"]


@pytest.mark.parametrize(
    ("options", "nodes", "message_parts"),
    [
        ({"partition": "nowhere"}, 0, ("launcher.options.partition", "nowhere", "front")),
        ({}, 9, ("cluster.nodes", "at most 4", "found 9")),
        ({"server_nodes": 3, "server_partition": "back"}, 0, ("launcher.options.server_nodes", "at most 2")),
        ({"constraint": "huge"}, 0, ("at most 0",)),
    ],
)
def test_resources_slurm_cannot_provide_raise_config_error(cluster, options, nodes, message_parts):
    config = SlurmSchedulerConfig(**options)
    config.use_cluster(nodes)
    with pytest.raises(ConfigError) as error:
        config.resources()
    assert all(part in str(error.value) for part in message_parts)


@pytest.mark.parametrize(
    ("options", "message_parts"),
    [
        ({"time_limit": "soon"}, ("--time", "launcher.options.time_limit")),
        (
            {"sbatch_args": ["--reservation=mine"]},
            ("reservation is invalid", "sbatch_args=[--reservation="),
        ),
        ({"constraint": "huge|none"}, ("feature", "launcher.options.constraint")),
        ({"sbatch_args": ["--gpus-per-node=8"]}, ("not available", "cluster.devices")),
        ({"sbatch_args": ["--no-such-option"]}, ("no-such-option", "job.sh")),
    ],
)
def test_submit_sbatch_failure_raises_one_line_config_error(cluster, tmp_path, options, message_parts):
    submission = JobSubmission((sys.executable, "-c", "pass"), tmp_path, ())
    with pytest.raises(ConfigError) as error:
        SlurmSchedulerConfig(**options).submit(submission)
    assert all(part in str(error.value).lower() for part in message_parts)
    assert "\n" not in str(error.value)
