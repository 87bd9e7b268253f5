"""A real Slurm of several nodes on this one machine, for tests and for trying things out. Needs root, and Debian's
packages, which it installs.

    python infra/clusters/slurm.py start DIR [--nodes 4] [--cores 2] [--gpus 0] [--lost-after 10]
    export SLURM_CONF=DIR/slurm.conf       # then sinfo, sbatch, srun, squeue, scancel work
    python infra/clusters/slurm.py kill-node DIR node2     # its slurmd and everything below it, as a power cut would
    python infra/clusters/slurm.py revive DIR node2
    python infra/clusters/slurm.py stop DIR
    python infra/clusters/slurm.py install                 # the packages alone

One controller, and a slurmd per node on a port of its own; munge with a key and a socket of its own, so that several
clusters stand side by side and nothing of the system's is touched. Each node has its own temporary directory (TMPDIR is
`DIR/tmp/<node>` in all that runs there). Partitions: `all` (the default), `front` and `restore` (the first and the
second half of the nodes), and `urgent`, all nodes, whose jobs preempt those of the others, which are requeued. There is
no accounting, as on many clusters: no `sacct`, and a job that ended is forgotten after `--forget-after` seconds.

GPUs are made up (`--gpus`): Slurm counts and hands them out, but nothing can compute on them.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rl_contracts.testing.processes import free_port

PACKAGES = ("slurm-wlm", "munge")
DEADLINE = 120.0
"""Seconds within which the cluster must stand, a node come back, or everything be gone."""
LOOK_EVERY = 0.1
"""Seconds between two looks at what is waited for."""
MARK = "RL_SLURM_CLUSTER"
"""Variable in the environment of all daemons, and so of what they start: `DIR:node`."""

CONF = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={munge}/socket,cred_expire={requeue_after}
CredType=cred/munge
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool/%n
SlurmctldPidFile={dir}/slurmctld.pid
SlurmdPidFile={dir}/slurmd.%n.pid
SlurmctldLogFile={dir}/logs/slurmctld.log
SlurmdLogFile={dir}/logs/slurmd.%n.log
TaskProlog={dir}/task_prolog.sh
# no cgroups, which containers seldom may use
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
# what takes minutes on a cluster takes seconds here
SlurmdTimeout={lost_after}
KillWait={kill_wait}
MinJobAge={forget_after}
MessageTimeout=10
BatchStartTimeout=20
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
{nodes}
PartitionName=DEFAULT State=UP MaxTime=INFINITE PriorityTier=1 GraceTime={grace}
PartitionName=all Nodes=ALL Default=YES
PartitionName=front Nodes={front}
PartitionName=back Nodes={back}
PartitionName=urgent Nodes=ALL PriorityTier=2
"""

TASK_PROLOG = """\
#!/bin/sh
mkdir -p "{dir}/tmp/$SLURMD_NODENAME"
echo "export TMPDIR={dir}/tmp/$SLURMD_NODENAME"
"""


@dataclass(frozen=True)
class Shape:
    """What a cluster is made of."""

    nodes: int = 4
    """Nodes, `node0` and on."""
    cores: int = 2
    """Cores per node, as Slurm counts them; the machine may have fewer."""
    gpus: int = 0
    """Made-up GPUs per node."""
    lost_after: int = 10
    """Seconds without an answer after which a node is down (SlurmdTimeout; 300 is usual)."""
    grace: int = 0
    """Seconds between the news of a preemption and its effect (GraceTime)."""
    kill_wait: int = 10
    """Seconds between SIGTERM and SIGKILL (KillWait; 30 is usual)."""
    requeue_after: int = 15
    """Seconds that a requeued job waits before it starts again (cred_expire; 120 is usual, 5 the least)."""
    forget_after: int = 300
    """Seconds for which jobs that ended are known (MinJobAge)."""


class Cluster:
    """A Slurm whose files are in one directory.

    Args:
        directory: of configuration, state, logs and the nodes' temporary directories.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory).resolve()
        self.environment = {"SLURM_CONF": str(self.directory / "slurm.conf")}
        """What a process needs in its environment so that Slurm's commands speak to this cluster."""

    @property
    def names(self) -> list[str]:
        """The nodes' names."""
        return [f"node{index}" for index in range(self._state()["shape"]["nodes"])]

    def start(self, shape: Shape | None = None) -> None:
        """Start everything and return when all nodes are idle. What ran here before is ended first.

        Raises:
            RuntimeError: no root, packages that cannot be installed, or a cluster that does not stand in time; with the
                last lines of the logs.
        """
        shape = shape or Shape()
        install()
        self.stop()
        for name in ("logs", "state", "spool", "tmp"):
            shutil.rmtree(self.directory / name, ignore_errors=True)
            (self.directory / name).mkdir(parents=True)
        munge = Path(tempfile.mkdtemp(prefix="munge-"))  # the path of a socket may have 107 letters
        state = {"munge": str(munge), "shape": asdict(shape)}
        (self.directory / "cluster.json").write_text(json.dumps(state))
        self._configure(shape, munge)
        try:
            self._start_munge(munge)
            self._daemon("controller", "slurmctld", "-D", "-i", "-f", self.environment["SLURM_CONF"])
            for name in self.names:
                self._daemon(name, "slurmd", "-D", "-N", name, "-f", self.environment["SLURM_CONF"])
            self._await("all nodes to be idle", lambda: [s for _, s in self.states()] == ["idle"] * shape.nodes)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End everything that runs in the cluster, and the cluster. Files stay. A cluster that is gone is fine."""
        _kill(lambda: self._processes())
        with suppress(FileNotFoundError):
            shutil.rmtree(self._state()["munge"], ignore_errors=True)

    def kill_node(self, name: str) -> None:
        """Kill a node's slurmd and everything below it at once. Slurm notices after `lost_after` seconds."""
        _kill(lambda: self._processes(self._known(name)))

    def revive(self, name: str) -> None:
        """Start a killed node again, and return when Slurm takes jobs for it."""
        self.kill_node(name)
        shutil.rmtree(self.directory / "tmp" / name, ignore_errors=True)  # as after a power cut of a diskless node
        self._daemon(name, "slurmd", "-D", "-N", name, "-f", self.environment["SLURM_CONF"])
        self._await(f"{name} to come back", lambda: dict(self.states())[name] in ("idle", "mixed", "allocated"))

    def run(self, *command: str, **options: object) -> str:
        """The output of one of Slurm's commands; a `CalledProcessError` where it fails."""
        environment = os.environ | self.environment
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, **options)  # type: ignore[call-overload]
        return str(done.stdout).strip()

    def states(self) -> list[tuple[str, str]]:
        """Name and state of each node, such as `idle`, `mixed`, `down*`."""
        lines = self.run("sinfo", "-hN", "-p", "all", "-o", "%N %t").splitlines()
        short = {"mix": "mixed", "alloc": "allocated"}
        return [(name, short.get(state, state)) for name, state in map(str.split, lines)]

    def await_state(self, name: str, *states: str) -> None:
        """Return when a node is in one of these states."""
        self._await(f"{name} to be {' or '.join(states)}", lambda: dict(self.states())[name] in states)

    def processes(self, name: str = "") -> list[int]:
        """Ids of what runs in the cluster, its daemons included; or of one node's only."""
        return sorted(self._processes(self._known(name) if name else ""))

    def _configure(self, shape: Shape, munge: Path) -> None:
        controller_port, *ports = (free_port() for _ in range(shape.nodes + 1))
        gres = f" Gres=gpu:{shape.gpus}" if shape.gpus else ""
        nodes = "\n".join(
            f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs={shape.cores} RealMemory=4000"
            + gres
            for name, port in zip(self.names, ports, strict=True)
        )
        half = max(1, shape.nodes // 2)
        parts = {"front": ",".join(self.names[:half]), "back": ",".join(self.names[half:] or self.names)}
        text = CONF.format(
            dir=self.directory, munge=munge, controller_port=controller_port, nodes=nodes, **parts, **_numbers(shape)
        )
        (self.directory / "slurm.conf").write_text(text)
        files = "".join(f"NodeName={','.join(self.names)} Name=gpu File=/dev/tty{i}\n" for i in range(shape.gpus))
        (self.directory / "gres.conf").write_text(files)
        prolog = self.directory / "task_prolog.sh"
        prolog.write_text(TASK_PROLOG.format(dir=self.directory))
        prolog.chmod(0o755)

    def _start_munge(self, munge: Path) -> None:
        key = munge / "key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        munge.chmod(0o711)
        files = {"key-file": key, "socket": munge / "socket", "pid-file": munge / "pid", "log-file": munge / "log"}
        options = [f"--{name}={path}" for name, path in {**files, "seed-file": munge / "seed"}.items()]
        self._daemon("munge", "munged", "--foreground", "--num-threads=2", *options)
        self._await("munge", (munge / "socket").exists)

    def _daemon(self, name: str, *command: str) -> None:
        """Start a daemon that outlives this program."""
        environment = os.environ | self.environment | {MARK: f"{self.directory}:{name}"}
        environment.pop("TMPDIR", None)  # a node has its own
        for inherited in [variable for variable in environment if variable.startswith(("SLURM_", "SLURMD_"))]:
            if inherited not in self.environment:
                del environment[inherited]
        with (self.directory / "logs" / f"{name}.out").open("ab") as log:
            subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                start_new_session=True,
            )

    def _processes(self, name: str = "") -> set[int]:
        """What carries the mark of this cluster or node, or that of a job on it, and all descendants."""
        conf, marks = self.environment["SLURM_CONF"], (f"{MARK}={self.directory}:", f"{MARK}={self.directory}:{name}")
        parents: dict[int, int] = {}
        found: set[int] = set()
        for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
            with suppress(OSError, ValueError, IndexError):
                text = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                if text[0] == "Z":
                    continue
                parents[pid] = int(text[1])
                variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
                on_node = f"SLURMD_NODENAME={name}" in variables or (not name and _has(variables, "SLURMD_NODENAME="))
                of_job = f"SLURM_CONF={conf}" in variables and on_node
                marked = marks[1] in variables if name else _has(variables, marks[0])
                if of_job or (marked and not _has(variables, "SLURMD_NODENAME=")):
                    found.add(pid)
        while grown := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= grown
        return found - {os.getpid()}

    def _await(self, what: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE
        while True:
            with suppress(subprocess.CalledProcessError):  # the controller does not answer yet
                if holds():
                    return
            if time.monotonic() > deadline:
                logs = sorted((self.directory / "logs").glob("*"))
                tails = "\n".join(f"{log.name}: ...{log.read_text(errors='replace')[-600:]}" for log in logs)
                raise RuntimeError(f"waited {DEADLINE:g} s for {what}. Logs in {self.directory}/logs:\n{tails}")
            time.sleep(LOOK_EVERY)

    def _known(self, name: str) -> str:
        if name not in self.names:
            raise RuntimeError(f"no node {name!r}; there are {', '.join(self.names)}.")
        return name

    def _state(self) -> dict:  # type: ignore[type-arg]
        found: dict = json.loads((self.directory / "cluster.json").read_text())  # type: ignore[type-arg]
        return found


def install() -> None:
    """Install Slurm and munge where they are missing.

    Raises:
        RuntimeError: not root, or apt-get cannot; says what it said.
    """
    if os.geteuid() != 0:
        raise RuntimeError("expected root, for Slurm's daemons and its packages; found another user.")
    if all(shutil.which(program) for program in ("slurmctld", "slurmd", "munged")):
        return
    if not shutil.which("apt-get"):
        raise RuntimeError(f"expected Debian's apt-get, to install {', '.join(PACKAGES)}; install them and try again.")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    lock = f"DPkg::Lock::Timeout={DEADLINE:g}"  # others may be installing, too
    order = ["apt-get", "-o", lock, "install", "-y", "-q", "--no-install-recommends", *PACKAGES]
    for command in (order, ["apt-get", "update", "-q"], order):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        if done.returncode == 0 and command is order:
            return
    raise RuntimeError(f"{' '.join(order)} failed:\n{done.stderr[-2000:]}")


@contextmanager
def running(directory: Path, shape: Shape | None = None) -> Iterator[Cluster]:
    """A cluster that stands for the length of a `with` block."""
    cluster = Cluster(directory)
    cluster.start(shape)
    try:
        yield cluster
    finally:
        cluster.stop()


def _numbers(shape: Shape) -> dict[str, int]:
    return {name: value for name, value in asdict(shape).items() if name != "nodes"}


def _has(variables: list[str], prefix: str) -> bool:
    return any(variable.startswith(prefix) for variable in variables)


def _kill(processes: Callable[[], set[int]]) -> None:
    """SIGKILL until none is left, also of those that are born meanwhile."""
    deadline = time.monotonic() + DEADLINE
    while left := processes():
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes outlived SIGKILL: {sorted(left)}")
        time.sleep(LOOK_EVERY / 2)


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser("start", help="start a cluster and wait until it is idle")
    start.add_argument("directory", type=Path)
    for name, value in asdict(Shape()).items():
        start.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help=f"default {value}")
    commands.add_parser("install", help="install Slurm and munge where they are missing")
    commands.add_parser("stop", help="end it and what runs in it").add_argument("directory", type=Path)
    for name in ("kill-node", "revive"):
        one = commands.add_parser(name)
        one.add_argument("directory", type=Path)
        one.add_argument("name")
    arguments = vars(parser.parse_args())
    command, cluster = arguments.pop("command"), Cluster(arguments.pop("directory", Path()))
    try:
        if command == "install":
            install()
        elif command == "start":
            cluster.start(Shape(**arguments))
            print(f"export SLURM_CONF={cluster.environment['SLURM_CONF']}")
        elif command == "stop":
            cluster.stop()
        else:
            getattr(cluster, command.replace("-", "_"))(arguments["name"])
    except RuntimeError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
