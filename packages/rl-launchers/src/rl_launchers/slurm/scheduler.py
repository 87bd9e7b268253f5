"""Scheduler for a Slurm allocation. `srun` starts a node agent on each node of the allocation."""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from rl_contracts.config import bounded, require
from rl_contracts.errors import ConfigError, LaunchError
from rl_contracts.runtime.logging import get_logger
from rl_contracts.scheduler import JobSubmission, Node, Resources
from rl_launchers.cluster.nodes import LOOPBACK, NodeProvider
from rl_launchers.cluster.scheduler import ClusterScheduler, ClusterSchedulerConfig
from rl_launchers.slurm import batch_job
from rl_launchers.slurm.commands import (
    Commands,
    SlurmError,
    SlurmMissingError,
    Step,
    fields,
    node_resources,
    partitions,
    shares,
)
from rl_launchers.supervise import exit_report

logger = get_logger("launcher")

JOB = "SLURM_JOB_ID"
"""Environment variable with the job id, which Slurm sets inside a job."""
COUNT = "SLURM_JOB_NUM_NODES"
"""Environment variable with the number of nodes at the start of the job, which Slurm sets."""
AGENT = Path(__file__).with_name("templates") / "slurm_agent.sh"
END_SECONDS = 2.0
"""Seconds that `close` waits for `srun` processes to exit; with a lost node, `srun` never exits. An agent that still
runs then exits when it gets no more messages from the launcher."""
IMAGE_SECONDS = 1800.0
"""Seconds for an agent in a container to connect. pyxis may first import an image of many gigabytes."""
MAX_REQUEUES = 100
"""Maximum number of restarts of the job that the run requests, so that no job is requeued forever. Restarts by Slurm
itself count, too, but are not limited."""
SINFO = ("sinfo", "-h", "-N", "-o", "%P|%N|%c|%G|%T|%f")


@dataclass
class SlurmSchedulerConfig(ClusterSchedulerConfig):
    """Settings of a run's Slurm job and of its nodes.

    Outside a Slurm job, the run is submitted with `sbatch` and followed. The job has `cluster.nodes` nodes, including
    `server_nodes`, and `spare_nodes` more. Inside a job of `salloc` or `sbatch`, the run uses the nodes of that job.
    Settings that define the job, such as `partition` and `time_limit`, then have no effect.
    """

    setting: ClassVar[str] = "launcher.options"
    kills_soon: ClassVar[bool] = True
    shares_devices: ClassVar[bool] = True
    spare_nodes: int = bounded(0, "0 or more", lambda nodes: nodes >= 0)
    """Number of idle nodes in addition to `cluster.nodes`. When a node is lost, its servers and trainers move to one of
    these nodes. With 0, the loss of a node ends the job. With `requeue`, Slurm then restarts the job once enough nodes
    are available."""
    server_nodes: int = bounded(0, "0 or more", lambda nodes: nodes >= 0)
    """Number of nodes for servers only, of the `cluster.nodes` nodes: a separate component of a heterogeneous job. With
    0, servers and trainers share all nodes."""
    partition: str = ""
    """Partition; empty for Slurm's default."""
    server_partition: str = ""
    """Partition of `server_nodes`; empty for the value of `partition`."""
    constraint: str = ""
    """Required features of nodes, in the format of `sbatch --constraint`."""
    server_constraint: str = ""
    """Required features of `server_nodes`; empty for the value of `constraint`."""
    account: str = ""
    """Account to charge; empty for the user's default."""
    time_limit: str = ""
    """Time limit in Slurm's format: minutes, `hours:minutes:seconds` or `days-hours`; empty for the partition's limit.
    Before it expires, the run saves a recovery checkpoint. With `requeue` it then continues under the same job id."""
    exclusive: bool = True
    """Allocate whole nodes. If False, only `cluster.cores` and `cluster.devices` of each."""
    requeue: bool = True
    """Restart the job after a preemption, the end of its time limit, or the loss of a node. The run resumes from its
    last recovery checkpoint, or starts at the first step if there is none. A run that finished, failed or was stopped
    is never requeued. A job is requeued at most 100 times; then the same command submits it again."""
    setup: list[str] = field(default_factory=list)
    """Shell commands to run in the job before the launcher starts, for example `module load cuda`. No secrets."""
    sbatch_args: list[str] = field(default_factory=list)
    """Additional options of `sbatch`, for example `[--qos=high, --reservation=mine]`."""
    srun_args: list[str] = field(default_factory=list)
    """Additional options of the `srun` command that starts each node agent."""
    template: str = ""
    """Path of a Jinja template for the batch script; empty for `rl_launchers/slurm/templates/slurm.sh.jinja`."""
    container_image: str = ""
    """Container image for agents, servers and trainers (`srun --container-image` of pyxis); empty for none. The
    launcher runs outside the container. Its Python environment must be at the same path inside."""
    container_mounts: list[str] = field(default_factory=list)
    """Directories to mount in the container, in the format of `srun --container-mounts`. The run directory is always
    mounted."""

    def resources(self) -> Resources | None:
        """Return the resources without spare nodes.

        Inside a job, count the nodes of the job. Outside, count the nodes that the job would get. Return None if Slurm
        is not installed and the run requests no number of cores.

        Raises:
            ConfigError: the partition does not exist or has too few nodes, or Slurm does not answer.
        """
        resources = self._resources(SlurmMissingError)
        return resources if all(node.cores for node in resources.nodes) else None

    def planned(self) -> Resources:
        """Return the same as `resources`, or the resources that the run requests if Slurm does not answer.

        If it requests no number of cores, each node counts as 0 cores.
        """
        return self._resources(SlurmError)

    def _resources(self, ignored_error: type[SlurmError]) -> Resources:
        if self.submits():
            nodes = [node for component_nodes in self._available_nodes(ignored_error) for node in component_nodes]
        else:
            nodes = SlurmNodes(self).nodes()
            nodes = nodes[: len(nodes) - self.spare_nodes]
        return Resources(sum(node.gpus for node in nodes), sum(node.cores for node in nodes), tuple(nodes))

    def use_cluster(self, nodes: int = 0, cores: int = 0, gpus: int | None = None) -> None:
        """Set the machines that the run requests, including `server_nodes` but not spare nodes; see the contract."""
        expected = f"more than launcher.options.server_nodes={self.server_nodes}, or 0"
        require(nodes == 0 or nodes > self.server_nodes, "cluster.nodes", expected, nodes)
        super().use_cluster(nodes, cores, gpus)

    def submits(self) -> bool:
        """Return True outside a Slurm job."""
        return JOB not in os.environ

    def submit(self, submission: JobSubmission) -> int:
        """Submit the run with `sbatch` and follow it; see the contract."""
        return batch_job.submit(submission, self.script(submission))

    def script(self, submission: JobSubmission) -> str:
        """Return the batch script, or "" inside a job; see the contract."""
        if not self.submits():
            return ""
        # ignore Slurm's errors: --dry-run needs no Slurm, and a run has already called `resources`, which raises them
        nodes_by_component = self._available_nodes(SlurmError)
        options = [
            self._options(component, nodes)
            for component, nodes in zip(self._components(), nodes_by_component, strict=True)
        ]
        settings = {name: getattr(self, name) for name in ("requeue", "spare_nodes", "setup")}
        variables = settings | {"max_requeues": MAX_REQUEUES, "parts": options}
        return batch_job.render(submission, self.template, variables)

    def attach(self, run_dir: Path) -> int | None:
        """Follow the job of a run that was submitted earlier; see the contract."""
        return batch_job.attach(run_dir)

    def job_state(self, run_dir: Path) -> str:
        """Return the job's state in Slurm, with the reason if it waits; see the contract."""
        return batch_job.state(run_dir)

    def cancel(self, run_dir: Path) -> None:
        """Cancel the job with `scancel`; see the contract."""
        batch_job.cancel(run_dir)

    def _components(self) -> list[_Component]:
        """Return the components of the job: one, or the two of a heterogeneous job."""
        main_nodes = max(1, self.cluster.nodes - self.server_nodes)
        main = _Component("", main_nodes, self.spare_nodes, self.partition, self.constraint)
        partition, constraint = self.server_partition or self.partition, self.server_constraint or self.constraint
        return (
            [main, _Component("server_", self.server_nodes, 0, partition, constraint)] if self.server_nodes else [main]
        )

    def _available_nodes(self, ignored_error: type[SlurmError]) -> list[list[Node]]:
        """Return the nodes that each component of the job would get, without spare nodes.

        If `sinfo` fails with `ignored_error`, return placeholder nodes, whose number of cores may be unknown (0).
        """
        try:
            text = Commands().output(*SINFO)
        except ignored_error:
            text = ""
        except SlurmError as error:
            raise ConfigError(
                f"launcher.kind=slurm: cannot query the cluster: {error}. Run this on a machine where `sinfo` "
                "lists the partitions, or set launcher=local."
            ) from error
        result: list[list[Node]] = []
        for component in self._components():
            taken = {node.name for nodes in result for node in nodes}
            nodes = component.choose(text, taken) if text else component.unknown()
            result.append([self._limit_node(node, component) for node in nodes])
        return result

    def _limit_node(self, node: Node, component: _Component) -> Node:
        """Return a node with the resources that the run uses, not more than it has: such a job would wait forever."""
        request, servers = self.cluster, bool(component.prefix) if self.server_nodes else None
        cores, gpus = request.cores or node.cores, node.gpus if request.gpus is None else request.gpus
        if node.cores:  # the resources of the node are known
            cores, gpus = min(cores, node.cores), min(gpus, node.gpus)
        return replace(node, cores=cores, gpus=gpus, servers=servers)

    def _options(self, component: _Component, nodes: Sequence[Node]) -> list[str]:
        """Return the `sbatch` options of a component of the job."""
        values = {
            "nodes": component.nodes + component.spares,
            "ntasks-per-node": 1,
            "cpus-per-task": min(node.cores for node in nodes),
            "gpus-per-node": min(node.gpus for node in nodes),
            "partition": component.partition,
            "constraint": component.constraint,
            "account": self.account,
            "time": self.time_limit,
        }
        options = [f"--{name}={shlex.quote(str(value))}" for name, value in values.items() if value]
        return options + ["--exclusive"] * self.exclusive + self.sbatch_args


@dataclass(frozen=True)
class _Component:
    """Component of a job: nodes of one kind."""

    prefix: str
    """Prefix of the names of its settings, `server_` or empty."""
    nodes: int
    spares: int
    partition: str
    constraint: str

    def unknown(self) -> list[Node]:
        """Return placeholder nodes without known resources."""
        return [Node(f"{self.prefix}node{index}", "", 0) for index in range(self.nodes)]

    def choose(self, sinfo: str, taken: Collection[str]) -> list[Node]:
        """Return usable nodes for the component, except the nodes in `taken`.

        Raises:
            ConfigError: the partition does not exist, or has too few usable nodes.
        """
        names, setting = partitions(sinfo), f"launcher.options.{self.prefix}"
        is_known = all(name in names for name in filter(None, self.partition.split(",")))
        require(is_known, f"{setting}partition", f"one of {', '.join(names)}", self.partition)
        usable = [node for node in node_resources(sinfo, self.partition, self.constraint) if node.name not in taken]
        where = " ".join(filter(None, ["partition", self.partition or "(default)", self.constraint]))
        limit = f"at most {len(usable)}, since {where} has {len(usable)} usable nodes"
        counted = f"{setting}nodes" if self.prefix else "cluster.nodes without server nodes and with spare nodes"
        require(self.nodes + self.spares <= len(usable), counted, limit, self.nodes + self.spares)
        return usable[: self.nodes]


class SlurmNodes(NodeProvider):
    """Provides the nodes of the job in which this process runs.

    Args:
        config: see `SlurmSchedulerConfig`.
        commands: runner of Slurm commands.
    """

    def __init__(self, config: SlurmSchedulerConfig, commands: Commands | None = None) -> None:
        self._config, self._commands = config, commands or Commands()
        self.spares = self._config.spare_nodes
        if config.container_image:
            self.start_seconds = IMAGE_SECONDS
        self._nodes: list[Node] = []
        self._last_query = float("-inf")
        self._component_of: dict[str, int] = {}
        self._can_requeue = False
        self._steps: dict[str, Step] = {}
        """Job steps of agents that have not connected yet, by node name."""
        self._step_name, self._has_detached_steps = f"agent-{secrets.token_hex(4)}", False

    def nodes(self) -> list[Node]:
        """Return the nodes that Slurm does not report as lost. Queries Slurm at most every `POLL_SECONDS`."""
        if time.monotonic() - self._last_query >= batch_job.POLL_SECONDS:
            try:
                self._nodes = self._query_nodes()
            except LaunchError:
                if not self._nodes:
                    raise
            self._last_query = time.monotonic()
        return list(self._nodes)

    def start(self, node: Node, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        """Start the agent as a job step with all resources of the job on the node."""
        if (previous := self._steps.pop(node.name, None)) is not None:
            previous.kill()
        requeue = "yes" if self._can_requeue and self._config.spare_nodes else "no"
        srun_command = [
            "srun",
            *self._srun_options(node, log.parent),
            "bash",
            str(AGENT),
            requeue,
            str(log.absolute()),
            *command,
        ]
        job_env = {name: value for name, value in env.items() if name != "TMPDIR"}  # each node sets its own
        try:
            self._steps[node.name] = self._commands.start(srun_command, job_env, log)
        except OSError as error:
            raise LaunchError(f"cannot start srun: {error}") from error

    def agent_connected(self, node: Node) -> None:
        """Kill `srun`, but keep its step running.

        On a preemption, `srun` would kill the step immediately, before trainers have saved a recovery checkpoint. Slurm
        itself first waits for `KillWait`, or the partition's `GraceTime`.
        """
        if (step := self._steps.pop(node.name, None)) is not None:
            step.leave()
            self._has_detached_steps = True

    def end_reason(self, node: Node) -> str:
        """Return the exit of `srun`, or "" while it runs and after the agent has connected."""
        step = self._steps.get(node.name)
        code = None if step is None else step.poll()
        return "" if code is None else f"{exit_report.describe_exit(code)}, according to srun"

    def close(self) -> None:
        """End the remaining steps: signal each `srun` that still runs, and cancel all other steps with `scancel`."""
        for step in self._steps.values():
            if step.poll() is None:
                step.send_signal(signal.SIGINT)
        deadline = time.monotonic() + END_SECONDS
        for step in self._steps.values():
            try:
                step.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                step.kill()
        self._steps.clear()
        if self._has_detached_steps:
            self._has_detached_steps = False
            with suppress(SlurmError):  # without messages from the launcher, agents end on their own
                steps = self._commands.output("squeue", "-h", "-s", "-j", os.environ[JOB], "-o", "%i %j").splitlines()
                if agent_steps := [step.split()[0] for step in steps if step.endswith(f" {self._step_name}")]:
                    # in the background: with a lost node, scancel retries for a minute
                    self._commands.output(
                        "bash", "-c", f"scancel --signal=KILL {' '.join(agent_steps)} > /dev/null 2>&1 &"
                    )

    def on_nodes_lost(self, lost: Collection[str], why: str) -> None:
        """Requeue the job if Slurm allows it and `MAX_REQUEUES` is not reached.

        Slurm would requeue the job only after its controller has detected the loss, which is too late for the run.
        """
        if self._can_requeue and int(os.environ.get("SLURM_RESTART_COUNT", "0")) < MAX_REQUEUES:
            logger.warning("%s; requeueing the job.", why)
            self._requeue(os.environ[JOB], [node.name for node in self.nodes() if node.name not in lost])
            raise LaunchError(why)

    def _requeue(self, job: str, remaining: Sequence[str]) -> None:
        """Remove the lost nodes from the job, then requeue it.

        With lost nodes, the requeued job would wait until the controller has detected the loss. With `--exclusive`,
        Slurm 22.05 never restarts a job that was requeued with an unresponsive node (`BadConstraints`).
        """
        command, count = f"scontrol requeue {job}", os.environ.get(COUNT)
        try:
            if count:
                # scontrol writes two scripts with the variables of the smaller job to its working directory
                with tempfile.TemporaryDirectory() as scripts_dir:
                    update = ("scontrol", "update", f"JobId={job}", f"NodeList={','.join(remaining)}")
                    self._commands.output("env", f"--chdir={scripts_dir}", *update)
                command += f" && scontrol update JobId={job} NumNodes={count}-{count}"
        except SlurmError as error:  # a heterogeneous job, or a cluster that does not allow jobs to shrink
            logger.warning("cannot remove the lost nodes from the job: %s", error)
        # requeueing sends SIGTERM to the job's processes at once
        self._commands.output("bash", "-c", f"trap '' TERM; {command}")

    def address(self) -> str:
        """Return the address of the launcher's node in Slurm."""
        hosts = [node.host for node in self.nodes() if node.name == os.environ.get("SLURMD_NODENAME")]
        return hosts[0] if hosts else super().address()

    def _srun_options(self, node: Node, log_dir: Path) -> list[str]:
        config = self._config
        options = ["--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node.name}", f"--cpus-per-task={node.cores}"]
        options += [
            "--cpu-bind=none",
            "--mem=0",
            "--input=none",
            "--quit-on-interrupt",
            f"--job-name={self._step_name}",
        ]
        options += [f"--gres=gpu:{node.gpus}"] if node.gpus else []
        options += [f"--het-group={self._component_of[node.name]}"] if len(set(self._component_of.values())) > 1 else []
        if config.container_image:
            mounts = [*config.container_mounts, f"{log_dir.parent}:{log_dir.parent}"]
            options += [f"--container-image={config.container_image}", f"--container-mounts={','.join(mounts)}"]
        return options + config.srun_args

    def _query_nodes(self) -> list[Node]:
        job = os.environ.get(JOB)
        if not job:
            raise LaunchError(f"{JOB} is not set: this must run inside a Slurm job. Start it with sbatch or salloc.")
        job_text = self._commands.output("scontrol", "show", "job", "-d", "-o", job)
        job_fields = fields(job_text.partition("\n")[0])
        self._can_requeue = job_fields.get("BatchFlag") == "1" and job_fields.get("Requeue") == "1"
        allocations = list(shares(job_text))
        hosts = ",".join(allocation.hosts for allocation in allocations)
        node_lines = self._commands.output("scontrol", "show", "node", "-o", hosts).splitlines() if hosts else []
        fields_by_node = {node_fields["NodeName"]: node_fields for node_fields in map(fields, filter(None, node_lines))}
        nodes_by_component: list[list[Node]] = [[], []]
        for allocation in allocations:
            for name in self._commands.output("scontrol", "show", "hostnames", allocation.hosts).split():
                state = fields_by_node.get(name, {}).get("State", "DOWN")
                self._component_of[name] = allocation.part
                if not any(word in state for word in ("DOWN", "NOT_RESPONDING", "FAIL", "*")):
                    node = Node(
                        name, _resolve_host(fields_by_node[name]["NodeAddr"]), allocation.cores, allocation.gpus
                    )
                    nodes_by_component[min(allocation.part, 1)].append(node)
        own_name, ordered = os.environ.get("SLURMD_NODENAME"), self._in_placement_order(*nodes_by_component)
        # a job with one node never gets more nodes
        is_single_node = [*self._component_of] == [own_name] and not self._config.host
        return [replace(node, host=LOOPBACK) for node in ordered] if is_single_node else ordered

    def _in_placement_order(self, main: list[Node], servers: list[Node]) -> list[Node]:
        """Return the trainer nodes, then the server nodes, then the spare nodes, which any role may use."""
        regular, spares = main[: len(main) - self.spares], main[len(main) - self.spares :]
        if servers:
            regular = [replace(node, servers=False) for node in regular] + [replace(n, servers=True) for n in servers]
        return regular + spares


class SlurmScheduler(ClusterScheduler):
    """Starts workers on the nodes of the job in which this process runs.

    Args:
        log_dir: directory of the logs, on a file system that the nodes share.
        config: see `SlurmSchedulerConfig`.
        commands: runner of Slurm commands.
    """

    def __init__(
        self, log_dir: Path, config: SlurmSchedulerConfig | None = None, commands: Commands | None = None
    ) -> None:
        config = config or SlurmSchedulerConfig()
        super().__init__(log_dir, config, SlurmNodes(config, commands))


def _resolve_host(address: str) -> str:
    try:
        return socket.gethostbyname(address)
    except OSError:
        return address
