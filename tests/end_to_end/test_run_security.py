"""What others on the machines of a run can see of it and do to it, while it goes on: by its keys, files and ports.

One run for each launcher, on a real cluster for those of several nodes. The run is a trainer of two ranks and a server,
weights by broadcast, so every kind of port that a run has is open.
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
class Going:
    """A run that goes on."""

    kind: str
    run_dir: Path
    roots: list[Path]
    """Where it, its cluster and their temporary files are."""
    ask: Callable[..., str]
    """A command of the cluster."""
    processes: list[psutil.Process] = field(default_factory=list)
    """The launcher and all that runs on the machines for it; what belongs to the cluster itself is not among them."""

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
        """Who listens where."""
        found = {}
        for process in self.processes:
            with suppress(psutil.NoSuchProcess):
                for connection in process.net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN:
                        found[connection.laddr.ip, connection.laddr.port] = " ".join(process.cmdline()[:4])
        return found


@contextmanager
def _cluster(kind: str) -> Iterator[tuple[dict[str, str], list[str], list[Path], Callable[..., str]]]:
    """Variables that name the cluster, settings of the launcher, directories of the cluster, and its commands."""
    if kind == "slurm":
        with slurm() as cluster:
            settings = ["launcher.options.nodes=2", "launcher.options.poll_seconds=0.5"]
            yield cluster.environment, settings, [cluster.directory], cluster.run
    elif kind == "ray":
        with ray(nodes=2, cpus=2) as cluster:
            yield cluster.environment, [], [cluster.directory], lambda: ""
    else:
        yield {}, [], [], lambda: ""


def _of_the_run(going: Going) -> list[psutil.Process]:
    """A launcher on its own machine has started all; elsewhere agents have."""
    launcher = psutil.Process(going.value("status")["pid"])
    if going.kind == "local":
        return [launcher, *launcher.children(recursive=True)]
    agents = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            line = process.cmdline()
            if (
                "rl_launchers.cluster.node_agent" in line
                and str(going.run_dir / "logs") in line
                and "srun" not in line[0]
            ):
                agents.append(process)
    below = [child for agent in agents for child in agent.children(recursive=True)]
    return [launcher, *{process.pid: process for process in (*agents, *below)}.values()]


CLUSTERS = [pytest.param(kind, marks=pytest.mark.nightly) for kind in ("slurm", "ray")]


@pytest.fixture(scope="module", params=["local", *CLUSTERS])
def going(request, tmp_path_factory) -> Iterator[Going]:
    """Each kind of launcher, in the middle of a run."""
    kind = request.param
    model = make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, hidden=32)
    with tempfile.TemporaryDirectory(prefix="rl-seen-") as own, _cluster(kind) as (variables, settings, roots, ask):
        run_dir, temporary = Path(own) / "run", Path(own) / "tmp"
        temporary.mkdir()
        settings += [
            f"launcher={kind}",
            "allocation=embedded:d1+fsdp:d2",
            "publish.route=broadcast",
            "total_steps=100000",
        ]
        settings += [f"model.path={model}", f"run_dir={run_dir}", "data.batch_size=4", "evaluation.rows=0"]
        settings += ["recipe=embedded", "cluster.device=cpu", "recover.every=10"]
        environment = os.environ | variables | {"TMPDIR": str(temporary)}
        with (Path(own) / "said").open("w") as said:
            command = subprocess.Popen([COMMAND, *settings], env=environment, stdout=said, stderr=subprocess.STDOUT)
        found = Going(kind, run_dir, [Path(own), *roots], ask)
        try:
            deadline = time.monotonic() + 400
            while found.steps() < 12:  # with a recover point
                assert command.poll() is None, (Path(own) / "said").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.2)
            found.processes = _of_the_run(found)
            yield found
        finally:
            subprocess.run([RL, "stop", "--now", str(run_dir)], check=False, timeout=200)
            command.terminate()
            command.wait(60)


def _carriers(needle: str, roots: list[Path]) -> dict[Path, int]:
    """Files in which a text is, and who may do what with them."""
    found = {}
    for path in (path for root in roots for path in root.rglob("*")):
        with suppress(OSError):
            if path.is_file() and not path.is_symlink() and needle.encode() in path.read_bytes():
                found[path] = stat.S_IMODE(path.stat().st_mode)
    return found


def test_carriers_finds_what_it_looks_for(tmp_path):
    for name, mode in (("open", 0o644), ("mine", 0o600)):
        (tmp_path / name).write_text("a-secret-of-the-run")
        (tmp_path / name).chmod(mode)
    assert _carriers("secret", [tmp_path]) == {tmp_path / "open": 0o644, tmp_path / "mine": 0o600}


def test_keys_are_in_no_command_and_no_file_that_others_can_read(going):
    secrets = [going.key()]
    agents_files = list((going.run_dir / "logs").glob(".agents-*"))
    secrets += [json.loads(file.read_text())["agents"] for file in agents_files]
    assert len(secrets) == (1 if going.kind == "local" else 2)

    lines = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            lines[process.pid] = process.cmdline()
    assert len(lines) > 5
    for secret in secrets:
        assert [line for line in lines.values() if any(secret in word for word in line)] == []
        found = _carriers(secret, [*going.roots, Path("/dev/shm")])
        assert {path: oct(mode) for path, mode in found.items() if mode & 0o077} == {}
        assert set(found) <= set(agents_files), "the file of the agents is the only one"


def test_key_is_in_the_environment_of_workers_alone(going):
    key, workers = going.key(), going.workers()
    below = {process.pid for worker in workers.values() for process in [worker, *worker.children(recursive=True)]}
    holders = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if key in " ".join(process.environ().values()):
                holders.add(process.pid)
    assert {worker.pid for worker in workers.values()} <= holders <= below


def test_slurm_knows_no_key(going):
    if going.kind != "slurm":
        pytest.skip("needs a job of Slurm")
    job = json.loads((going.run_dir / "slurm" / "job.json").read_text())["job"]
    shown = [going.ask("scontrol", "show", "job", "-dd", job), going.ask("scontrol", "show", "step", job)]
    shown += [
        going.ask("scontrol", "write", "batch_script", job, "-"),
        (going.run_dir / "slurm" / "job.sh").read_text(),
    ]
    assert str(going.run_dir) in shown[2]
    assert [text for text in shown if going.key() in text] == []
    handed_in = list(going.roots[1].glob(f"state/hash.*/job.{job}/environment"))  # what sbatch exported
    assert len(handed_in) == 1
    assert RUN_KEY_VARIABLE.encode() not in handed_in[0].read_bytes()


def test_ray_knows_no_key(going):
    if going.kind != "ray":
        pytest.skip("needs a cluster of Ray")
    program = "import ray\nfrom ray._private.state import state\nray.init(log_to_driver=False)\n"
    program += "print(state.actor_table(None), state.job_table(), state.placement_group_table())"
    variables = os.environ | _cluster_variables(going)
    said = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True)
    assert "NodeAgent" in said.stdout
    assert going.key() not in said.stdout + said.stderr


def _cluster_variables(going: Going) -> dict[str, str]:
    """Those by which the launcher found its cluster."""
    return {k: v for k, v in psutil.Process(going.value("status")["pid"]).environ().items() if k.startswith("RAY_")}


def test_nothing_listens_beyond_loopback(going):
    ports = going.ports()
    kinds = {"launcher": 0 if going.kind == "local" else 1, "servers": 1, "store": 1, "gloo": 2}
    assert len(ports) >= sum(kinds.values()), ports
    assert {at: who for at, who in ports.items() if not ipaddress.ip_address(at[0]).is_loopback} == {}


@pytest.mark.parametrize("key", ["", "Bearer wrong", "Bearer "])
def test_control_endpoints_of_servers_refuse_a_missing_or_wrong_key(going, key):
    (server,) = (worker for worker in going.value("workers") if worker["name"] == "rollout-0")
    for path in (*CONTROL, "generate", "score"):
        connection = http.client.HTTPConnection(server["host"], server["port"], timeout=30)
        connection.request("POST", f"/{path}", b"{}", {"Authorization": key} if key else {})
        assert connection.getresponse().status == 401, path
        connection.close()
    assert going.workers()["rollout-0"].is_running()


def test_launchers_port_refuses_who_does_not_know_the_secret(going):
    launcher = going.value("status")["pid"]
    ports = [c.laddr for c in psutil.Process(launcher).net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    if going.kind == "local":
        assert ports == []
        return
    (at,) = ports
    for secret in (b"", b"wrong", going.key().encode()):  # the key of the servers opens nothing here
        with pytest.raises((AuthenticationError, EOFError, OSError)):
            Client((at.ip, at.port), authkey=secret)


SILENCE = 0.1
"""Seconds for which a port is heard that may say nothing; what it does with what it was sent is seen later."""


class Bomb:
    """Whoever unpickles it makes a file."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self):
        return os.mknod, (str(self._marker),)


def test_pickles_that_are_sent_to_every_port_are_not_executed(going, tmp_path):
    """Bare, behind a length as `multiprocessing` sends them, and as the body of requests."""
    bomb = pickle.dumps(Bomb(tmp_path / "executed"))
    pickle.loads(bomb)
    assert (tmp_path / "executed").exists()
    (tmp_path / "executed").unlink()
    before, ports = going.steps(), going.ports()
    key, asked = going.key(), 0
    (server,) = (worker for worker in going.value("workers") if worker["name"] == "rollout-0")
    of_server = (*CONTROL[:-2], "generate", "score")
    for host, port in ports:
        for load in (bomb, struct.pack("!i", len(bomb)) + bomb, struct.pack("<q", len(bomb)) + bomb):
            with suppress(OSError), socket.create_connection((host, port), 10) as peer:
                peer.settimeout(SILENCE)
                peer.sendall(load)
                peer.shutdown(socket.SHUT_WR)
                peer.recv(1 << 16)
        speaks = port == server["port"]  # it has others, for weights
        for path in of_server if speaks else ("generate",):
            with suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection(host, port, timeout=10 if speaks else SILENCE)
                headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/python-pickle"}
                connection.request("POST", f"/{path}", bomb, headers)
                assert connection.getresponse().status >= 400
                connection.close()
                asked += speaks
    assert len(ports) >= 4
    assert asked == len(of_server), "the server answers each request"
    deadline = time.monotonic() + 120
    while going.steps() <= before + 1:
        assert time.monotonic() < deadline, "the run stands still"
        time.sleep(0.2)
    assert not (tmp_path / "executed").exists()


def test_run_that_is_stopped_saves_its_step_and_leaves_no_process_and_no_port(going):
    """The last thing that is done to each run."""
    sockets = {socket for port, socket in _listening() if port in {port for _, port in going.ports()}}
    assert len(sockets) >= 4

    done = subprocess.run([RL, "stop", str(going.run_dir)], capture_output=True, text=True, check=False, timeout=200)

    assert done.returncode == 0, done.stderr
    assert f"The same command resumes after step {going.steps()}" in done.stdout
    assert last_recovery_checkpoint(going.run_dir / "recover") == going.steps()
    _, left = psutil.wait_procs(going.processes, timeout=60)
    assert left == []
    assert [port for port, socket in _listening() if socket in sockets] == []
    assert list((going.run_dir / "logs").glob(".agents-*")) == []


def _listening() -> list[tuple[int, str]]:
    """Port and inode of all sockets that listen: other programs take a port that is free again."""
    rows = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]]
    return [(int(row[1].rpartition(":")[2], 16), row[9]) for row in rows if row[3] == "0A"]
