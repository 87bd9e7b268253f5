"""The scheduler of a Slurm allocation: an agent on each of its nodes, started by `srun`."""

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
"""Slurm's variable with the number of the job, in all that runs in one."""
COUNT = "SLURM_JOB_NUM_NODES"
"""Slurm's variable with how many nodes the job had when it started."""
AGENT = Path(__file__).with_name("templates") / "slurm_agent.sh"
END_SECONDS = 2.0
"""Time for `srun` to end its step. It never does where the node is lost, and an agent that is left ends by itself."""
SINFO = ("sinfo", "-h", "-N", "-o", "%P|%N|%c|%G|%T|%f")


@dataclass
class SlurmSchedulerConfig(ClusterSchedulerConfig):
    """How a run becomes a job of Slurm, and uses its nodes.

    Outside of a job a run is handed in by `sbatch` and followed. Inside of one (of `salloc` or `sbatch`) it uses the
    nodes that are there, and only `spare_nodes`, `server_nodes`, `poll_seconds`, the container and `srun_args` count.
    """

    setting: ClassVar[str] = "launcher.options"
    kills_soon: ClassVar[bool] = True
    shares_devices: ClassVar[bool] = True
    nodes: int = bounded(0, "0 or more", lambda nodes: nodes >= 0)
    """Nodes of the job, those of `server_nodes` and `spare_nodes` not counted; 0: what `cluster.nodes` says beyond
    `server_nodes`, or one."""
    spare_nodes: int = bounded(0, "0 or more", lambda nodes: nodes >= 0)
    """Further nodes, idle until one is lost, whose servers and trainers then go there. With 0 a node that is lost ends
    the job, and Slurm starts it again (`requeue`) once it has a whole set of nodes."""
    server_nodes: int = bounded(0, "0 or more", lambda nodes: nodes >= 0)
    """Nodes for servers only, as a part of their own of a heterogeneous job; 0: servers and trainers share `nodes`."""
    partition: str = ""
    """Partition; empty: Slurm's default."""
    server_partition: str = ""
    """That of `server_nodes`; empty: the same."""
    constraint: str = ""
    """Features that nodes must have, as `sbatch --constraint` takes them."""
    server_constraint: str = ""
    """Those of `server_nodes`; empty: the same."""
    account: str = ""
    """Account that is charged; empty: the user's default."""
    qos: str = ""
    """Quality of service; empty: the default."""
    reservation: str = ""
    """Reservation to run in; empty: none."""
    time_limit: str = ""
    """As Slurm writes it: minutes, `hours:minutes:seconds` or `days-hours`; empty: the partition's. Before it is over
    the run saves a recover point, and with `requeue` goes on in a new job of the same number."""
    exclusive: bool = True
    """Whole nodes; else `cores_per_node` and `gpus_per_node` of each."""
    cores_per_node: int = bounded(0, "0 (all) or more", lambda cores: cores >= 0)
    """Cores of each node; 0: all, as `sinfo` tells."""
    gpus_per_node: int = bounded(-1, "-1 (all), 0 or more", lambda gpus: gpus >= -1)
    """GPUs of each node; -1: all, as `sinfo` tells."""
    requeue: bool = True
    """Whether the job starts again, and goes on from its last recover point, after a preemption, the end of its time,
    or the loss of a node. Needs recovery checkpoints. A run that is over, failed or was stopped never does."""
    max_requeues: int = bounded(100, "0 or more", lambda times: times >= 0)
    """How often it does so before its time is over."""
    setup: list[str] = field(default_factory=list)
    """Lines of shell for the job before the launcher starts, for example `module load cuda`. No secrets."""
    sbatch_args: list[str] = field(default_factory=list)
    """Further options of `sbatch`, for example `--mail-type=END`."""
    srun_args: list[str] = field(default_factory=list)
    """Further options of the `srun` that starts each node's agent."""
    template: str = ""
    """File with the batch script as a Jinja template; empty: ours, `rl_launchers/slurm/templates/slurm.sh.jinja`."""
    container_image: str = ""
    """Image in which agents, and so servers and trainers, run (`srun --container-image`, of pyxis); empty: none. The
    launcher runs outside of it, and its Python environment must be at the same path inside."""
    container_mounts: list[str] = field(default_factory=list)
    """What the container sees of the node, as `srun --container-mounts` takes it. The run directory always is."""
    poll_seconds: float = bounded(5.0, "at least 0.2", lambda seconds: seconds >= 0.2)
    """Seconds between two questions to Slurm's controller."""

    def resources(self) -> Resources | None:
        """In a job what it has; else what `nodes` and `server_nodes` of the partition have; None without Slurm and
        without `cores_per_node`. Spare nodes are not counted.

        Raises:
            ConfigError: there is no such partition, or not so many nodes; or Slurm is there and does not answer.
        """
        found = self._found(SlurmMissingError)
        return found if all(node.cores for node in found.nodes) else None

    def planned(self) -> Resources:
        """As `resources`; where no Slurm answers, as many nodes as the settings say, whose cores may not be known."""
        return self._found(SlurmError)

    def _found(self, unknown: type[SlurmError]) -> Resources:
        if self.submits():
            found = [node for nodes in self._offered(unknown) for node in nodes]
        else:
            found = SlurmNodes(self).nodes()
            found = found[: len(found) - self.spare_nodes]
        return Resources(sum(node.gpus for node in found), sum(node.cores for node in found), tuple(found))

    def use_nodes(self, number: int) -> None:
        """Of the job, with those of `server_nodes` and without spare ones; see the contract."""
        if number:
            left = number - self.server_nodes
            fits = f"more than launcher.options.server_nodes={self.server_nodes}, or 0"
            require(left > 0, "cluster.nodes", fits, number)
            of = f"with server_nodes={self.server_nodes} cluster.nodes={number}"
            agrees = f"{left}, which makes {of}; set one of the two alone"
            require(self.nodes in (0, left), "launcher.options.nodes", agrees, self.nodes)
            self.nodes = left

    def submits(self) -> bool:
        """Outside of a job."""
        return JOB not in os.environ

    def submit(self, submission: JobSubmission) -> int:
        """By `sbatch`; see the contract."""
        return batch_job.submit(submission, self.script(submission), self.poll_seconds)

    def script(self, submission: JobSubmission) -> str:
        """The batch script; see the contract."""
        if not self.submits():
            return ""
        kinds = self._offered(SlurmError)  # a plan needs none, and a run has asked before
        parts = [self._options(part, nodes) for part, nodes in zip(self._parts(), kinds, strict=True)]
        settings = {name: getattr(self, name) for name in ("requeue", "max_requeues", "spare_nodes", "setup")}
        return batch_job.render(submission, self.template, settings | {"parts": parts})

    def attach(self, run_dir: Path) -> int | None:
        """See the contract."""
        return batch_job.attach(run_dir, self.poll_seconds)

    def job_state(self, run_dir: Path) -> str:
        """As Slurm says it, with the reason why it waits; see the contract."""
        return batch_job.state(run_dir)

    def cancel(self, run_dir: Path) -> None:
        """By `scancel`; see the contract."""
        batch_job.cancel(run_dir)

    def _parts(self) -> list[_Part]:
        """What a job asks for: one part, or a heterogeneous job's two."""
        main = _Part("", self.nodes or 1, self.spare_nodes, self.partition, self.constraint)
        partition, constraint = self.server_partition or self.partition, self.server_constraint or self.constraint
        return [main, _Part("server_", self.server_nodes, 0, partition, constraint)] if self.server_nodes else [main]

    def _offered(self, unknown: type[SlurmError]) -> list[list[Node]]:
        """For each part machines such as it would get, spare ones left out; without cores where nobody knows, which
        `unknown` says."""
        try:
            text = Commands().output(*SINFO)
        except unknown:
            text = ""
        except SlurmError as error:
            raise ConfigError(
                f"launcher.kind=slurm: expected a cluster that answers, found: {error}. Start this where `sinfo` lists "
                "the partitions, or set launcher=local."
            ) from error
        found: list[list[Node]] = []
        for part in self._parts():
            taken = {node.name for nodes in found for node in nodes}
            nodes = part.choose(text, taken) if text else part.unknown()
            found.append([self._used(node, part) for node in nodes])
        return found

    def _used(self, node: Node, part: _Part) -> Node:
        """What a run gets of a machine."""
        gpus = node.gpus if self.gpus_per_node < 0 else self.gpus_per_node
        servers = bool(part.prefix) if self.server_nodes else None
        return replace(node, cores=self.cores_per_node or node.cores, gpus=gpus, servers=servers)

    def _options(self, part: _Part, nodes: Sequence[Node]) -> list[str]:
        """Those of `sbatch` for a part of the job."""
        values = {
            "nodes": part.nodes + part.spares,
            "ntasks-per-node": 1,
            "cpus-per-task": min(node.cores for node in nodes),
            "gpus-per-node": min(node.gpus for node in nodes),
            "partition": part.partition,
            "constraint": part.constraint,
            "account": self.account,
            "qos": self.qos,
            "reservation": self.reservation,
            "time": self.time_limit,
        }
        options = [f"--{name}={shlex.quote(str(value))}" for name, value in values.items() if value]
        return options + ["--exclusive"] * self.exclusive + self.sbatch_args


@dataclass(frozen=True)
class _Part:
    """Nodes of one kind in a job."""

    prefix: str
    """Of its settings' names."""
    nodes: int
    spares: int
    partition: str
    constraint: str

    def unknown(self) -> list[Node]:
        """Machines of which nothing is known."""
        return [Node(f"{self.prefix}node{index}", "", 0) for index in range(self.nodes)]

    def choose(self, sinfo: str, taken: Collection[str]) -> list[Node]:
        """Machines such as it would get.

        Raises:
            ConfigError: no such partition, or not so many machines.
        """
        known, setting = partitions(sinfo), f"launcher.options.{self.prefix}"
        right = all(name in known for name in filter(None, self.partition.split(",")))
        require(right, f"{setting}partition", f"one of {', '.join(known)}", self.partition)
        usable = [node for node in node_resources(sinfo, self.partition, self.constraint) if node.name not in taken]
        where = " ".join(filter(None, ["partition", self.partition or "(default)", self.constraint]))
        fits = f"at most {len(usable)} with spare ones, which {where} has usable"
        require(self.nodes + self.spares <= len(usable), f"{setting}nodes", fits, self.nodes + self.spares)
        return usable[: self.nodes]


class SlurmNodes(NodeProvider):
    """The nodes of the job in which this process runs.

    Args:
        config: see `SlurmSchedulerConfig`.
        commands: Slurm's.
    """

    def __init__(self, config: SlurmSchedulerConfig, commands: Commands | None = None) -> None:
        self._config, self._commands = config, commands or Commands()
        self.spares = self._config.spare_nodes
        self._found: list[Node] = []
        self._looked = float("-inf")
        self._parts: dict[str, int] = {}
        self._rescues = False
        self._steps: dict[str, Step] = {}
        """Of agents that have not called yet."""
        self._name, self._left = f"agent-{secrets.token_hex(4)}", False

    def nodes(self) -> list[Node]:
        """Those that Slurm has not found lost; asked at most every `poll_seconds`."""
        if time.monotonic() - self._looked >= self._config.poll_seconds:
            try:
                self._found = self._look()
            except LaunchError:
                if not self._found:
                    raise
            self._looked = time.monotonic()
        return list(self._found)

    def start(self, node: Node, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        """As a step of the job that may use all that the job has on the node."""
        if (former := self._steps.pop(node.name, None)) is not None:
            former.kill()
        rescue = "yes" if self._rescues and self._config.spare_nodes else "no"
        words = ["srun", *self._step(node, log.parent), "bash", str(AGENT), rescue, str(log.absolute()), *command]
        own = {name: value for name, value in env.items() if name != "TMPDIR"}  # each node has its own
        try:
            self._steps[node.name] = self._commands.start(words, own, log)
        except OSError as error:
            raise LaunchError(f"srun cannot be started: {error}") from error

    def agent_connected(self, node: Node) -> None:
        """Leave the step to Slurm: `srun` would kill it at once when it hears of a preemption, before trainers have
        saved a recover point. Slurm itself gives them `KillWait`, or the partition's `GraceTime`."""
        if (step := self._steps.pop(node.name, None)) is not None:
            step.leave()
            self._left = True

    def end_reason(self, node: Node) -> str:
        """As `srun` tells, before the agent has called."""
        step = self._steps.get(node.name)
        code = None if step is None else step.poll()
        return "" if code is None else f"{exit_report.describe_exit(code)}, says srun"

    def close(self) -> None:
        """End every step that is left: each `srun` does so at once when it is asked, and Slurm where there is none."""
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
        if self._left:
            self._left = False
            with suppress(SlurmError):  # they end by themselves when they do not hear from the launcher any more
                steps = self._commands.output("squeue", "-h", "-s", "-j", os.environ[JOB], "-o", "%i %j").splitlines()
                if mine := [step.split()[0] for step in steps if step.endswith(f" {self._name}")]:
                    # which tries for a minute where a node of them is lost
                    self._commands.output("bash", "-c", f"scancel --signal=KILL {' '.join(mine)} > /dev/null 2>&1 &")

    def on_nodes_lost(self, lost: Collection[str], why: str) -> None:
        """Requeue the job, where it is one that may be: Slurm does so by itself only when it has seen the loss, long
        after the run would have given up."""
        if self._rescues and int(os.environ.get("SLURM_RESTART_COUNT", "0")) < self._config.max_requeues:
            logger.warning("%s. The job is started again.", why)
            self._requeue(os.environ[JOB], [node.name for node in self.nodes() if node.name not in lost])
            raise LaunchError(why)

    def _requeue(self, job: str, well: Sequence[str]) -> None:
        """Give the lost nodes back first. A job waits for the end of what was on each of its nodes, so until the
        controller has seen the loss; and Slurm (22.05) never starts one with `--exclusive` again that was requeued
        while a node of it does not answer (`BadConstraints`)."""
        command, count = f"scontrol requeue {job}", os.environ.get(COUNT)
        try:
            if count:
                with tempfile.TemporaryDirectory() as left:  # two scripts, which set the variables of the smaller job
                    update = ("scontrol", "update", f"JobId={job}", f"NodeList={','.join(well)}")
                    self._commands.output("env", f"--chdir={left}", *update)
                command += f" && scontrol update JobId={job} NumNodes={count}-{count}"
        except SlurmError as error:  # a heterogeneous job, or a cluster on which none may shrink
            logger.warning("The job cannot give up its lost nodes: %s", error)
        # what is requeued hears SIGTERM at once
        self._commands.output("bash", "-c", f"trap '' TERM; {command}")

    def address(self) -> str:
        """That of the node on which the launcher runs, as Slurm knows it."""
        own = [node.host for node in self.nodes() if node.name == os.environ.get("SLURMD_NODENAME")]
        return own[0] if own else super().address()

    def _step(self, node: Node, log_dir: Path) -> list[str]:
        config = self._config
        options = ["--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node.name}", f"--cpus-per-task={node.cores}"]
        options += ["--cpu-bind=none", "--mem=0", "--input=none", "--quit-on-interrupt", f"--job-name={self._name}"]
        options += [f"--gres=gpu:{node.gpus}"] if node.gpus else []
        options += [f"--het-group={self._parts[node.name]}"] if len(set(self._parts.values())) > 1 else []
        if config.container_image:
            mounts = [*config.container_mounts, f"{log_dir.parent}:{log_dir.parent}"]
            options += [f"--container-image={config.container_image}", f"--container-mounts={','.join(mounts)}"]
        return options + config.srun_args

    def _look(self) -> list[Node]:
        job = os.environ.get(JOB)
        if not job:
            raise LaunchError(f"expected to run in a job of Slurm, found no {JOB}. Start it with sbatch or salloc.")
        text = self._commands.output("scontrol", "show", "job", "-d", "-o", job)
        mine = fields(text.partition("\n")[0])
        self._rescues = mine.get("BatchFlag") == "1" and mine.get("Requeue") == "1"
        about = list(shares(text))
        hosts = ",".join(share.hosts for share in about)
        shown = self._commands.output("scontrol", "show", "node", "-o", hosts).splitlines() if hosts else []
        known = {found["NodeName"]: found for found in map(fields, filter(None, shown))}
        kinds: list[list[Node]] = [[], []]
        for share in about:
            for name in self._commands.output("scontrol", "show", "hostnames", share.hosts).split():
                state = known.get(name, {}).get("State", "DOWN")
                self._parts[name] = share.part
                if not any(word in state for word in ("DOWN", "NOT_RESPONDING", "FAIL", "*")):
                    node = Node(name, _resolved(known[name]["NodeAddr"]), share.cores, share.gpus)
                    kinds[min(share.part, 1)].append(node)
        own, found = os.environ.get("SLURMD_NODENAME"), self._in_order(*kinds)
        alone = [*self._parts] == [own] and not self._config.host  # with its only node, for a job gets no more
        return [replace(node, host=LOOPBACK) for node in found] if alone else found

    def _in_order(self, main: list[Node], servers: list[Node]) -> list[Node]:
        """Those for trainers, those for servers, and the spare ones, which are for all."""
        first, spares = main[: len(main) - self.spares], main[len(main) - self.spares :]
        if servers:
            first = [replace(node, servers=False) for node in first] + [replace(n, servers=True) for n in servers]
        return first + spares


class SlurmScheduler(ClusterScheduler):
    """Starts workers on the nodes of the job in which this process runs.

    Args:
        log_dir: directory of the logs, which the nodes share.
        config: see `SlurmSchedulerConfig`.
        commands: Slurm's.
    """

    def __init__(
        self, log_dir: Path, config: SlurmSchedulerConfig | None = None, commands: Commands | None = None
    ) -> None:
        config = config or SlurmSchedulerConfig()
        super().__init__(log_dir, config, SlurmNodes(config, commands))


def _resolved(address: str) -> str:
    try:
        return socket.gethostbyname(address)
    except OSError:
        return address
