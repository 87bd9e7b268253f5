"""Slurm scheduler without Slurm: batch script, parsers of command output, and errors."""

import functools
import os
import stat
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rl_contracts.errors import ConfigError, LaunchError
from rl_contracts.scheduler import RUN_KEY_VARIABLE, JobSpec, JobSubmission, Node
from rl_launchers import SlurmSchedulerConfig
from rl_launchers.cluster.placement import Ledger
from rl_launchers.slurm import batch_job, commands
from rl_launchers.slurm.scheduler import SlurmNodes

SINFO = """\
cpu*|c1|64|(null)|idle|avx,big
cpu*|c2|64|(null)|down*|avx
gpu|g1|128|gpu:a100:8(S:0-1),nvme:1|mixed|a100
gpu|g2|128|gpu:8|allocated|a100
gpu|g3|96|gpu:1,gpu:h100:3|idle~|h100
gpu|g4|128|gpu:a100:8(S:0-1)|drained|a100
"""
"""Recorded output: a default partition with a node that is down, and a partition with two kinds of GPUs, where one node
is powered down and one is drained."""

HET_JOB = (
    "JobId=7 HetJobId=7 HetJobOffset=0 JobName=a run UserId=me(1) JobState=RUNNING Reason=None Requeue=1 Restarts=2 "
    "BatchFlag=1 ExitCode=0:0 NodeList=c1 BatchHost=c1 NumNodes=1 TRES=cpu=64,node=1   Nodes=c1 CPU_IDs=0-31,40 "
    "Mem=0 GRES=  Command=/a b/job.sh WorkDir=/a b\n"
    "JobId=8 HetJobId=7 HetJobOffset=1 JobName=a run JobState=RUNNING NodeList=g[1-2],g3 BatchHost=g1 NumNodes=3   "
    "Nodes=g[1-2] CPU_IDs=0-127 Mem=0 GRES=gpu:a100:8(IDX:0-7)   Nodes=g3 CPU_IDs=0-95 Mem=0 GRES=gpu:h100:4(IDX:0-3)\n"
)


class Recorded(commands.Commands):
    """Replies to a command with the recorded text of its longest matching prefix, or raises the recorded error."""

    def __init__(self, **replies):
        self.replies = {name.replace("_", " "): reply for name, reply in replies.items()}
        self.calls, self.environments = [], []

    def output(self, *command, env=None):
        self.calls.append(command)
        self.environments.append(env)
        prefixes = [name for name in self.replies if " ".join(command).startswith(name)]
        reply = self.replies[max(prefixes, key=len)] if prefixes else ""
        if isinstance(reply, list):
            reply = reply.pop(0) if len(reply) > 1 else reply[0]
        if isinstance(reply, str):
            return reply
        raise reply


@pytest.fixture
def outside(monkeypatch):
    """Environment without Slurm commands and outside a Slurm job."""
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv(RUN_KEY_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")


def requesting(nodes=0, cores=0, gpus=None, **settings):
    """Return a config of a run that requests these machines."""
    config = SlurmSchedulerConfig(**settings)
    config.use_cluster(nodes, cores, gpus)
    return config


def _submission(run_dir, *command):
    return JobSubmission(command or ("python", "-m", "a program"), Path(run_dir), (), grace=30.0)


def test_node_resources_usable_nodes_sorted_by_gpus():
    assert commands.node_resources(SINFO, "", "") == [Node("c1", "c1", 64, 0)]
    assert [(n.name, n.gpus) for n in commands.node_resources(SINFO, "gpu", "")] == [("g1", 8), ("g2", 8), ("g3", 4)]
    assert [n.name for n in commands.node_resources(SINFO, "gpu,cpu", "")] == ["g1", "g2", "g3", "c1"]
    assert [n.name for n in commands.node_resources(SINFO, "gpu", "h100")] == ["g3"]
    # an expression with several features is ignored
    assert [n.name for n in commands.node_resources(SINFO, "gpu", "a100|h100")] == ["g1", "g2", "g3"]
    assert commands.partitions(SINFO) == ["cpu", "gpu"]


def test_shares_of_heterogeneous_job_have_cores_and_gpus_per_node():
    assert list(commands.shares(HET_JOB)) == [
        commands.Share(0, "c1", 33, 0),
        commands.Share(1, "g[1-2]", 128, 8),
        commands.Share(1, "g3", 96, 4),
    ]


def test_find_job_returns_state_restarts_and_exit_code():
    line = "JobId=7 JobName=a JobState=FAILED Reason=NonZeroExitCode Restarts=3 ExitCode=0:9 NodeList=c1"
    job = commands.find_job(Recorded(scontrol=line), "7")
    assert job == commands.Job("FAILED", "NonZeroExitCode", 3, 137)
    assert job.is_finished
    assert commands.find_job(Recorded(scontrol="JobId=7 JobState=PENDING"), "7").exit_code == 0
    assert (
        commands.find_job(Recorded(scontrol=commands.SlurmError(["scontrol"], "Invalid job id specified")), "7") is None
    )
    with pytest.raises(commands.SlurmError, match="JobState for job 7"):
        commands.find_job(Recorded(scontrol="slurm_load_jobs: something else"), "7")
    with pytest.raises(LaunchError, match="Unable to contact"):
        commands.find_job(Recorded(scontrol=commands.SlurmError(["scontrol"], "Unable to contact controller")), "7")


def test_script_with_all_settings_has_sbatch_options(outside, tmp_path):
    config = requesting(
        5,
        cores=16,
        gpus=4,
        spare_nodes=1,
        server_nodes=3,
        partition="cpu",
        server_partition="gpu",
        account="me",
        time_limit="4:00:00",
        setup=["module load cuda"],
        sbatch_args=["--qos=high"],
    )

    script = config.script(_submission(tmp_path / "my run"))

    first, second = script.partition("#SBATCH hetjob")[::2]
    expected = ("--nodes=3", "--partition=cpu", "--account=me", "--time=4:00:00", "--qos=high", "--no-kill")
    assert all(f"#SBATCH {option}\n" in first for option in (*expected, "--requeue", "--signal=B:USR1@90"))
    assert "#SBATCH --nodes=3\n" in second
    assert "#SBATCH --qos=high\n" in second
    assert "#SBATCH --partition=gpu\n" in second
    assert f"#SBATCH --output='{tmp_path}/my run/logs/launcher.log'\n" in first
    assert "\nmodule load cuda\n" in script
    assert "\npython -m 'a program' &\n" in script
    assert subprocess.run(["/bin/bash", "-n"], input=script, text=True).returncode == 0


def test_script_with_defaults_omits_optional_sbatch_options(outside, tmp_path):
    script = SlurmSchedulerConfig(requeue=False).script(_submission(tmp_path))
    assert "#SBATCH --no-requeue\n" in script
    assert not any(word in script for word in ("hetjob", "--no-kill", "--partition", "--gpus", "scontrol requeue"))


def test_script_custom_template_is_rendered_unknown_names_rejected(outside, tmp_path):
    template_file = tmp_path / "own.jinja"
    template_file.write_text("#!/bin/sh\n{{ name }}: {{ command }}")
    config = SlurmSchedulerConfig(template=str(template_file))
    assert config.script(_submission(tmp_path, "run", "it")) == f"#!/bin/sh\n{tmp_path.name}: run it\n"

    template_file.write_text("{{ nmae }}")
    with pytest.raises(ConfigError, match=r"launcher\.options\.template.*nmae"):
        config.script(_submission(tmp_path))


def test_resources_without_slurm_follow_from_settings(outside):
    assert SlurmSchedulerConfig().resources() is None
    planned = requesting(3, server_nodes=1).planned()
    assert [(node.name, node.cores) for node in planned.nodes] == [("node0", 0), ("node1", 0), ("server_node0", 0)]
    resources = requesting(2, cores=8, gpus=4, spare_nodes=3).resources()
    assert (resources.cores, resources.gpus, len(resources.nodes)) == (16, 8, 2)


def test_slurm_unresponsive_plan_works_but_resources_raise(outside, tmp_path, monkeypatch):
    (tmp_path / "sinfo").write_text("#!/bin/sh\necho 'sinfo: fatal: no configuration source' >&2; exit 1\n")
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    config = requesting(2, cores=4)

    assert [(node.cores, node.gpus) for node in config.planned().nodes] == [(4, 0)] * 2
    assert "#SBATCH --nodes=2\n" in config.script(_submission(tmp_path))
    with pytest.raises(ConfigError, match=r"no configuration source.*launcher=local"):
        config.resources()


def test_resources_unknown_or_too_small_partition_is_rejected(outside, monkeypatch):
    monkeypatch.setattr(commands.Commands, "output", lambda self, *command: SINFO)
    servers = {"partition": "cpu", "server_nodes": 2, "server_partition": "gpu"}
    resources = requesting(3, **servers).resources()
    assert [(n.name, n.servers, n.gpus) for n in resources.nodes] == [
        ("c1", False, 0),
        ("g1", True, 8),
        ("g2", True, 8),
    ]
    assert (resources.gpus, resources.cores) == (16, 320)
    limited = requesting(3, cores=80, gpus=4, **servers).resources().nodes
    assert [(n.cores, n.gpus) for n in limited] == [(64, 0), (80, 4), (80, 4)]
    with pytest.raises(ConfigError, match=r"cluster\.nodes .*: expected at most 3.*partition gpu.*found 4"):
        requesting(3, spare_nodes=1, partition="gpu").resources()
    with pytest.raises(ConfigError, match=r"launcher\.options\.server_nodes: expected at most 1.*found 2"):
        requesting(4, server_nodes=2, partition="gpu").resources()
    with pytest.raises(ConfigError, match=r"launcher\.options\.partition: expected one of cpu, gpu, found 'huge'"):
        SlurmSchedulerConfig(partition="huge").resources()
    with pytest.raises(ConfigError, match=r"cluster\.nodes: expected more than launcher\.options\.server_nodes=2"):
        requesting(2, server_nodes=2)


def test_ledger_server_machines_get_only_servers():
    nodes = [Node("a", "", 8, 4, servers=False), Node("b", "", 8, 4, servers=True), Node("c", "", 8, 2)]
    ledger = Ledger(nodes)
    assert set(ledger.allocate(JobSpec("rollout", ("x",), gpus=1), 6)) == {"b", "c"}
    with pytest.raises(LaunchError, match=r"'rollout'.*0 GPUs are free \(b 0, c 0\)"):
        ledger.allocate(JobSpec("rollout", ("x",), gpus=1), 1)
    assert ledger.allocate(JobSpec("actor", ("x",), gpus=1, spmd=True), 4) == ["a"] * 4


def test_submit_without_slurm_error_has_remedy(outside, tmp_path):
    with pytest.raises(ConfigError, match=r"launcher\.kind=slurm: .*sbatch.*launcher=local"):
        SlurmSchedulerConfig().submit(_submission(tmp_path))


def test_submit_passes_run_key_in_file_readable_only_by_user(outside, tmp_path, monkeypatch):
    monkeypatch.setenv(RUN_KEY_VARIABLE, "secret-of-the-run")
    script = SlurmSchedulerConfig().script(_submission(tmp_path))
    ended = "JobId=5 JobState=COMPLETED ExitCode=0:0"
    slurm = Recorded(sbatch="5;cluster\n", scontrol=ended)

    assert batch_job.submit(_submission(tmp_path), script, slurm) == 0

    key = tmp_path / "slurm" / "key"
    assert key.read_text() == "secret-of-the-run"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert str(key) in script
    assert "secret-of-the-run" not in script + str(slurm.calls) + str(slurm.environments)


def test_follow_tolerates_unresponsive_controller_for_a_while(outside, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(batch_job, "POLL_SECONDS", 0.2)
    replies = [commands.SlurmError(["scontrol"], "Unable to contact"), "JobId=5 JobState=FAILED ExitCode=3:0"]
    assert batch_job.follow(Recorded(scontrol=replies), "5", tmp_path, 0) == 3
    assert "Unable to contact" in capsys.readouterr().out


def test_follow_controller_unresponsive_too_long_raises(outside, tmp_path, monkeypatch):
    monkeypatch.setattr(batch_job, "CONTACT_SECONDS", 0.0)
    silent = Recorded(scontrol=commands.SlurmError(["scontrol"], "Unable to contact"))
    with pytest.raises(LaunchError, match="Job 5 may still run"):
        batch_job.follow(silent, "5", tmp_path, 0)


def test_follow_job_unknown_to_slurm_uses_recorded_exit_code(outside, tmp_path):
    no_record = Recorded(scontrol=commands.SlurmError(["scontrol"], "Invalid job id specified"))
    with pytest.raises(LaunchError, match="job 5"):
        batch_job.follow(no_record, "5", tmp_path, 0)
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "ended").write_text("4\n")
    assert batch_job.follow(no_record, "5", tmp_path, 0) == 4


def test_attach_without_unfinished_job_returns_none(outside, tmp_path):
    ended = Recorded(scontrol="JobId=5 JobState=COMPLETED ExitCode=0:0")
    assert batch_job.attach(tmp_path, ended) is None
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "job.json").write_text('{"job": "5"}')
    assert batch_job.attach(tmp_path, ended) is None


@pytest.mark.parametrize(("recorded", "code"), [("5 4", 4), ("6 2", 7)])
def test_follow_ignores_recorded_exit_code_of_other_job(outside, tmp_path, recorded, code):
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "ended").write_text(recorded + "\n")
    assert batch_job.follow(Recorded(scontrol="JobId=5 JobState=FAILED ExitCode=7:0"), "5", tmp_path, 0) == code


def test_output_with_invalid_utf8_is_decoded(tmp_path):
    assert commands.Commands().output("printf", r"a\377b") == "a\ufffdb"


def test_submit_by_two_concurrent_commands_creates_one_job(outside, tmp_path, monkeypatch):
    monkeypatch.setattr(batch_job, "POLL_SECONDS", 0.2)

    class Slow(Recorded):
        def output(self, *command, env=None):
            if command[0] == "sbatch":
                first_runs.set()
                assert second_started.wait(10)
                time.sleep(0.3)  # the other submission now waits for the lock; without a lock it calls sbatch
            return super().output(*command, env=env)

    first_runs, second_started = threading.Event(), threading.Event()
    states = ["JobId=5 JobState=PENDING", "JobId=5 JobState=PENDING", "JobId=5 JobState=COMPLETED ExitCode=0:0"]
    slurm = Slow(sbatch="5\n", scontrol=states)
    submit = functools.partial(batch_job.submit, _submission(tmp_path), "#!/bin/sh\n", slurm)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(submit)
        assert first_runs.wait(10)
        second = pool.submit(submit)
        second_started.set()
        assert (first.result(20), second.result(20)) == (0, 0)
    assert [command[0] for command in slurm.calls].count("sbatch") == 1


def test_submit_rejected_by_sbatch_deletes_key_file(outside, tmp_path, monkeypatch):
    monkeypatch.setenv(RUN_KEY_VARIABLE, "secret-of-the-run")
    refused = Recorded(sbatch=commands.SlurmError(["sbatch"], "invalid partition specified"))
    with pytest.raises(ConfigError, match=r"launcher\.kind=slurm.*launcher\.options\.partition"):
        batch_job.submit(_submission(tmp_path), "", refused)
    assert not (tmp_path / "slurm" / "key").exists()


def test_script_escapes_slurm_patterns_in_run_directory(outside, tmp_path):
    script = SlurmSchedulerConfig().script(_submission(tmp_path / "50%done%j"))
    assert f"#SBATCH --output={tmp_path}/50%%done%%j/logs/launcher.log\n" in script.replace("'", "")
    with pytest.raises(ConfigError, match=r"run_dir=.*backslash"):
        SlurmSchedulerConfig().script(_submission(tmp_path / "back\\slash"))


@pytest.mark.parametrize("warned", [True, False])
def test_script_warned_during_setup_requeues_else_deletes_key(outside, tmp_path, monkeypatch, warned):
    monkeypatch.setenv(RUN_KEY_VARIABLE, "secret-of-the-run")
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "key").write_text("secret-of-the-run")
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\necho "JobId=5 JobState=RUNNING Reason=None"\n')
    scontrol.chmod(0o755)
    config = requesting(cores=1, setup=["kill -USR1 $$"] if warned else [])
    script = config.script(_submission(tmp_path, "sleep", "600" if warned else "0"))
    env = os.environ | {"SLURM_JOB_ID": "5", "PATH": f"{tmp_path}:/usr/bin:/bin"}
    result = subprocess.run(["/bin/bash"], input=script, text=True, env=env, timeout=60)

    calls = (tmp_path / "calls").read_text()
    assert ("requeue 5" in calls) is warned
    assert result.returncode == (143 if warned else 0)
    assert (tmp_path / "slurm" / "ended").exists() is not warned
    assert (tmp_path / "slurm" / "key").exists() is warned
    if not warned:
        assert (tmp_path / "slurm" / "ended").read_text() == "5 0\n"


JOB = "JobId=5 BatchFlag=1 Requeue=1 Nodes=a,b CPU_IDs=0-1 Mem=0 GRES= "


@pytest.mark.parametrize(
    ("names", "state", "launcher", "host", "local"),
    [
        ("a", "ALLOCATED", "a", "", True),
        ("a", "ALLOCATED", None, "", False),  # a job of `salloc`, with the launcher outside its nodes
        ("a", "ALLOCATED", "a", "10.0.0.1", False),
        ("ab", "DOWN", "a", "", False),  # node b may return
    ],
)
def test_nodes_of_job_with_one_node_use_loopback(outside, monkeypatch, names, state, launcher, host, local):
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    if launcher:
        monkeypatch.setenv("SLURMD_NODENAME", launcher)
    states = {"a": "ALLOCATED", "b": state}
    slurm = Recorded(
        scontrol_show_job=JOB,
        scontrol_show_hostnames="\n".join(names),
        scontrol_show_node="".join(f"NodeName={n} State={states[n]} NodeAddr=10.0.0.1\n" for n in names),
    )
    provider = SlurmNodes(SlurmSchedulerConfig(host=host), slurm)
    hosts = {node.host for node in provider.nodes()}
    assert hosts == {"127.0.0.1" if local else "10.0.0.1"}
    if launcher:
        assert provider.address() in hosts


@pytest.mark.parametrize("may_shrink", [True, False])
def test_on_nodes_lost_requeues_job_without_its_lost_node(outside, monkeypatch, may_shrink):
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    refused = commands.SlurmError(["scontrol"], "Job/step already completing or completed")
    slurm = Recorded(
        scontrol_show_job=JOB,
        scontrol_show_hostnames="a\nb\n",
        scontrol_show_node="".join(f"NodeName={name} State=ALLOCATED NodeAddr=127.0.0.1\n" for name in "ab"),
        env="" if may_shrink else refused,
    )

    provider = SlurmNodes(SlurmSchedulerConfig(), slurm)
    assert [node.name for node in provider.nodes()] == ["a", "b"]  # the controller has not detected the loss yet

    with pytest.raises(LaunchError, match="b was lost"):
        provider.on_nodes_lost(["b"], "b was lost")

    shrink, requeue = slurm.calls[-2:]
    assert shrink[1].startswith("--chdir=/")  # scontrol writes scripts to its working directory
    assert shrink[2:] == ("scontrol", "update", "JobId=5", "NodeList=a")
    restore_size = " && scontrol update JobId=5 NumNodes=2-2" if may_shrink else ""
    assert requeue == ("bash", "-c", f"trap '' TERM; scontrol requeue 5{restore_size}")


def test_agents_in_containers_may_connect_later():
    plain, container = (SlurmNodes(SlurmSchedulerConfig(container_image=image)) for image in ("", "docker://image"))
    assert container.start_seconds >= 10 * plain.start_seconds


def test_on_nodes_lost_respects_max_requeues(outside, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    slurm = Recorded(scontrol_show_job=JOB)
    monkeypatch.setattr("rl_launchers.slurm.scheduler.MAX_REQUEUES", 1)
    provider = SlurmNodes(SlurmSchedulerConfig(), slurm)
    provider.nodes()
    provider.on_nodes_lost(["b"], "b was lost")
    assert not any("requeue" in word for command in slurm.calls for word in command)
