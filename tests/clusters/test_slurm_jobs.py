"""Runs as jobs of the real four-node Slurm: handed in, followed, left alone, requeued where that is right."""

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
command, run_dir, options = json.loads(sys.argv[1])
config = SlurmSchedulerConfig(poll_seconds=0.3, **options)
submission = JobSubmission(tuple(command), Path(run_dir), (), grace=1.0)
code = config.attach(submission.run_dir)
sys.exit(config.submit(submission) if code is None else code)
"""
"""What the driver does with a run that is to be a job."""

LAUNCHER = """
import os, pathlib, signal, sys, time
lives, ends, asked = pathlib.Path(sys.argv[1]), sys.argv[2], []
def ask(*_):
    asked.append(1)
    if len(asked) > 1:
        print("asked twice", flush=True)
signal.signal(signal.SIGTERM, ask)
with lives.open("a") as file:
    file.write(os.environ.get("SLURM_RESTART_COUNT", "0") + " " + os.environ["SLURMD_NODENAME"] + "\\n")
print("launched", flush=True)
if ends == "second" and len(lives.read_text().splitlines()) > 1:
    sys.exit(0)
while not asked:
    time.sleep(0.05)
print("saved", flush=True)
time.sleep(float(sys.argv[3]) if len(sys.argv) > 3 else 0)
sys.exit(143)
"""
"""A launcher that ends when it is asked, or in its second life by itself."""


@pytest.fixture(scope="module")
def cluster():
    with slurm(lost_after=4, requeue_after=8, kill_wait=5, grace=0) as found:
        yield found


def _follow(command, run_dir, **options):
    words = json.dumps([list(command), str(run_dir), options])
    return subprocess.Popen(
        [sys.executable, "-c", FOLLOW, words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _until(condition, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still waiting after {seconds:g} s"
        time.sleep(0.1)


def _lives(file):
    return file.read_text().splitlines() if file.exists() else []


def _saved(run_dir):
    log = run_dir / "logs" / "launcher.log"
    return log.exists() and "saved" in log.read_text()


def _job(run_dir):
    return json.loads((run_dir / "slurm" / "job.json").read_text())["job"]


def _launcher(lives, ends="asked", *more):
    return (sys.executable, "-c", LAUNCHER, str(lives), ends, *more)


@pytest.mark.parametrize("code", [0, 1, 2, 143])
def test_submit_prints_the_output_and_returns_the_exit_code(cluster, tmp_path, code):
    following = _follow((sys.executable, "-c", f"print('says this'); raise SystemExit({code})"), tmp_path / "my run")

    said, _ = following.communicate(timeout=240)

    assert following.returncode == code
    assert "says this" in said
    assert f"exit code {code}" in said
    assert cluster.run("squeue", "-h", "-t", "PENDING") == ""  # none of these is requeued


def test_submit_job_purged_by_slurm_returns_its_exit_code(tmp_path):
    with slurm(nodes=1, forget_after=2):
        wait = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.05)\nsys.exit(7)"
        following = _follow((sys.executable, "-c", wait, str(tmp_path / "go")), tmp_path)
        _until(lambda: (tmp_path / "slurm" / "job.json").exists())
        following.send_signal(signal.SIGSTOP)  # it looks again when Slurm has forgotten
        (tmp_path / "go").touch()
        _until(lambda: _forgotten(tmp_path))
        following.send_signal(signal.SIGCONT)

        said, _ = following.communicate(timeout=240)

    assert (following.returncode, "exit code 7" in said) == (7, True)


def _forgotten(run_dir):
    done = subprocess.run(["scontrol", "show", "job", _job(run_dir)], capture_output=True, text=True)
    return "Invalid job id" in done.stderr


def test_submit_ctrl_c_detaches_and_the_same_command_reattaches(cluster, tmp_path):
    lives = tmp_path / "lives"
    following = _follow(_launcher(lives), tmp_path)
    _until(lambda: _lives(lives))

    following.send_signal(signal.SIGINT)
    said, _ = following.communicate(timeout=240)
    again = _follow(_launcher(lives), tmp_path)
    for line in again.stdout:
        if "RUNNING" in line:
            break
    cluster.run("scancel", "--signal=TERM", "--full", _job(tmp_path))  # as `rl stop` asks the launcher to end
    rest, _ = again.communicate(timeout=240)

    assert following.returncode == 130
    assert f"rl stop {tmp_path}" in said
    assert (again.returncode, "saved" in rest) == (143, True)
    assert len(_lives(lives)) == 1


def test_status_and_stop_of_a_pending_job(cluster, tmp_path):
    names_of(tmp_path / "run").add(JOB, json.dumps("slurm"))  # as the command leaves it that hands a run in
    other = cluster.run("sbatch", "--parsable", "-N4", "--exclusive", "-o/dev/null", "--wrap", "sleep 600")
    following = _follow(_launcher(tmp_path / "lives"), tmp_path / "run")
    _until(lambda: (tmp_path / "run" / "slurm" / "job.json").exists())
    job = _job(tmp_path / "run")

    _until(lambda: "Slurm's reason is" in status_of(tmp_path / "run").get("job", ""))
    found = status_of(tmp_path / "run")
    assert found["state"] == "pending"
    assert f"pending (job {job}, Slurm's reason is " in found["job"]
    assert stop(tmp_path / "run", now=False, timeout=60) == 0
    said, _ = following.communicate(timeout=240)

    assert following.returncode != 0
    assert "CANCELLED" in said
    assert cluster.run("squeue", "-h", "-o", "%A") == other
    cluster.run("scancel", other)
    _until(lambda: cluster.run("squeue", "-h") == "")
    assert not _lives(tmp_path / "lives")


def test_submit_job_signaled_before_its_time_limit_is_requeued(cluster, tmp_path):
    lives = tmp_path / "lives"
    following = _follow(_launcher(lives, "second"), tmp_path)
    _until(lambda: _lives(lives))

    cluster.run("scancel", "--batch", "--signal=USR1", _job(tmp_path))  # what --signal=B:USR1@... sends
    said, _ = following.communicate(timeout=240)

    assert following.returncode == 0
    assert [life.split()[0] for life in _lives(lives)] == ["0", "1"]
    assert "saved" in said
    assert "asked twice" not in said


def test_submit_slurm_signals_the_job_before_its_time_limit(cluster, tmp_path):
    lives = tmp_path / "lives"  # one minute, of which the warning may take all
    following = _follow(_launcher(lives, "second"), tmp_path, time_limit="1")

    following.communicate(timeout=240)

    assert following.returncode == 0
    assert len(_lives(lives)) == 2


def test_submit_without_requeues_returns_the_launchers_exit_code(cluster, tmp_path):
    for name, options in (("off", {"requeue": False}), ("used up", {"max_requeues": 0})):
        lives = tmp_path / f"{name}-lives"
        following = _follow(_launcher(lives), tmp_path / name, **options)
        _until(lambda lives=lives: _lives(lives))

        cluster.run("scancel", "--batch", "--signal=USR1", _job(tmp_path / name))
        following.communicate(timeout=240)

        assert (following.returncode, len(_lives(lives))) == (143, 1)


def test_submit_job_canceled_by_scancel_gets_one_sigterm_and_no_requeue(cluster, tmp_path):
    lives = tmp_path / "lives"
    following = _follow(_launcher(lives, "asked", "0.5"), tmp_path)
    _until(lambda: _lives(lives))

    cluster.run("scancel", _job(tmp_path))
    said, _ = following.communicate(timeout=240)

    assert following.returncode != 0
    assert "CANCELLED" in said
    assert "asked twice" not in said
    _until(lambda: cluster.run("squeue", "-h") == "")
    assert len(_lives(lives)) == 1


def test_submit_preempted_job_saves_and_is_requeued(cluster, tmp_path):
    lives = tmp_path / "lives"
    following = _follow(_launcher(lives, "second"), tmp_path, partition="front")
    _until(lambda: _lives(lives))

    cluster.run("sbatch", "-purgent", "-N4", "--exclusive", "-o/dev/null", "--wrap", "sleep 2")
    said, _ = following.communicate(timeout=240)

    assert (following.returncode, len(_lives(lives))) == (0, 2)
    assert "saved" in said
    assert "asked twice" not in said


def test_submit_job_with_a_lost_node_is_requeued_by_slurm(cluster, tmp_path):
    lives = tmp_path / "lives"
    following = _follow(_launcher(lives, "second"), tmp_path, nodes=2)
    _until(lambda: _lives(lives))
    first = _lives(lives)[0].split()[1]

    cluster.kill_node(first)
    following.communicate(timeout=240)
    cluster.revive(first)

    assert following.returncode == 0
    assert _lives(lives)[1].split()[1] != first


RUN = """
import os, pathlib, sys, time
from rl_contracts.scheduler import JobSpec
from rl_launchers import SlurmScheduler, SlurmSchedulerConfig
lives, logs = map(pathlib.Path, sys.argv[1:])
with SlurmScheduler(logs, SlurmSchedulerConfig(nodes=1, spare_nodes=2)) as scheduler:
    scheduler.create_workers(JobSpec("role", (sys.executable, "-c", "import time; time.sleep(600)"), cpus=2))
    scheduler.resize_workers("role", 1)
    scheduler._find_new()
    with lives.open("a") as file:
        file.write(os.environ.get("SLURM_RESTART_COUNT", "0") + " " + os.environ["SLURMD_NODENAME"] + "\\n")
    while len(lives.read_text().splitlines()) < 2:
        time.sleep(0.1)
"""
"""A launcher with agents on its spare nodes, too."""


def test_submit_job_with_spares_and_lost_launcher_node_is_requeued(cluster, tmp_path):
    lives = tmp_path / "lives"
    following = _follow(
        (sys.executable, "-c", RUN, str(lives), str(tmp_path / "own")), tmp_path, nodes=1, spare_nodes=2
    )
    _until(lambda: _lives(lives))
    first = _lives(lives)[0].split()[1]

    cluster.kill_node(first)
    following.communicate(timeout=240)
    cluster.revive(first)

    assert following.returncode == 0
    assert [life.split()[0] for life in _lives(lives)] == ["0", "1"]


LOST = """
import os, pathlib, sys, time
from rl_contracts.scheduler import JobSpec, WorkerStatus
from rl_launchers import SlurmScheduler, SlurmSchedulerConfig
lives, logs = map(pathlib.Path, sys.argv[1:])
with SlurmScheduler(logs, SlurmSchedulerConfig(nodes=2)) as scheduler:
    spec = JobSpec("role", (sys.executable, "-c", "import time; time.sleep(600)"), count=2, cpus=2)
    one, two = scheduler.create_workers(spec)
    with lives.open("a") as file:
        file.write(os.environ.get("SLURM_RESTART_COUNT", "0") + " " + two.node + "\\n")
    if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        while scheduler.poll()[1].status is not WorkerStatus.FAILED:
            time.sleep(0.1)
        scheduler.delete_workers(grace=0.0)
        scheduler.create_workers(spec)
"""
"""A launcher that starts its workers anew when a node is lost."""


def test_submit_launcher_requeues_the_job_if_slurm_misses_a_lost_node(tmp_path):
    lives = tmp_path / "lives"
    with slurm(lost_after=200, requeue_after=5) as cluster:  # it would take eight minutes to see it
        following = _follow((sys.executable, "-c", LOST, str(lives), str(tmp_path / "own")), tmp_path, nodes=2)
        _until(lambda: _lives(lives))
        lost = _lives(lives)[0].split()[1]

        cluster.kill_node(lost)  # and it does not come back
        said, _ = following.communicate(timeout=240)

    assert following.returncode == 0, said
    assert f"nodes {lost} were lost" in said
    assert [life.split()[0] for life in _lives(lives)] == ["0", "1"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"partition": "nowhere"}, ("launcher.options.partition", "nowhere", "front")),
        ({"nodes": 9}, ("launcher.options.nodes", "at most 4", "found 9")),
        ({"server_nodes": 3, "server_partition": "back"}, ("launcher.options.server_nodes", "at most 2")),
        ({"constraint": "huge"}, ("at most 0",)),
    ],
)
def test_resources_slurm_cannot_provide_raise_config_error(cluster, options, words):
    with pytest.raises(ConfigError) as error:
        SlurmSchedulerConfig(**options).resources()
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"time_limit": "soon"}, ("--time", "launcher.options.time_limit")),
        ({"reservation": "mine"}, ("reservation is invalid", "launcher.options.reservation")),
        ({"constraint": "huge|none"}, ("feature", "launcher.options.constraint")),
        ({"gpus_per_node": 8}, ("not available", "gpus_per_node")),
        ({"sbatch_args": ["--no-such-option"]}, ("no-such-option", "job.sh")),
    ],
)
def test_submit_sbatch_failure_raises_one_line_config_error(cluster, tmp_path, options, words):
    submission = JobSubmission((sys.executable, "-c", "pass"), tmp_path, ())
    with pytest.raises(ConfigError) as error:
        SlurmSchedulerConfig(**options).submit(submission)
    assert all(word in str(error.value).lower() for word in words)
    assert "\n" not in str(error.value)
