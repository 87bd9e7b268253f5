"""Run a real Slurm of several nodes on this machine, for tests and experiments.

    python infra/clusters/slurm.py start DIR [--nodes 4] [--cores 2] [--gpus 0] [--lost-after 10]
    export SLURM_CONF=DIR/slurm.conf       # then sinfo, sbatch, srun, squeue, scancel work
    python infra/clusters/slurm.py kill-node DIR node2     # kills all its processes, which simulates a power failure
    python infra/clusters/slurm.py revive DIR node2
    python infra/clusters/slurm.py stop DIR
    python infra/clusters/slurm.py install                 # installs the packages only

Needs root. `start` installs the packages of Debian if they are missing.

A cluster is one controller, one slurmd per node with a separate port, and munge with a separate key and socket. So
several clusters can run at the same time, and a Slurm of the system is not affected. In jobs, TMPDIR is
`DIR/tmp/<node>`.

Partitions are `all` (the default), `front` (the first half of the nodes), `back` (the second half), and `urgent` (all
nodes). Jobs of `urgent` preempt other jobs, which Slurm then requeues. As on many clusters, there is no accounting:
`sacct` does not work, and Slurm forgets a job `--forget-after` seconds after its end.

`--gpus` adds fake GPUs: Slurm schedules them, but no process can compute on them.
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
"""Time limit in seconds for a start, for the return of a node, and for killing processes."""
POLL_INTERVAL = 0.1
"""Seconds between two checks of a condition."""
MARK = "RL_SLURM_CLUSTER"
"""Environment variable of all daemons, which their child processes inherit; its value is `DIR:node`."""

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
# no cgroups: most containers may not use them
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
# seconds instead of the minutes of a real cluster
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
    """Size and timeouts of a cluster."""

    nodes: int = 4
    """Number of nodes; their names are `node0`, `node1` and so on."""
    cores: int = 2
    """Cores per node in the configuration of Slurm; the machine may have fewer."""
    gpus: int = 0
    """Fake GPUs per node."""
    lost_after: int = 10
    """Seconds without a response until a node counts as down (SlurmdTimeout; usually 300)."""
    grace: int = 0
    """Seconds between the signal of a preemption and the end of the job (GraceTime)."""
    kill_wait: int = 10
    """Seconds between SIGTERM and SIGKILL (KillWait; usually 30)."""
    requeue_after: int = 15
    """Seconds until a requeued job may start again (cred_expire; usually 120, minimum 5)."""
    forget_after: int = 300
    """Seconds until Slurm forgets a job that ended (MinJobAge)."""


class Cluster:
    """A Slurm cluster whose files are in one directory.

    Args:
        directory: Directory for configuration, state, logs and temporary directories of the nodes.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory).resolve()
        self.environment = {"SLURM_CONF": str(self.directory / "slurm.conf")}
        """Environment variables with which the commands of Slurm use this cluster."""

    @property
    def names(self) -> list[str]:
        """Names of the nodes."""
        return [f"node{index}" for index in range(self._state()["shape"]["nodes"])]

    def start(self, shape: Shape | None = None) -> None:
        """Stop a cluster that runs in this directory, start a new one and return when all nodes are idle.

        Raises:
            RuntimeError: The user is not root, the packages could not be installed, or the nodes were not idle within
                `DEADLINE`; then the message contains the ends of the logs.
        """
        shape = shape or Shape()
        install()
        self.stop()
        for name in ("logs", "state", "spool", "tmp"):
            shutil.rmtree(self.directory / name, ignore_errors=True)
            (self.directory / name).mkdir(parents=True)
        munge = Path(tempfile.mkdtemp(prefix="munge-"))  # the path of a socket is limited to 107 characters
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
        """Kill all jobs and daemons of the cluster and keep its files. Do nothing if no cluster runs."""
        _kill(lambda: self._processes())
        with suppress(FileNotFoundError):
            shutil.rmtree(self._state()["munge"], ignore_errors=True)

    def kill_node(self, name: str) -> None:
        """Kill all processes of a node. Slurm detects this after `lost_after` seconds."""
        _kill(lambda: self._processes(self._check_name(name)))

    def revive(self, name: str) -> None:
        """Restart a killed node and return when Slurm schedules jobs on it."""
        self.kill_node(name)
        shutil.rmtree(self.directory / "tmp" / name, ignore_errors=True)  # a diskless node loses its files
        self._daemon(name, "slurmd", "-D", "-N", name, "-f", self.environment["SLURM_CONF"])
        self._await(f"{name} to come back", lambda: dict(self.states())[name] in ("idle", "mixed", "allocated"))

    def run(self, *command: str, **options: object) -> str:
        """Run a command of Slurm and return its output; raise `CalledProcessError` if it fails."""
        environment = os.environ | self.environment
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, **options)  # type: ignore[call-overload]
        return str(done.stdout).strip()

    def states(self) -> list[tuple[str, str]]:
        """Return the name and the state of each node, such as `idle`, `mixed` or `down*`."""
        lines = self.run("sinfo", "-hN", "-p", "all", "-o", "%N %t").splitlines()
        long_names = {"mix": "mixed", "alloc": "allocated"}
        return [(name, long_names.get(state, state)) for name, state in map(str.split, lines)]

    def await_state(self, name: str, *states: str) -> None:
        """Return when a node is in one of these states."""
        self._await(f"{name} to be {' or '.join(states)}", lambda: dict(self.states())[name] in states)

    def processes(self, name: str = "") -> list[int]:
        """Return the process ids of the cluster, daemons included, or of one node."""
        return sorted(self._processes(self._check_name(name) if name else ""))

    def _configure(self, shape: Shape, munge: Path) -> None:
        controller_port, *ports = (free_port() for _ in range(shape.nodes + 1))
        gres = f" Gres=gpu:{shape.gpus}" if shape.gpus else ""
        nodes = "\n".join(
            f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs={shape.cores} RealMemory=4000"
            + gres
            for name, port in zip(self.names, ports, strict=True)
        )
        half = max(1, shape.nodes // 2)
        partitions = {"front": ",".join(self.names[:half]), "back": ",".join(self.names[half:] or self.names)}
        settings = {name: value for name, value in asdict(shape).items() if name != "nodes"} | partitions
        text = CONF.format(dir=self.directory, munge=munge, controller_port=controller_port, nodes=nodes, **settings)
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
        environment.pop("TMPDIR", None)  # the task prolog sets it per node
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
        """Return the daemons and jobs of this cluster or node, with all their descendants."""
        conf, marks = self.environment["SLURM_CONF"], (f"{MARK}={self.directory}:", f"{MARK}={self.directory}:{name}")
        parents: dict[int, int] = {}
        pids: set[int] = set()
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
                    pids.add(pid)
        while children := {pid for pid, parent in parents.items() if parent in pids} - pids:
            pids |= children
        return pids - {os.getpid()}

    def _await(self, description: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE
        while True:
            with suppress(subprocess.CalledProcessError):  # the controller does not respond yet
                if condition():
                    return
            if time.monotonic() > deadline:
                logs = sorted((self.directory / "logs").glob("*"))
                tails = "\n".join(f"{log.name}: ...{log.read_text(errors='replace')[-600:]}" for log in logs)
                raise RuntimeError(f"waited {DEADLINE:g} s for {description}. Logs in {self.directory}/logs:\n{tails}")
            time.sleep(POLL_INTERVAL)

    def _check_name(self, name: str) -> str:
        if name not in self.names:
            raise RuntimeError(f"there is no node {name!r}; the nodes are {', '.join(self.names)}.")
        return name

    def _state(self) -> dict:  # type: ignore[type-arg]
        state: dict = json.loads((self.directory / "cluster.json").read_text())  # type: ignore[type-arg]
        return state


def install() -> None:
    """Install Slurm and munge if they are missing.

    Raises:
        RuntimeError: The user is not root, or apt-get is missing or failed; then the message contains its output.
    """
    if os.geteuid() != 0:
        raise RuntimeError("the daemons and packages of Slurm need root; run this as root.")
    if all(shutil.which(program) for program in ("slurmctld", "slurmd", "munged")):
        return
    if not shutil.which("apt-get"):
        raise RuntimeError(f"there is no apt-get to install {', '.join(PACKAGES)}; install them and try again.")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    lock = f"DPkg::Lock::Timeout={DEADLINE:g}"  # another process may be installing
    install_command = ["apt-get", "-o", lock, "install", "-y", "-q", "--no-install-recommends", *PACKAGES]
    for command in (install_command, ["apt-get", "update", "-q"], install_command):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        if done.returncode == 0 and command is install_command:
            return
    raise RuntimeError(f"{' '.join(install_command)} failed:\n{done.stderr[-2000:]}")


@contextmanager
def running(directory: Path, shape: Shape | None = None) -> Iterator[Cluster]:
    """Run a cluster inside the context."""
    cluster = Cluster(directory)
    cluster.start(shape)
    try:
        yield cluster
    finally:
        cluster.stop()


def _has(variables: list[str], prefix: str) -> bool:
    return any(variable.startswith(prefix) for variable in variables)


def _kill(processes: Callable[[], set[int]]) -> None:
    """Send SIGKILL until no process remains; new processes may start in between."""
    deadline = time.monotonic() + DEADLINE
    while pids := processes():
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes survived SIGKILL for {DEADLINE:g} s: {sorted(pids)}")
        time.sleep(POLL_INTERVAL / 2)


def main() -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser("start", help="start a cluster and wait until it is idle")
    start.add_argument("directory", type=Path)
    for name, value in asdict(Shape()).items():
        start.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help=f"default {value}")
    commands.add_parser("install", help="install Slurm and munge if they are missing")
    commands.add_parser("stop", help="kill the jobs and daemons of the cluster").add_argument("directory", type=Path)
    for name, text in (("kill-node", "kill all processes of a node"), ("revive", "restart a killed node")):
        node_command = commands.add_parser(name, help=text)
        node_command.add_argument("directory", type=Path)
        node_command.add_argument("name")
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
