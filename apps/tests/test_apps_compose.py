"""Composition of configs: settings of components, layers of files and presets, and hints for unknown settings."""

import os
import sys

import pytest

from rl_apps.cli.driver import main, trainer_job
from rl_apps.programs.gsm8k_grpo import APP
from rl_apps.run.app import Run
from rl_apps.run.components import server_jobs, weights_directory
from rl_apps.settings.compose import describe, to_yaml
from rl_apps.settings.device_layout import devices_of, layout_of
from rl_contracts.errors import ConfigError
from rl_engines_fsdp import LoRAConfig

THIRD_PARTY = '''
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
    """Number of chunks."""

class Server:
    @classmethod
    def server_spec(cls, config, spec):
        command = ("serve", spec.model_path, str(config.batch), spec.device)
        return JobSpec("servers", command, spec.strategy.data, cpus=spec.cpus, gpus=spec.gpus)

@dataclass
class ServerConfig(ServerConfig):
    """Server settings."""
    batch: int = 7
    """Concurrent completions."""
    def check(self, spec):
        require(spec.strategy.tensor <= self.batch, "batch", "more", self.batch)

class Machine: pass

@dataclass
class MachineConfig(SchedulerConfig):
    """A machine with GPUs."""
    gpus: int = 4
    """Number of GPUs."""
    nodes: int = 1
    """Number of machines with that many GPUs."""
    def resources(self):
        if self.nodes == 1:
            return Resources(self.gpus, 8)
        nodes = [Node(f"node{i}", f"10.0.0.{i}", 8, self.gpus) for i in range(self.nodes)]
        return Resources(self.nodes * self.gpus, self.nodes * 8, tuple(nodes))
class Dark: pass
@dataclass
class DarkConfig(SchedulerConfig):
    """A scheduler that knows no resources before a job runs."""
class Odd: pass
@dataclass
class OddConfig:
    """Settings without the required base class."""
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
THIRD_PARTY_ALLOCATION = "allocation=theirserver:d1+theirengine:d1"


@pytest.fixture
def third_party(tmp_path, monkeypatch):
    """Install a third-party package with a train engine, a server and schedulers."""
    (tmp_path / "fixture_theirs.py").write_text(THIRD_PARTY)
    info = tmp_path / "fixture_theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fixture-theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("fixture_theirs", None)


def test_allocation_selects_settings_of_its_components(third_party):
    config = APP.config([THIRD_PARTY_ALLOCATION, "actor.engine.chunks=5", "rollout.server.batch=9"])

    assert (config.actor.engine.chunks, config.critic.engine.chunks, config.rollout.server.batch) == (5, 5, 9)
    keys = {key for key, _, _ in describe(config)}
    assert {"actor.engine.chunks", "ref.engine.chunks", "rollout.server.batch"} <= keys
    assert not any(key.endswith(("offload", "max_sequences")) for key in keys)


@pytest.mark.parametrize("quote", ["", "'"])
def test_allocation_of_experts_keeps_its_parentheses(quote):
    text = "embedded:d1+megatron:(attn:d2|ffn:e2)"

    config = APP.config([f"allocation={quote}{text}{quote}", "model.path=embedded-moe"])

    assert (config.allocation, config.recipe) == (text, "embedded")
    assert layout_of(text, "required").actor.strategy.expert == 2


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("actor.engine.chunk=5", "actor.engine.chunks"),
        ("launcher.options.gpu=1", "launcher.options.gpus"),
    ],
)
def test_unknown_third_party_setting_suggests_nearest(third_party, override, nearest):
    with pytest.raises(ConfigError, match=f"unknown setting '{override.split('=')[0]}'. Did you mean '{nearest}'"):
        APP.config([THIRD_PARTY_ALLOCATION, "launcher=machine", override])


def test_setting_of_another_engine_names_that_engine(capsys):
    err = _reject(capsys, "allocation=embedded:d1+megatron:t2", "actor.engine.lora.rank=8", "--dry-run")

    assert "actor.engine.lora.rank: 'megatron', which allocation selects, has no setting" in err
    assert "Select fsdp there, or remove actor.engine.lora.rank" in err


def test_settings_of_the_wrong_base_class_are_rejected(third_party):
    with pytest.raises(ConfigError, match="odd: expected settings derived from TrainEngineConfig, found OddConfig"):
        APP.config(["allocation=embedded:d1+odd:d1"])


def test_optional_section_is_created_by_setting_a_key():
    config = APP.config(["actor.engine.lora.rank=4", "actor.engine.lora.target_modules=[q_proj]"])
    assert config.actor.engine.lora == config.ref.engine.lora == LoRAConfig(rank=4, target_modules=["q_proj"])
    assert APP.config(["actor.engine.lora={rank: 4}"]).actor.engine.lora == LoRAConfig(rank=4)
    with pytest.raises(ConfigError, match=r"'actor.engine.lora.rang'. Did you mean 'actor.engine.lora.rank'"):
        APP.config(["actor.engine.lora.rang=4"])


def test_engines_of_other_models_default_to_actor_engine():
    config = APP.config(["actor.engine.max_logits=7", "actor.engine.timeout_seconds=60", "critic.engine.max_logits=9"])
    assert (config.ref.engine.max_logits, config.critic.engine.max_logits) == (7, 9)
    assert config.critic.engine.timeout_seconds == 60


def test_user_file_overrides_defaults_and_yields_to_command_line(tmp_path):
    (tmp_path / "base.yaml").write_text("data:\n  batch_size: 6\nseed: 5\n")
    file = tmp_path / "mine.yaml"
    file.write_text(
        "defaults: [base, {algorithm: dapo}]\nseed: 7\nrollout:\n  server: {max_sequences: 3}\nlauncher: local\n"
    )

    config = APP.config(["total_steps=3"], file)

    assert (config.total_steps, config.seed, config.data.batch_size) == (3, 7, 6)
    assert config.rollout.server.max_sequences == 3
    assert config.algorithm == APP.config(["algorithm=dapo"]).algorithm
    assert APP.config(["algorithm=rloo"], file).algorithm == APP.config(["algorithm=rloo"]).algorithm


def test_file_setting_is_dropped_with_the_method_that_read_it(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("algorithm: {loss: {clip_high: 0.3}}\n")
    override = "algorithm.loss.kind=sapo"

    assert APP.config((), file).algorithm.loss.clip_high == 0.3
    assert APP.config((override,), file).algorithm.loss.clip_high == 0.2
    with pytest.raises(ConfigError, match=r"^algorithm\.loss\.clip_high with "):
        APP.config((override, "algorithm.loss.clip_high=0.3"), file)


def test_preset_beside_the_user_file_is_found(tmp_path):
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "mine.yaml").write_text("loss:\n  clip_low: 0.11\n")
    (tmp_path / "mine.yaml").write_text("algorithm: mine\n")
    assert APP.config(file=tmp_path / "mine.yaml").algorithm.loss.clip_low == 0.11


def test_written_config_composes_to_the_same_config(tmp_path):
    config = APP.config(["seed=7", "actor.engine.lora.rank=4", "ref.engine.max_logits=5", "data.options.level=2"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))

    assert APP.config(file=tmp_path / "config.yaml") == config
    assert config.data.options == {"level": 2}


def test_file_loses_settings_of_replaced_components(third_party, tmp_path):
    (tmp_path / "config.yaml").write_text(
        to_yaml(APP.config(["rollout.server.max_sequences=3", "actor.engine.max_logits=5"]))
    )

    config = APP.config([THIRD_PARTY_ALLOCATION, "launcher=machine"], tmp_path / "config.yaml")
    assert (config.rollout.server.batch, config.actor.engine.chunks, config.launcher.options.gpus) == (7, 3, 4)
    trainer_only = APP.config(["allocation=fsdp:d2"], tmp_path / "config.yaml")
    assert trainer_only.actor.engine.max_logits == 5


def _reject(capsys, *arguments):
    assert main("gsm8k-grpo", list(arguments)) == 2
    captured = capsys.readouterr()
    assert "starting" not in captured.out
    return captured.err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["algorithm=ppo", "critic.engine.offload=true", "cluster.device=cpu", "--dry-run"],
            "offload=True does not work with device=cpu",
        ),
        (["cluster.device=cuda"], "expected 2 GPUs, one per rank, found 0"),
    ],
)
def test_unsupported_components_are_rejected_at_preflight(capsys, monkeypatch, overrides, message):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert message in _reject(capsys, *overrides)


def test_device_auto_uses_gpus_and_rejects_too_few(third_party, capsys):
    machine = ("launcher=machine", "--dry-run")
    assert main("gsm8k-grpo", ["allocation=theirserver:d1t2+fsdp:d2", *machine]) == 0
    plan = capsys.readouterr().out
    assert "Devices: 4 of 4 GPUs: rollout 2, actor 2" in plan
    assert "1 x rollout: serve embedded 7 cuda" in plan

    assert "expected 4 GPUs, one per rank, found 3" in _reject(
        capsys, "allocation=theirserver:d1t2+fsdp:d2", "launcher.options.gpus=3", *machine
    )
    assert main("gsm8k-grpo", ["allocation=embedded:d2+fsdp:d8", "launcher.options.gpus=0", *machine]) == 0
    assert "CPU (no GPU was found): 10 processes, 1 of 8 cores each" in capsys.readouterr().out
    assert main("gsm8k-grpo", ["cluster.device=cpu", *machine]) == 0
    assert "CPU (cluster.device=cpu): 2 processes, 4 of 8 cores each" in capsys.readouterr().out


@pytest.mark.parametrize(("split", "gpus", "expected"), [("d1t2p2", 8, (1, 4, 4)), ("d2t2", 0, (2, 0, 2))])
def test_split_server_gets_devices_and_cores_of_all_ranks(third_party, tmp_path, split, gpus, expected):
    machine = ("launcher=machine", f"launcher.options.gpus={gpus}")
    config = APP.config([f"allocation=theirserver:{split}+fsdp:d4", *machine])
    layout = layout_of(config.allocation, "required")
    devices = devices_of(layout, config.cluster, config.launcher)

    [job] = server_jobs(Run(config, layout, tmp_path, devices.kind), devices)

    assert (job.count, job.gpus, job.cpus) == expected


@pytest.mark.parametrize(("servers", "ranks"), [("d2", "d2"), ("d1t2", "d2")])
def test_shared_gpus_are_counted_once(third_party, tmp_path, servers, ranks):
    allocation = f"allocation=theirserver:{servers}|fsdp:{ranks}"
    config = APP.config([allocation, "launcher.kind=local", "cluster.devices=2"])
    layout = layout_of(config.allocation, "required")
    devices = devices_of(layout, config.cluster, config.launcher)
    run = Run(config, layout, tmp_path, devices.kind)

    trainer = trainer_job("app", run, devices, [])
    [server] = server_jobs(run, devices)

    assert "2 of 2 GPUs" in devices.sentence
    assert (trainer.colocated_with, trainer.gpus, trainer.count) == (server.role, 1, 2)
    assert server.gpus * server.count == 2


@pytest.mark.parametrize("route", ["shm", "disk"])
def test_shared_memory_is_scratch_of_servers_and_trainers(third_party, tmp_path, route):
    config = APP.config([f"publish.route={route}"])
    layout = layout_of(config.allocation, "required")
    devices = devices_of(layout, config.cluster, config.launcher)
    run = Run(config, layout, tmp_path, devices.kind)

    roles = (*server_jobs(run, devices), trainer_job("app", run, devices, []))

    expected = (str(weights_directory(tmp_path)),) if route == "shm" else ()
    assert [role.scratch for role in roles] == [expected, expected]


@pytest.mark.parametrize(("address", "interface"), [("http://10.9.8.7:1", ""), ("http://127.0.0.1:1", None)])
def test_trainer_of_remote_servers_is_not_bound_to_loopback(third_party, tmp_path, monkeypatch, address, interface):
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    config = APP.config([f"rollout.server.addresses=[{address}]"])
    layout = layout_of(config.allocation, "required")
    devices = devices_of(layout, config.cluster, config.launcher)
    trainer = trainer_job("app", Run(config, layout, tmp_path, devices.kind), devices, [address])

    assert trainer.env.get("NCCL_SOCKET_IFNAME") == interface


def test_shared_gpus_without_scheduler_or_memory_are_rejected(third_party, capsys):
    machine = ("launcher=machine", "launcher.options.gpus=2", "--dry-run")
    error = _reject(capsys, "allocation=theirserver:d1|fsdp:d1", *machine)
    assert "launcher.kind=machine with allocation=theirserver:d1|fsdp:d1: expected `+`" in error

    local = ("cluster.devices=1", "--dry-run")
    error = _reject(capsys, "allocation=vllm:d1|fsdp:d1", "rollout.server.memory_share=0.9", *local)
    assert "rollout.server.memory_share: expected at most 0.7" in error


def test_ipc_without_a_shared_gpu_is_rejected(third_party, capsys):
    allocation = "allocation=embedded:d2|fsdp:d2"  # `+` is a case of test_apps_mistakes.py
    error = _reject(capsys, allocation, "cluster.devices=2", "publish.route=ipc", "--dry-run")
    assert f"publish.route with {allocation}: expected shm on one host" in error
    shared = ("allocation=embedded:d1|fsdp:d1", "cluster.devices=1", "publish.route=ipc")
    assert main("gsm8k-grpo", [*shared, "--dry-run"]) == 0
    assert "Devices: 1 of 1 GPUs: rollout 1, actor 1" in capsys.readouterr().out


def test_scheduler_without_resources_needs_cores_and_devices(third_party, capsys):
    assert "cluster.cores with launcher.kind=dark: expected a number" in _reject(capsys, "launcher=dark")
    assert main("gsm8k-grpo", ["launcher=dark", "cluster.cores=6", "cluster.devices=8", "--dry-run"]) == 0
    assert "Devices: 2 of 8 GPUs: rollout 1, actor 1" in capsys.readouterr().out


def test_route_auto_on_several_machines_depends_on_servers(third_party, capsys):
    machines = ("launcher=machine", "launcher.options.gpus=0", "launcher.options.nodes=4", "--dry-run")
    assert main("gsm8k-grpo", [*machines]) == 0
    plan = capsys.readouterr().out
    assert "2 processes, 8 of 32 cores each on 4 nodes" in plan
    assert "publish.route=disk" in plan
    for override, route in (
        ("cluster.nodes=1", "shm"),
        ("allocation=theirserver:d2+fsdp:d1", "broadcast"),
    ):
        assert main("gsm8k-grpo", [*machines, override]) == 0
        assert f"publish.route={route}" in capsys.readouterr().out

    error = _reject(capsys, *machines, "publish.route=shm")
    assert "publish.route: expected broadcast, disk or auto" in error
    assert "rollout on node0; actor on node1" in error.replace(", actor", "; actor")
    error = _reject(capsys, *machines, "cluster.nodes=5")
    assert "cluster.nodes: expected at most 4, which launcher.kind=machine has (node0, node1, node2, node3)" in error


@pytest.fixture
def no_slurm(monkeypatch):
    """Hide Slurm and the variables of its jobs."""
    monkeypatch.setenv("PATH", "/nonexistent")
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)


def test_slurm_job_has_cluster_nodes_machines(no_slurm, capsys):
    slurm = ("launcher=slurm", "cluster.cores=2", "cluster.devices=2", "cluster.device=cpu", "--dry-run")
    assert main("gsm8k-grpo", [*slurm, "cluster.nodes=2"]) == 0
    plan = capsys.readouterr().out
    assert "of 4 cores each on 2 nodes" in plan
    assert "#SBATCH --nodes=2\n" in plan
    assert "#SBATCH --cpus-per-task=2\n" in plan
    assert "gpus-per-node" not in plan  # with cluster.device=cpu
    error = _reject(capsys, *slurm, "launcher.options.nodes=2")
    assert "It was renamed to 'cluster.nodes'" in error


def test_server_that_fits_on_no_machine_is_rejected(third_party, capsys):
    machines = ("launcher=machine", "launcher.options.gpus=2", "launcher.options.nodes=2", "--dry-run")
    error = _reject(capsys, "allocation=theirserver:d1t3+fsdp:d1", *machines)
    assert "allocation: role 'rollout': 1 workers of 3 GPUs" in error
    assert "4 GPUs are free (node0 2, node1 2)" in error


def test_remote_attached_servers_use_broadcast(third_party, capsys):
    for address, route in (("http://10.9.8.7:1", "broadcast"), ("http://127.0.0.1:1", "shm")):
        assert main("gsm8k-grpo", [f"rollout.server.addresses=[{address}]", "--dry-run"]) == 0
        assert f"publish.route={route}" in capsys.readouterr().out
