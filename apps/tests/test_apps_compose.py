"""How a config comes about: parts bring their settings, files and presets lie over each other, hints are near."""

import os
import socket
import sys
from operator import attrgetter

import pytest
from omegaconf import OmegaConf

from rl_apps.cli.driver import main, trainer_job
from rl_apps.programs.gsm8k_grpo import APP
from rl_apps.programs.gsm8k_sft import APP as SFT
from rl_apps.run.app import Run
from rl_apps.run.components import server_jobs, weights_directory
from rl_apps.settings.compose import describe, to_yaml
from rl_apps.settings.device_layout import devices_of, layout_of
from rl_contracts.errors import ConfigError
from rl_contracts.testing.processes import free_port
from rl_engines_fsdp import LoRAConfig

THEIRS = '''
from dataclasses import dataclass, field
from rl_contracts.config import require
from rl_contracts.engine import TrainEngineConfig
from rl_contracts.inference import ServerConfig
from rl_contracts.scheduler import JobSpec, Node, Resources, SchedulerConfig

class Engine: pass

@dataclass
class EngineConfig(TrainEngineConfig):
    """A train engine."""
    chunks: int = 3
    """Pieces in which it thinks."""

class Server:
    @classmethod
    def server_spec(cls, config, spec):
        command = ("serve", spec.model_path, str(config.batch), spec.device)
        return JobSpec("servers", command, spec.strategy.data, cpus=spec.cpus, gpus=spec.gpus)

@dataclass
class ServerConfig(ServerConfig):
    """Its servers."""
    batch: int = 7
    """Answers at once."""
    def check(self, spec):
        require(spec.strategy.tensor <= self.batch, "batch", "more", self.batch)

class Machine: pass

@dataclass
class MachineConfig(SchedulerConfig):
    """A machine with GPUs."""
    gpus: int = 4
    """GPUs that it has."""
    nodes: int = 1
    """Machines, each with as many."""
    def resources(self):
        if self.nodes == 1:
            return Resources(self.gpus, 8)
        nodes = [Node(f"node{i}", f"10.0.0.{i}", 8, self.gpus) for i in range(self.nodes)]
        return Resources(self.nodes * self.gpus, self.nodes * 8, tuple(nodes))
class Dark: pass
@dataclass
class DarkConfig(SchedulerConfig):
    """Knows nothing before a job runs."""
class Odd: pass
@dataclass
class OddConfig:
    """Not derived from anything."""
'''
ENTRY_POINTS = """[rl.train_engines]
theirengine = fixture_theirs:Engine
odd = fixture_theirs:Odd
[rl.inference_engines]
theirserver = fixture_theirs:Server
[rl.schedulers]
machine = fixture_theirs:Machine
dark = fixture_theirs:Dark
"""
OURS_OUT = "allocation=theirserver:d1+theirengine:d1"


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """A third party's package with a train engine, a server and schedulers, as an installer would lay it out."""
    (tmp_path / "fixture_theirs.py").write_text(THEIRS)
    info = tmp_path / "fixture_theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fixture-theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("fixture_theirs", None)


def test_allocation_names_the_part_whose_settings_there_are(theirs):
    config = APP.config([OURS_OUT, "actor.engine.chunks=5", "rollout.server.batch=9"])

    assert (config.actor.engine.chunks, config.critic.engine.chunks, config.rollout.server.batch) == (5, 5, 9)
    keys = {key for key, _, _ in describe(config)}
    assert {"actor.engine.chunks", "ref.engine.chunks", "rollout.server.batch"} <= keys
    assert not any(key.endswith(("offload", "slots")) for key in keys)


@pytest.mark.parametrize("quote", ["", "'"])
def test_allocation_of_experts_is_read_with_its_brackets(quote):
    text = "embedded:d1+megatron:(attn:d2|ffn:e2)"

    config = APP.config([f"allocation={quote}{text}{quote}", "model.path=embedded-moe"])

    assert (config.allocation, config.recipe) == (text, "embedded")
    assert layout_of(text, "required").actor.strategy.expert == 2


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("actor.engine.chunk=5", "actor.engine.chunks"),
        ("rollout.server.bach=9", "rollout.server.batch"),
        ("launcher.options.gpu=1", "launcher.options.gpus"),
    ],
)
def test_their_settings_mistyped_are_refused_with_the_nearest(theirs, override, nearest):
    with pytest.raises(ConfigError, match=f"unknown setting '{override.split('=')[0]}'. Did you mean '{nearest}'"):
        APP.config([OURS_OUT, "launcher=machine", override])


@pytest.mark.parametrize("setting", ["lora.rank=8", "offload=true"])
def test_setting_that_only_another_engine_has_is_refused_with_the_allocation_and_that_engine(capsys, setting):
    key = f"actor.engine.{setting.split('=')[0]}"

    err = _refused(capsys, "allocation=embedded:d1+megatron:t2", f"actor.engine.{setting}", "--dry-run")

    assert f"{key} does not go with 'megatron', which the allocation names" in err
    assert f"Choose fsdp there, or leave {key} out" in err


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_one_gpu_may_be_shared_by_a_server_and_any_engine(engine, capsys):
    assert main("gsm8k-grpo", [f"allocation=embedded:d1|{engine}:d1", "launcher.options.gpus=[0]", "--dry-run"]) == 0


def test_their_settings_are_in_the_help(theirs, capsys):
    assert main("gsm8k-grpo", ["--help", "all", OURS_OUT, "launcher=machine"]) == 0
    text = capsys.readouterr().out
    assert "actor.engine.chunks=3\n      Pieces in which it thinks." in text
    assert "launcher.options.gpus=4" in text
    assert "launcher.kind='machine'" in text


def test_settings_that_do_not_come_from_the_contract_are_refused(theirs):
    with pytest.raises(ConfigError, match="odd: expected settings derived from TrainEngineConfig, found OddConfig"):
        APP.config(["allocation=embedded:d1+odd:d1"])


def test_optional_section_is_made_by_setting_one_of_its_keys():
    config = APP.config(["actor.engine.lora.rank=4", "actor.engine.lora.target_modules=[q_proj]"])
    assert config.actor.engine.lora == config.ref.engine.lora == LoRAConfig(rank=4, target_modules=["q_proj"])
    assert APP.config(["actor.engine.lora={rank: 4}"]).actor.engine.lora == LoRAConfig(rank=4)
    with pytest.raises(ConfigError, match=r"'actor.engine.lora.rang'. Did you mean 'actor.engine.lora.rank'"):
        APP.config(["actor.engine.lora.rang=4"])


def test_other_models_engines_are_set_as_the_actors_unless_they_say_otherwise():
    config = APP.config(["actor.engine.max_logits=7", "actor.engine.max_shard_gb=2", "critic.engine.max_logits=9"])
    assert (config.ref.engine.max_logits, config.critic.engine.max_logits) == (7, 9)
    assert config.critic.engine.max_shard_gb == 2


def test_file_of_ones_own_lies_over_the_defaults_and_below_the_command_line(tmp_path):
    (tmp_path / "base.yaml").write_text("data:\n  batch_size: 6\nseed: 5\n")
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [base, {algorithm: dapo}]\nseed: 7\nrollout:\n  server: {slots: 3}\nlauncher: local\n")

    config = APP.config(["total_steps=3"], file)

    assert (config.total_steps, config.seed, config.data.batch_size) == (3, 7, 6)
    assert config.rollout.server.slots == 3
    assert config.algorithm == APP.config(["algorithm=dapo"]).algorithm
    assert APP.config(["algorithm=rloo"], file).algorithm == APP.config(["algorithm=rloo"]).algorithm


@pytest.mark.parametrize(
    ("override", "setting", "in_file", "default"),
    [
        ("algorithm.loss.kind=sapo", "algorithm.loss.clip_high", 0.3, 0.2),
        ("actor.optimizer.name=sgd", "actor.optimizer.beta1", 0.8, 0.9),
    ],
)
def test_setting_in_a_file_goes_with_the_method_that_read_it(tmp_path, override, setting, in_file, default):
    file = tmp_path / "mine.yaml"
    file.write_text(OmegaConf.to_yaml(OmegaConf.from_dotlist([f"{setting}={in_file}"])))

    assert attrgetter(setting)(APP.config((), file)) == in_file
    assert attrgetter(setting)(APP.config((override,), file)) == default
    with pytest.raises(ConfigError, match=f"^{setting} with "):
        APP.config((override, f"{setting}={in_file}"), file)


def test_presets_of_ones_own_lie_beside_the_file(tmp_path):
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "mine.yaml").write_text("loss:\n  clip_low: 0.11\n")
    (tmp_path / "mine.yaml").write_text("algorithm: mine\n")
    assert APP.config(file=tmp_path / "mine.yaml").algorithm.loss.clip_low == 0.11


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "expected a YAML file with settings, found: No such file"),
        ("a: [1", "expected a YAML file with settings, found"),
        ("- 1\n", "found a list"),
        ("defaults: [gone]\n", "gone.yaml: expected a YAML file"),
        ("algorithm: dappo\n", "algorithm=dappo: unknown preset; there are .*dapo"),
        ("rollout:\n  group_sise: 3\n", "unknown setting 'rollout.group_sise'. Did you mean 'rollout.group_size'"),
    ],
)
def test_file_that_cannot_be_used_is_named(tmp_path, text, message):
    file = tmp_path / "mine.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        APP.config(file=file)


@pytest.mark.parametrize("override", ["allocation=embedded:d1,fsdp:d1", "seed=1,2"])
def test_several_values_for_a_setting_are_refused(override):
    with pytest.raises(ConfigError, match="one value; a comma stands between several"):
        APP.config([override])


@pytest.mark.parametrize("app", [APP, SFT], ids=lambda app: app.name)
def test_config_that_a_run_wrote_gives_the_same_config_again(app, tmp_path):
    settings = ["seed=7", "actor.engine.lora.rank=4", "ref.engine.max_logits=5"] if app is APP else ["seed=7"]
    config = app.config([*settings, "data.options.level=2"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))

    assert app.config(file=tmp_path / "config.yaml") == config
    assert config.data.options == {"level": 2}


def test_config_of_a_run_with_other_parts_loses_the_settings_of_those_that_went(theirs, tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(APP.config(["rollout.server.slots=3", "actor.engine.max_logits=5"])))

    config = APP.config([OURS_OUT, "launcher=machine"], tmp_path / "config.yaml")
    assert (config.rollout.server.batch, config.actor.engine.chunks, config.launcher.options.gpus) == (7, 3, 4)
    trainer_alone = APP.config(["allocation=fsdp:d2"], tmp_path / "config.yaml")
    assert trainer_alone.actor.engine.max_logits == 5


def _refused(capsys, *arguments):
    assert main("gsm8k-grpo", list(arguments)) == 2
    captured = capsys.readouterr()
    assert "starting" not in captured.out
    return captured.err


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["allocation=embeded:d1+fsdp:d1"], "unknown name 'embeded'; did you mean 'embedded'?"),
        (["allocation=embedded:d1+fsdp:p2"], "pipeline and expert dimensions must be 1"),
        (["allocation=embedded:d1t2+fsdp:d1"], "allocation: expected embedded:d1 "),
        (
            ["algorithm=ppo", "critic.engine.offload=true", "cluster.device=cpu"],
            "offload=True does not work with device=cpu",
        ),
        (["cluster.device=cuda"], "expected 2 GPUs, one a rank, found 0"),
        (["cluster.device=gpu"], "cluster.device: expected one of auto, cpu, cuda"),
        (["launcher=slurmm"], "rl.schedulers: unknown name 'slurmm'"),
    ],
)
def test_parts_that_cannot_do_it_are_refused_before_anything_is_made(capsys, monkeypatch, overrides, message, dry_run):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert message in _refused(capsys, *overrides, *dry_run)


def test_auto_takes_gpus_where_there_are_any_and_refuses_too_few(theirs, capsys):
    machine = ("launcher=machine", "--dry-run")
    assert main("gsm8k-grpo", ["allocation=theirserver:d1t2+fsdp:d2", *machine]) == 0
    plan = capsys.readouterr().out
    assert "# Devices: 4 of 4 GPUs: rollout 2, actor 2" in plan
    assert "1 x rollout: serve embedded 7 cuda" in plan

    assert "expected 4 GPUs, one a rank, found 3" in _refused(
        capsys, "allocation=theirserver:d1t2+fsdp:d2", "launcher.options.gpus=3", *machine
    )
    assert main("gsm8k-grpo", ["allocation=embedded:d2+fsdp:d8", "launcher.options.gpus=0", *machine]) == 0
    assert "CPU (no GPU was found): 10 processes, 1 of 8 cores each" in capsys.readouterr().out
    assert main("gsm8k-grpo", ["cluster.device=cpu", *machine]) == 0
    assert "CPU (as asked): 2 processes, 4 of 8 cores each" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("split", "gpus", "expected"), [("d2t2", 8, (2, 2, 2)), ("d1t2p2", 8, (1, 4, 4)), ("d2t2", 0, (2, 0, 2))]
)
def test_servers_that_are_split_get_devices_and_cores_of_all_their_ranks(theirs, tmp_path, split, gpus, expected):
    machine = ("launcher=machine", f"launcher.options.gpus={gpus}")
    config = APP.config([f"allocation=theirserver:{split}+fsdp:d4", *machine])
    layout = layout_of(config.allocation, "required")
    devices = devices_of(layout, config.cluster, config.launcher)

    [job] = server_jobs(Run(config, layout, tmp_path, devices.kind), devices)

    assert (job.count, job.gpus, job.cpus) == expected


@pytest.mark.parametrize(("servers", "ranks"), [("d2", "d2"), ("d1t2", "d2")])
def test_servers_and_trainer_that_share_gpus_need_as_many_as_one_of_them(theirs, tmp_path, servers, ranks):
    allocation = f"allocation=theirserver:{servers}|fsdp:{ranks}"
    config = APP.config([allocation, "launcher.kind=local", "launcher.options.gpus=['4','5']"])
    layout = layout_of(config.allocation, "required")
    devices = devices_of(layout, config.cluster, config.launcher)
    run = Run(config, layout, tmp_path, devices.kind)

    trainer = trainer_job("app", run, devices, [])
    [started] = server_jobs(run, devices)

    assert "2 of 2 GPUs" in devices.sentence
    assert (trainer.colocated_with, trainer.gpus, trainer.count) == (started.role, 1, 2)
    assert started.gpus * started.count == 2


@pytest.mark.parametrize("route", ["shm", "broadcast", "disk"])
def test_weights_in_memory_go_with_those_who_share_them(theirs, tmp_path, route):
    config = APP.config([f"publish.route={route}"])
    layout = layout_of(config.allocation, "required")
    devices = devices_of(layout, config.cluster, config.launcher)
    run = Run(config, layout, tmp_path, devices.kind)

    roles = (*server_jobs(run, devices), trainer_job("app", run, devices, []))

    expected = (str(weights_directory(tmp_path)),) if route == "shm" else ()
    assert [role.scratch for role in roles] == [expected, expected]


@pytest.mark.parametrize(("address", "interface"), [("http://10.9.8.7:1", ""), ("http://127.0.0.1:1", None)])
def test_trainer_of_servers_elsewhere_is_not_kept_to_loopback(theirs, tmp_path, monkeypatch, address, interface):
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    config = APP.config([f"rollout.server.addresses=[{address}]"])
    layout = layout_of(config.allocation, "required")
    devices = devices_of(layout, config.cluster, config.launcher)
    trainer = trainer_job("app", Run(config, layout, tmp_path, devices.kind), devices, [address])

    assert trainer.env.get("NCCL_SOCKET_IFNAME") == interface


def test_allocation_that_shares_gpus_is_refused_where_the_scheduler_or_the_memory_cannot(theirs, capsys):
    machine = ("launcher=machine", "launcher.options.gpus=2", "--dry-run")
    told = _refused(capsys, "allocation=theirserver:d1|fsdp:d1", *machine)
    assert "launcher.kind=machine with allocation=theirserver:d1|fsdp:d1: expected `+`" in told

    local = ("launcher.options.gpus=['0']", "--dry-run")
    told = _refused(capsys, "allocation=vllm:d1|fsdp:d1", "rollout.server.memory_share=0.9", *local)
    assert "rollout.server.memory_share: expected at most 0.7, so that the trainer has room on the same GPU" in told


def test_ipc_needs_one_gpu_that_trainer_and_server_share(theirs, capsys):
    for allocation, gpus in (("embedded:d1+fsdp:d1", "['0','1']"), ("embedded:d2|fsdp:d2", "['0','1']")):
        told = _refused(
            capsys, f"allocation={allocation}", f"launcher.options.gpus={gpus}", "publish.route=ipc", "--dry-run"
        )
        assert f"publish.route with allocation={allocation}: expected shm on one host" in told
    shared = ("allocation=embedded:d1|fsdp:d1", "launcher.options.gpus=['0']", "publish.route=ipc")
    assert main("gsm8k-grpo", [*shared, "--dry-run"]) == 0
    assert "# Devices: 1 of 1 GPUs: rollout 1, actor 1" in capsys.readouterr().out


def test_port_of_any_server_that_is_in_use_is_refused_before_anything_starts(theirs, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with socket.socket() as taken:
        port = free_port(2) + 1
        taken.bind(("127.0.0.1", port))
        taken.listen()
        refused = _refused(capsys, "allocation=theirserver:d2+fsdp:d1", f"rollout.port={port - 1}", "--dry-run")

    assert f"port {port} is in use by process {os.getpid()}" in refused


def test_scheduler_that_cannot_know_what_there_is_is_told(theirs, capsys):
    assert "cluster.cores with launcher.kind=dark: expected a number" in _refused(capsys, "launcher=dark")
    assert main("gsm8k-grpo", ["launcher=dark", "cluster.cores=6", "cluster.devices=8", "--dry-run"]) == 0
    assert "# Devices: 2 of 8 GPUs: rollout 1, actor 1" in capsys.readouterr().out


def test_servers_on_several_machines_get_their_weights_by_broadcast_and_an_only_one_by_disk(theirs, capsys):
    machines = ("launcher=machine", "launcher.options.gpus=0", "launcher.options.nodes=4", "--dry-run")
    assert main("gsm8k-grpo", [*machines]) == 0
    said = capsys.readouterr().out
    assert "2 processes, 8 of 32 cores each on 4 nodes" in said
    assert "route: disk" in said
    for more, route in (
        ("cluster.nodes=1", "shm"),
        ("allocation=theirserver:d2+fsdp:d1", "broadcast"),
        ("publish.host=10.0.0.7", "broadcast"),
    ):
        assert main("gsm8k-grpo", [*machines, more]) == 0
        assert f"route: {route}" in capsys.readouterr().out

    told = _refused(capsys, *machines, "publish.route=shm")
    assert "publish.route: expected broadcast, disk or auto" in told
    assert "rollout on node0; actor on node1" in told.replace(", actor", "; actor")
    told = _refused(capsys, *machines, "cluster.nodes=5")
    assert "cluster.nodes: expected at most 4, which launcher.kind=machine has (node0, node1, node2, node3)" in told


@pytest.fixture
def no_slurm(monkeypatch):
    """Neither a Slurm nor a job of one."""
    monkeypatch.setenv("PATH", "/nonexistent")
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)


def test_machines_of_a_job_are_as_many_as_cluster_nodes_says(no_slurm, capsys):
    slurm = ("launcher=slurm", "launcher.options.cores_per_node=2", "cluster.device=cpu", "--dry-run")
    assert main("gsm8k-grpo", [*slurm, "cluster.nodes=2"]) == 0
    said = capsys.readouterr().out
    assert "of 4 cores each on 2 nodes" in said
    assert "#SBATCH --nodes=2\n" in said

    told = _refused(capsys, *slurm, "cluster.nodes=2", "launcher.options.nodes=3")
    assert "launcher.options.nodes: expected 2" in told
    assert "cluster.nodes=2" in told
    assert ", found 3" in told


def test_server_that_fits_on_no_machine_is_refused_with_the_arithmetic(theirs, capsys):
    machines = ("launcher=machine", "launcher.options.gpus=2", "launcher.options.nodes=2", "--dry-run")
    told = _refused(capsys, "allocation=theirserver:d1t3+fsdp:d1", *machines)
    assert "allocation: role 'rollout': 1 workers of 3 GPUs" in told
    assert "4 GPUs are free (node0 2, node1 2)" in told


def test_attached_servers_elsewhere_get_their_weights_by_broadcast(theirs, capsys):
    for address, route in (("http://10.9.8.7:1", "broadcast"), ("http://127.0.0.1:1", "shm")):
        assert main("gsm8k-grpo", [f"rollout.server.addresses=[{address}]", "--dry-run"]) == 0
        assert f"route: {route}" in capsys.readouterr().out
