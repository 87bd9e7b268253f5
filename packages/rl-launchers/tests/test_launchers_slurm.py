"""Slurm without a Slurm: the batch script, what its commands print, and refusals with the arithmetic."""

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
gpu|g2|128|gpu:a100:8(S:0-1)|allocated|a100
gpu|g3|96|gpu:h100:4(S:0)|idle~|h100
gpu|g4|128|gpu:a100:8(S:0-1)|drained|a100
"""
"""As recorded: a default partition with a node that is down, and GPUs of two kinds, one powered down, one drained."""

HET_JOB = (
    "JobId=7 HetJobId=7 HetJobOffset=0 JobName=a run UserId=me(1) JobState=RUNNING Reason=None Requeue=1 Restarts=2 "
    "BatchFlag=1 ExitCode=0:0 NodeList=c1 BatchHost=c1 NumNodes=1 TRES=cpu=64,node=1   Nodes=c1 CPU_IDs=0-31,40 "
    "Mem=0 GRES=  Command=/a b/job.sh WorkDir=/a b\n"
    "JobId=8 HetJobId=7 HetJobOffset=1 JobName=a run JobState=RUNNING NodeList=g[1-2],g3 BatchHost=g1 NumNodes=3   "
    "Nodes=g[1-2] CPU_IDs=0-127 Mem=0 GRES=gpu:a100:8(IDX:0-7)   Nodes=g3 CPU_IDs=0-95 Mem=0 GRES=gpu:h100:4(IDX:0-3)\n"
)


class Recorded(commands.Commands):
    """Answers commands with recorded texts, the longest that begins a command; an error is raised."""

    def __init__(self, **answers):
        self.answers = {name.replace("_", " "): answer for name, answer in answers.items()}
        self.asked, self.environments = [], []

    def output(self, *command, env=None):
        self.asked.append(command)
        self.environments.append(env)
        fitting = [name for name in self.answers if " ".join(command).startswith(name)]
        answer = self.answers[max(fitting, key=len)] if fitting else ""
        if isinstance(answer, list):
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
        if isinstance(answer, str):
            return answer
        raise answer


@pytest.fixture
def outside(monkeypatch):
    """No Slurm, and no job of one."""
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv(RUN_KEY_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")


def _submission(run_dir, *command):
    return JobSubmission(command or ("python", "-m", "a program"), Path(run_dir), (), grace=30.0)


def test_offered_partition_usable_nodes_come_those_with_most_gpus_first():
    assert commands.node_resources(SINFO, "", "") == [Node("c1", "c1", 64, 0)]
    assert [(n.name, n.gpus) for n in commands.node_resources(SINFO, "gpu", "")] == [("g1", 8), ("g2", 8), ("g3", 4)]
    assert [n.name for n in commands.node_resources(SINFO, "gpu,cpu", "")] == ["g1", "g2", "g3", "c1"]
    assert [n.name for n in commands.node_resources(SINFO, "gpu", "h100")] == ["g3"]
    assert [n.name for n in commands.node_resources(SINFO, "gpu", "a100|h100")] == ["g1", "g2", "g3"]  # left to Slurm
    assert commands.partitions(SINFO) == ["cpu", "gpu"]


def test_shares_heterogeneous_job_cores_and_gpus_per_machine_are_read():
    assert list(commands.shares(HET_JOB)) == [
        commands.Share(0, "c1", 33, 0),
        commands.Share(1, "g[1-2]", 128, 8),
        commands.Share(1, "g3", 96, 4),
    ]


@pytest.mark.parametrize(
    ("text", "gpus"), [("(null)", 0), ("", 0), ("gpu:4", 4), ("gpu:a100:8(S:0-1),nvme:1", 8), ("gpu:1,gpu:h100:2", 3)]
)
def test_gpus_in_generic_resources_are_counted(text, gpus):
    assert commands.gpus_in(text) == gpus


def test_look_job_says_state_restarts_and_exit_code():
    line = "JobId=7 JobName=a JobState=FAILED Reason=NonZeroExitCode Restarts=3 ExitCode=0:9 NodeList=c1"
    job = commands.find_job(Recorded(scontrol=line), "7")
    assert job == commands.Job("FAILED", "NonZeroExitCode", 3, 137)
    assert job.is_finished
    assert (
        commands.find_job(Recorded(scontrol=commands.SlurmError(["scontrol"], "Invalid job id specified")), "7") is None
    )
    with pytest.raises(LaunchError, match="Unable to contact"):
        commands.find_job(Recorded(scontrol=commands.SlurmError(["scontrol"], "Unable to contact controller")), "7")


def test_script_whole_settings_are_options_of_sbatch(outside, tmp_path):
    config = SlurmSchedulerConfig(
        nodes=2,
        spare_nodes=1,
        server_nodes=3,
        partition="cpu",
        server_partition="gpu",
        account="me",
        time_limit="4:00:00",
        cores_per_node=16,
        gpus_per_node=4,
        setup=["module load cuda"],
        sbatch_args=["--mail-type=END"],
    )

    script = config.script(_submission(tmp_path / "my run"))

    first, second = script.partition("#SBATCH hetjob")[::2]
    expected = ("--nodes=3", "--partition=cpu", "--account=me", "--time=4:00:00", "--mail-type=END", "--no-kill")
    assert all(f"#SBATCH {option}\n" in first for option in (*expected, "--requeue", "--signal=B:USR1@90"))
    assert "#SBATCH --nodes=3\n" in second
    assert "#SBATCH --partition=gpu\n" in second
    assert f"#SBATCH --output='{tmp_path}/my run/logs/launcher.log'\n" in first
    assert "\nmodule load cuda\n" in script
    assert "\npython -m 'a program' &\n" in script
    assert subprocess.run(["/bin/bash", "-n"], input=script, text=True).returncode == 0


def test_script_defaults_say_nothing_of_what_slurm_decides(outside, tmp_path):
    script = SlurmSchedulerConfig(requeue=False).script(_submission(tmp_path))
    assert "#SBATCH --no-requeue\n" in script
    assert not any(word in script for word in ("hetjob", "--no-kill", "--partition", "--gpus", "scontrol requeue"))


def test_script_own_template_gets_the_same_and_unknown_names_are_refused(outside, tmp_path):
    own = tmp_path / "own.jinja"
    own.write_text("#!/bin/sh\n{{ name }}: {{ command }}")
    config = SlurmSchedulerConfig(template=str(own))
    assert config.script(_submission(tmp_path, "run", "it")) == f"#!/bin/sh\n{tmp_path.name}: run it\n"

    own.write_text("{{ nmae }}")
    with pytest.raises(ConfigError, match=r"launcher\.options\.template.*nmae"):
        config.script(_submission(tmp_path))


def test_resources_without_slurm_are_those_that_the_settings_say(outside):
    assert SlurmSchedulerConfig().resources() is None
    planned = SlurmSchedulerConfig(nodes=2, server_nodes=1).planned()
    assert [(node.name, node.cores) for node in planned.nodes] == [("node0", 0), ("node1", 0), ("server_node0", 0)]
    said = SlurmSchedulerConfig(nodes=2, spare_nodes=3, cores_per_node=8, gpus_per_node=4).resources()
    assert (said.cores, said.gpus, len(said.nodes)) == (16, 8, 2)


def test_planned_slurm_that_does_not_answer_is_no_obstacle_to_a_plan_and_one_to_a_run(outside, tmp_path, monkeypatch):
    (tmp_path / "sinfo").write_text("#!/bin/sh\necho 'sinfo: fatal: no configuration source' >&2; exit 1\n")
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    config = SlurmSchedulerConfig(nodes=2, cores_per_node=4)

    assert [(node.cores, node.gpus) for node in config.planned().nodes] == [(4, 0)] * 2
    assert "#SBATCH --nodes=2\n" in config.script(_submission(tmp_path))
    with pytest.raises(ConfigError, match=r"found: .*no configuration source.*launcher=local"):
        config.resources()


def test_resources_partition_has_too_few_or_is_not_there_is_refused_with_the_arithmetic(outside, monkeypatch):
    monkeypatch.setattr(commands.Commands, "output", lambda self, *command: SINFO)
    found = SlurmSchedulerConfig(nodes=1, partition="cpu", server_nodes=2, server_partition="gpu").resources()
    assert [(n.name, n.servers, n.gpus) for n in found.nodes] == [("c1", False, 0), ("g1", True, 8), ("g2", True, 8)]
    assert (found.gpus, found.cores) == (16, 320)
    with pytest.raises(ConfigError, match=r"launcher\.options\.nodes: expected at most 3 .*partition gpu .*found 4"):
        SlurmSchedulerConfig(nodes=3, spare_nodes=1, partition="gpu").resources()
    with pytest.raises(ConfigError, match=r"launcher\.options\.server_nodes: expected at most 1 .*found 2"):
        SlurmSchedulerConfig(nodes=2, server_nodes=2, partition="gpu").resources()
    with pytest.raises(ConfigError, match=r"launcher\.options\.partition: expected one of cpu, gpu, found 'huge'"):
        SlurmSchedulerConfig(partition="huge").resources()


def test_use_nodes_fills_in_what_the_settings_leave_open_and_refuses_a_contradiction(outside, tmp_path):
    config = SlurmSchedulerConfig(server_nodes=1, spare_nodes=1)
    config.use_nodes(3)
    assert "#SBATCH --nodes=3\n" in config.script(_submission(tmp_path))  # two and the spare one
    config.use_nodes(3)  # as the same command in its job says
    config.use_nodes(0)
    with pytest.raises(ConfigError, match=r"launcher\.options\.nodes: expected 3.*cluster\.nodes=4.*found 2"):
        config.use_nodes(4)
    with pytest.raises(ConfigError, match=r"cluster\.nodes: expected more than launcher\.options\.server_nodes=2"):
        SlurmSchedulerConfig(server_nodes=2).use_nodes(2)


def test_ledger_machines_for_servers_take_servers_and_no_others():
    nodes = [Node("a", "", 8, 4, servers=False), Node("b", "", 8, 4, servers=True), Node("c", "", 8, 2)]
    ledger = Ledger(nodes)
    assert set(ledger.allocate(JobSpec("rollout", ("x",), gpus=1), 6)) == {"b", "c"}
    with pytest.raises(LaunchError, match=r"'rollout'.*free are 0 \(b 0, c 0\)"):
        ledger.allocate(JobSpec("rollout", ("x",), gpus=1), 1)
    assert ledger.allocate(JobSpec("actor", ("x",), gpus=1, spmd=True), 4) == ["a"] * 4


def test_submit_no_slurm_is_told_with_a_remedy(outside, tmp_path):
    with pytest.raises(ConfigError, match=r"no sbatch on PATH.*launcher=local"):
        SlurmSchedulerConfig().submit(_submission(tmp_path))


def test_submit_run_key_goes_by_a_file_for_the_user_alone(outside, tmp_path, monkeypatch):
    monkeypatch.setenv(RUN_KEY_VARIABLE, "secret-of-the-run")
    script = SlurmSchedulerConfig().script(_submission(tmp_path))
    ended = "JobId=5 JobState=COMPLETED ExitCode=0:0"
    slurm = Recorded(sbatch="5;cluster\n", scontrol=ended)

    assert batch_job.submit(_submission(tmp_path), script, 0.2, slurm) == 0

    key = tmp_path / "slurm" / "key"
    assert key.read_text() == "secret-of-the-run"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert str(key) in script
    assert "secret-of-the-run" not in script + str(slurm.asked) + str(slurm.environments)


def test_follow_controller_silent_for_a_while_is_waited_for(outside, tmp_path, capsys):
    answers = [commands.SlurmError(["scontrol"], "Unable to contact"), "JobId=5 JobState=FAILED ExitCode=3:0"]
    assert batch_job.follow(Recorded(scontrol=answers), "5", tmp_path, 0.2, 0) == 3
    assert "Unable to contact" in capsys.readouterr().out


def test_follow_controller_silent_for_long_raises_and_says_that_the_job_may_go_on(outside, tmp_path, monkeypatch):
    monkeypatch.setattr(batch_job, "CONTACT_SECONDS", 0.0)
    silent = Recorded(scontrol=commands.SlurmError(["scontrol"], "Unable to contact"))
    with pytest.raises(LaunchError, match="Job 5 may go on"):
        batch_job.follow(silent, "5", tmp_path, 0.2, 0)


def test_follow_job_forgotten_says_what_it_left_or_that_nobody_knows(outside, tmp_path):
    gone = Recorded(scontrol=commands.SlurmError(["scontrol"], "Invalid job id specified"))
    with pytest.raises(LaunchError, match="forgotten job 5"):
        batch_job.follow(gone, "5", tmp_path, 0.2, 0)
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "ended").write_text("4\n")
    assert batch_job.follow(gone, "5", tmp_path, 0.2, 0) == 4


def test_attach_no_job_or_one_that_ended_is_none(outside, tmp_path):
    ended = Recorded(scontrol="JobId=5 JobState=COMPLETED ExitCode=0:0")
    assert batch_job.attach(tmp_path, 0.2, ended) is None
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "job.json").write_text('{"job": "5"}')
    assert batch_job.attach(tmp_path, 0.2, ended) is None


@pytest.mark.parametrize(("said", "code"), [("5 4", 4), ("4", 4), ("6 2", 7)])
def test_follow_exit_code_of_another_job_is_not_this_ones(outside, tmp_path, said, code):
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "ended").write_text(said + "\n")
    assert batch_job.follow(Recorded(scontrol="JobId=5 JobState=FAILED ExitCode=7:0"), "5", tmp_path, 0.2, 0) == code


def test_look_answer_without_a_state_is_an_error_that_is_waited_for():
    assert commands.find_job(Recorded(scontrol="JobId=5 JobState=PENDING"), "5").exit_code == 0
    with pytest.raises(commands.SlurmError, match="nothing of the state of job 5"):
        commands.find_job(Recorded(scontrol="slurm_load_jobs: something else"), "5")


def test_output_that_is_no_text_is_read(tmp_path):
    assert commands.Commands().output("printf", r"a\377b") == "a\ufffdb"


def test_submit_two_commands_at_once_are_one_job(outside, tmp_path):
    class Slow(Recorded):
        def output(self, *command, env=None):
            if command[0] == "sbatch":
                began.set()
                assert second.wait(10)
                time.sleep(0.3)  # the other one is at the lock by then, or at sbatch, which is the fault
            return super().output(*command, env=env)

    began, second = threading.Event(), threading.Event()
    states = ["JobId=5 JobState=PENDING", "JobId=5 JobState=PENDING", "JobId=5 JobState=COMPLETED ExitCode=0:0"]
    slurm = Slow(sbatch="5\n", scontrol=states)
    hand_in = functools.partial(batch_job.submit, _submission(tmp_path), "#!/bin/sh\n", 0.2, slurm)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(hand_in)
        assert began.wait(10)
        other = pool.submit(hand_in)
        second.set()
        assert (first.result(20), other.result(20)) == (0, 0)
    assert [command[0] for command in slurm.asked].count("sbatch") == 1


def test_submit_refused_leaves_no_key(outside, tmp_path, monkeypatch):
    monkeypatch.setenv(RUN_KEY_VARIABLE, "secret-of-the-run")
    refused = Recorded(sbatch=commands.SlurmError(["sbatch"], "invalid partition specified"))
    with pytest.raises(ConfigError, match="sbatch refused"):
        batch_job.submit(_submission(tmp_path), "", 0.2, refused)
    assert not (tmp_path / "slurm" / "key").exists()


def test_script_directory_with_what_slurm_would_fill_in_is_taken_as_it_is(outside, tmp_path):
    script = SlurmSchedulerConfig().script(_submission(tmp_path / "50%done%j"))
    assert f"#SBATCH --output={tmp_path}/50%%done%%j/logs/launcher.log\n" in script.replace("'", "")
    with pytest.raises(ConfigError, match="expected no backslash"):
        SlurmSchedulerConfig().script(_submission(tmp_path / "back\\slash"))


@pytest.mark.parametrize("warned", [True, False])
def test_script_is_warned_during_setup_requeues_and_else_ends_without_its_key(outside, tmp_path, monkeypatch, warned):
    monkeypatch.setenv(RUN_KEY_VARIABLE, "secret-of-the-run")
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "key").write_text("secret-of-the-run")
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\necho "JobId=5 JobState=RUNNING Reason=None"\n')
    scontrol.chmod(0o755)
    config = SlurmSchedulerConfig(cores_per_node=1, setup=["kill -USR1 $$"] if warned else [])
    script = config.script(_submission(tmp_path, "sleep", "600" if warned else "0"))
    env = os.environ | {"SLURM_JOB_ID": "5", "PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["/bin/bash"], input=script, text=True, env=env, timeout=60)

    asked = (tmp_path / "asked").read_text()
    assert ("requeue 5" in asked) is warned
    assert done.returncode == (143 if warned else 0)
    assert (tmp_path / "slurm" / "ended").exists() is not warned
    assert (tmp_path / "slurm" / "key").exists() is warned
    if not warned:
        assert (tmp_path / "slurm" / "ended").read_text() == "5 0\n"


JOB = "JobId=5 BatchFlag=1 Requeue=1 Nodes=a,b CPU_IDs=0-1 Mem=0 GRES= "


@pytest.mark.parametrize(
    ("names", "state", "launcher", "host", "local"),
    [
        ("a", "ALLOCATED", "a", "", True),
        ("a", "ALLOCATED", None, "", False),  # of `salloc`, elsewhere
        ("a", "ALLOCATED", "a", "10.0.0.1", False),
        ("ab", "ALLOCATED", "a", "", False),
        ("ab", "DOWN", "a", "", False),  # it may come back
    ],
)
def test_nodes_of_a_job_of_one_node_are_on_loopback(outside, monkeypatch, names, state, launcher, host, local):
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
    found = {node.host for node in provider.nodes()}
    assert found == {"127.0.0.1" if local else "10.0.0.1"}
    if launcher:
        assert provider.address() in found


@pytest.mark.parametrize("may_shrink", [True, False])
def test_lacking_job_is_requeued_without_its_lost_node_and_asks_for_as_many_again(outside, monkeypatch, may_shrink):
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
    assert [node.name for node in provider.nodes()] == ["a", "b"]  # the controller does not know it yet

    with pytest.raises(LaunchError, match="b was lost"):
        provider.on_nodes_lost(["b"], "b was lost")

    shrink, requeue = slurm.asked[-2:]
    assert shrink[1].startswith("--chdir=/")  # scontrol leaves scripts where it runs
    assert shrink[2:] == ("scontrol", "update", "JobId=5", "NodeList=a")
    again = " && scontrol update JobId=5 NumNodes=2-2" if may_shrink else ""
    assert requeue == ("bash", "-c", f"trap '' TERM; scontrol requeue 5{again}")


def test_lacking_job_that_was_started_again_often_enough_is_left_alone(outside, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    slurm = Recorded(scontrol_show_job=JOB)
    provider = SlurmNodes(SlurmSchedulerConfig(max_requeues=1), slurm)
    provider.nodes()
    provider.on_nodes_lost(["b"], "b was lost")
    assert not any("requeue" in word for command in slurm.asked for word in command)
