"""Access of other users and processes to the keys, files and ports of a run.

The tests use one run per launcher; Slurm and Ray are real clusters of two nodes. A run has two trainer ranks, a server
and weights by broadcast, so that every kind of port of a run is open.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import pickle
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path

import psutil
import pytest
from ray_cluster import ray
from slurm_cluster import slurm

from rl_contracts.runtime.run_files import last_recovery_checkpoint
from rl_contracts.scheduler import RUN_KEY_VARIABLE
from rl_contracts.testing.models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
COMMAND = Path(sys.executable).parent / "gsm8k-grpo"
RL = COMMAND.with_name("rl")
CONTROL = ("stage_weights", "pause_generation", "commit_weights", "continue_generation", "shutdown", "abort_request")


@dataclass
class RunInProgress:
    """A run in progress and its processes."""

    kind: str
    run_dir: Path
    roots: list[Path]
    """Directories of the run, its cluster and their temporary files."""
    cluster_command: Callable[..., str]
    """Function that runs a command of the cluster and returns its output."""
    processes: list[psutil.Process] = field(default_factory=list)
    """The launcher, node agents and workers, without processes of the cluster."""

    def value(self, name: str) -> object:
        return json.loads((self.run_dir / "names" / name / "=value").read_text())

    def workers(self) -> dict[str, psutil.Process]:
        return {worker["name"]: psutil.Process(worker["pid"]) for worker in self.value("workers")}

    def key(self) -> str:
        return self.workers()["actor-0"].environ()[RUN_KEY_VARIABLE]

    def steps(self) -> int:
        metrics = self.run_dir / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def ports(self) -> dict[tuple[str, int], str]:
        """Map each listening (IP address, port) to the command of its process."""
        commands = {}
        for process in self.processes:
            with suppress(psutil.NoSuchProcess):
                for connection in process.net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN:
                        commands[connection.laddr.ip, connection.laddr.port] = " ".join(process.cmdline()[:4])
        return commands


@contextmanager
def _cluster(kind: str) -> Iterator[tuple[dict[str, str], list[str], list[Path], Callable[..., str]]]:
    """Start a cluster.

    Yields its environment variables, settings of the launcher, directories, and a function that runs its commands.
    """
    if kind == "slurm":
        with slurm() as cluster:
            yield cluster.environment, ["cluster.nodes=2"], [cluster.directory], cluster.run
    elif kind == "ray":
        with ray(nodes=2, cpus=2) as cluster:
            yield cluster.environment, [], [cluster.directory], lambda: ""
    else:
        yield {}, [], [], lambda: ""


def _processes_of_run(run: RunInProgress) -> list[psutil.Process]:
    """Return the launcher and its child processes, or on a cluster the node agents and their child processes."""
    launcher = psutil.Process(run.value("status")["pid"])
    if run.kind == "local":
        return [launcher, *launcher.children(recursive=True)]
    agents = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            line = process.cmdline()
            if (
                "rl_launchers.cluster.node_agent" in line
                and str(run.run_dir / "logs") in line
                and "srun" not in line[0]
            ):
                agents.append(process)
    below = [child for agent in agents for child in agent.children(recursive=True)]
    return [launcher, *{process.pid: process for process in (*agents, *below)}.values()]


CLUSTERS = [pytest.param(kind, marks=pytest.mark.nightly) for kind in ("slurm", "ray")]


@pytest.fixture(scope="module", params=["local", *CLUSTERS])
def run(request, tmp_path_factory) -> Iterator[RunInProgress]:
    """A run after twelve steps, with each kind of launcher."""
    kind = request.param
    model = make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, hidden=32)
    with (
        tempfile.TemporaryDirectory(prefix="rl-security-") as base,
        _cluster(kind) as (variables, settings, roots, cluster_command),
    ):
        run_dir, temporary = Path(base) / "run", Path(base) / "tmp"
        temporary.mkdir()
        settings += [
            f"launcher={kind}",
            "allocation=embedded:d1+fsdp:d2",
            "publish.route=broadcast",
            "total_steps=100000",
        ]
        settings += [f"model.path={model}", f"run_dir={run_dir}", "data.batch_size=4", "evaluation.examples=0"]
        settings += ["recipe=embedded", "cluster.device=cpu", "recover.every=10"]
        environment = os.environ | variables | {"TMPDIR": str(temporary)}
        with (Path(base) / "output").open("w") as output:
            command = subprocess.Popen([COMMAND, *settings], env=environment, stdout=output, stderr=subprocess.STDOUT)
        run = RunInProgress(kind, run_dir, [Path(base), *roots], cluster_command)
        try:
            deadline = time.monotonic() + 400
            while run.steps() < 12:  # a recovery checkpoint exists after step 10
                assert command.poll() is None, (Path(base) / "output").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.2)
            run.processes = _processes_of_run(run)
            yield run
        finally:
            subprocess.run([RL, "stop", "--now", str(run_dir)], check=False, timeout=200)
            command.terminate()
            command.wait(60)


def _files_with(text: str, roots: list[Path]) -> dict[Path, int]:
    """Return the mode of each file that contains a text."""
    modes = {}
    for path in (path for root in roots for path in root.rglob("*")):
        with suppress(OSError):
            if path.is_file() and not path.is_symlink() and text.encode() in path.read_bytes():
                modes[path] = stat.S_IMODE(path.stat().st_mode)
    return modes


def test_files_with_text_returns_their_modes(tmp_path):
    for name, mode in (("open", 0o644), ("private", 0o600)):
        (tmp_path / name).write_text("a-secret-of-the-run")
        (tmp_path / name).chmod(mode)
    assert _files_with("secret", [tmp_path]) == {tmp_path / "open": 0o644, tmp_path / "private": 0o600}


@pytest.mark.guarantee("Keys are in no command line and in no file that other users can read.", area="boundaries")
def test_keys_are_in_no_command_line_and_no_readable_file(run):
    secrets = [run.key()]
    agent_files = list((run.run_dir / "logs").glob(".agents-*"))
    secrets += [json.loads(file.read_text())["agents"] for file in agent_files]
    assert len(secrets) == (1 if run.kind == "local" else 2)

    lines = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            lines[process.pid] = process.cmdline()
    assert len(lines) > 5
    for secret in secrets:
        assert [line for line in lines.values() if any(secret in word for word in line)] == []
        modes = _files_with(secret, [*run.roots, Path("/dev/shm")])
        assert {path: oct(mode) for path, mode in modes.items() if mode & 0o077} == {}
        assert set(modes) <= set(agent_files), "only the files of the node agents may contain a secret"


def test_key_is_only_in_environment_of_workers(run):
    key, workers = run.key(), run.workers()
    allowed = {process.pid for worker in workers.values() for process in [worker, *worker.children(recursive=True)]}
    holders = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if key in " ".join(process.environ().values()):
                holders.add(process.pid)
    assert {worker.pid for worker in workers.values()} <= holders <= allowed


def test_slurm_records_contain_no_key(run):
    if run.kind != "slurm":
        pytest.skip("needs a job of Slurm")
    job = json.loads((run.run_dir / "slurm" / "job.json").read_text())["job"]
    outputs = [
        run.cluster_command("scontrol", "show", "job", "-dd", job),
        run.cluster_command("scontrol", "show", "step", job),
    ]
    outputs += [
        run.cluster_command("scontrol", "write", "batch_script", job, "-"),
        (run.run_dir / "slurm" / "job.sh").read_text(),
    ]
    assert str(run.run_dir) in outputs[2]
    assert [text for text in outputs if run.key() in text] == []
    environment_files = list(run.roots[1].glob(f"state/hash.*/job.{job}/environment"))  # exported by sbatch
    assert len(environment_files) == 1
    assert RUN_KEY_VARIABLE.encode() not in environment_files[0].read_bytes()


def test_ray_records_contain_no_key(run):
    if run.kind != "ray":
        pytest.skip("needs a cluster of Ray")
    program = "import ray\nfrom ray._private.state import state\nray.init(log_to_driver=False)\n"
    program += "print(state.actor_table(None), state.job_table(), state.placement_group_table())"
    variables = os.environ | _cluster_variables(run)
    result = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True)
    assert "NodeAgent" in result.stdout
    assert run.key() not in result.stdout + result.stderr


def _cluster_variables(run: RunInProgress) -> dict[str, str]:
    """Return the environment variables by which the launcher finds its cluster."""
    return {k: v for k, v in psutil.Process(run.value("status")["pid"]).environ().items() if k.startswith("RAY_")}


@pytest.mark.guarantee("All ports of a run on one machine listen only on loopback.", area="boundaries")
def test_run_listens_only_on_loopback(run):
    ports = run.ports()
    kinds = {"launcher": 0 if run.kind == "local" else 1, "servers": 1, "store": 1, "gloo": 2}
    assert len(ports) >= sum(kinds.values()), ports
    assert [port for port in ports.items() if not ipaddress.ip_address(port[0][0]).is_loopback] == []


@pytest.mark.guarantee("Servers reject requests without the key of the run.", area="boundaries")
@pytest.mark.parametrize("key", ["", "Bearer wrong", "Bearer "])
def test_server_endpoints_reject_missing_or_wrong_key(run, key):
    (server,) = (worker for worker in run.value("workers") if worker["name"] == "rollout-0")
    for path in (*CONTROL, "generate", "score"):
        connection = http.client.HTTPConnection(server["host"], server["port"], timeout=30)
        connection.request("POST", f"/{path}", b"{}", {"Authorization": key} if key else {})
        assert connection.getresponse().status == 401, path
        connection.close()
    assert run.workers()["rollout-0"].is_running()


def test_launcher_port_rejects_wrong_secrets(run):
    launcher = run.value("status")["pid"]
    ports = [c.laddr for c in psutil.Process(launcher).net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    if run.kind == "local":
        assert ports == []
        return
    (address,) = ports
    for secret in (b"", b"wrong", run.key().encode()):  # the run key of the servers is not valid here
        with pytest.raises((AuthenticationError, EOFError, OSError)):
            Client((address.ip, address.port), authkey=secret)


REPLY_TIMEOUT = 0.1
"""Seconds to wait for a reply from a port that may send none."""


class FileCreatingPickle:
    """Object that creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self):
        return os.mknod, (str(self._marker),)


@pytest.mark.guarantee("No process of a run executes a pickle that is sent to one of its ports.", area="boundaries")
def test_pickles_sent_to_every_port_are_not_executed(run, tmp_path):
    """Send pickles raw, with a length prefix as in `multiprocessing`, and as request bodies."""
    payload = pickle.dumps(FileCreatingPickle(tmp_path / "executed"))
    pickle.loads(payload)
    assert (tmp_path / "executed").exists()
    (tmp_path / "executed").unlink()
    before, ports = run.steps(), run.ports()
    key, replies = run.key(), 0
    (server,) = (worker for worker in run.value("workers") if worker["name"] == "rollout-0")
    server_paths = (*CONTROL[:-2], "generate", "score")
    for host, port in ports:
        for message in (payload, struct.pack("!i", len(payload)) + payload, struct.pack("<q", len(payload)) + payload):
            with suppress(OSError), socket.create_connection((host, port), 10) as peer:
                peer.settimeout(REPLY_TIMEOUT)
                peer.sendall(message)
                peer.shutdown(socket.SHUT_WR)
                peer.recv(1 << 16)
        is_server = port == server["port"]  # the server also listens on ports for weights
        for path in server_paths if is_server else ("generate",):
            with suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection(host, port, timeout=10 if is_server else REPLY_TIMEOUT)
                headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/python-pickle"}
                connection.request("POST", f"/{path}", payload, headers)
                assert connection.getresponse().status >= 400
                connection.close()
                replies += is_server
    assert len(ports) >= 4
    assert replies == len(server_paths), "expected a response to each request to the server"
    deadline = time.monotonic() + 120
    while run.steps() <= before + 1:
        assert time.monotonic() < deadline, "the run takes no more steps"
        time.sleep(0.2)
    assert not (tmp_path / "executed").exists()


def test_stopped_run_saves_its_step_and_leaves_no_process_or_port(run):
    """Stop the run of the fixture, which only the last test of the file may do."""
    sockets = {socket for port, socket in _listening() if port in {port for _, port in run.ports()}}
    assert len(sockets) >= 4

    done = subprocess.run([RL, "stop", str(run.run_dir)], capture_output=True, text=True, check=False, timeout=200)

    assert done.returncode == 0, done.stderr
    assert f"The same command resumes after step {run.steps()}" in done.stdout
    assert last_recovery_checkpoint(run.run_dir / "recover") == run.steps()
    _, remaining = psutil.wait_procs(run.processes, timeout=60)
    assert remaining == []
    assert [port for port, socket in _listening() if socket in sockets] == []
    assert list((run.run_dir / "logs").glob(".agents-*")) == []


def _listening() -> list[tuple[int, str]]:
    """Return (port, inode) of all listening sockets; the inode differs when another program reuses a port."""
    lines = [line for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]]
    sockets = [line.split() for line in lines]
    return [(int(fields[1].rpartition(":")[2], 16), fields[9]) for fields in sockets if fields[3] == "0A"]
