"""One worker on this machine: its environment, its process, its log and the news of its end."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_contracts.errors import ConfigError
from rl_contracts.runtime.machine import bypass_proxies
from rl_contracts.scheduler import JobSpec, Worker, WorkerStatus
from rl_launchers.local.sessions import Session
from rl_launchers.supervise import exit_report
from rl_launchers.supervise.server_health import probe

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Threads of numeric libraries. Unset, every worker would start one per core of the machine."""

DEFAULTS = {
    "PYTHONUNBUFFERED": "1",  # the last lines before a SIGKILL are in the log
    "PYTHONFAULTHANDLER": "1",  # so is the stack of a crash in native code
    "GOMP_SPINCOUNT": "1000",
}
"""Variables that a worker has unless the launcher's environment sets them. OpenMP's threads spin while they wait for
each other, by default 300,000 times: with another program on one of two cores, a step of a tiny model took 1.3 s
instead of 0.04 s. With 1,000 spins it takes 0.08 s there, and still 0.04 s on idle cores."""

NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
LOOPBACK = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
"""Interface of this machine that nobody else reaches."""


def fill_in(text: str, index: int, host: str, port: int | None) -> str:
    """Replace `{index}`, `{host}` and `{port}`; all other braces stay as they are.

    Raises:
        ConfigError: `{port}` in a role whose workers have none.
    """
    if "{port}" in text and port is None:
        raise ConfigError(f"{text!r} asks for a port, but the role has none. Set needs_port=True in its JobSpec.")
    return text.replace("{index}", str(index)).replace("{host}", host).replace("{port}", str(port))


@dataclass(frozen=True)
class RankGroup:
    """The ranks of a role, and which of them are here."""

    world: int
    """Ranks in all."""
    here: tuple[int, ...]
    """Those on this machine, in order."""
    master: str = ""
    """`host:port` at which they meet; empty: at a port of this machine."""


def ranks_of(group: RankGroup, index: int, port: int, host: str) -> dict[str, str]:
    """torchrun's variables of one rank.

    Args:
        group: the ranks.
        index: which of them.
        port, host: where they meet, unless the group says it.
    """
    at = group.master.rpartition(":") if group.master else (host, "", str(port))
    return {
        "RANK": str(index),
        "LOCAL_RANK": str(group.here.index(index)),
        "WORLD_SIZE": str(group.world),
        "LOCAL_WORLD_SIZE": str(len(group.here)),
        "MASTER_ADDR": at[0],
        "MASTER_PORT": at[2],
    }


def worker_environment(
    spec: JobSpec,
    inherited: Mapping[str, str],
    index: int,
    host: str,
    port: int | None,
    ranks: Mapping[str, str],
    gpus: list[str] | None,
) -> dict[str, str]:
    """The whole environment of one worker; later sources win.

    Thread counts and other defaults, NCCL's interface where all is on loopback (it listens at another by itself), the
    inherited variables, torchrun's, hosts that are reached without a proxy, devices, `spec.env`.

    Args:
        spec: the role.
        inherited: the launcher's environment.
        index: of the worker in its role.
        host: address of this machine.
        port: the worker's own.
        ranks: torchrun's variables; empty where the role is not `spmd`.
        gpus: devices that the worker may see; None leaves that as it is.
    """
    threads = {name: str(spec.cpus) for name in THREAD_VARIABLES}
    own = {NCCL_INTERFACE: LOOPBACK} if host.startswith("127.") or host in ("localhost", "::1") else {}
    environment = {**DEFAULTS, **own, **threads, **inherited, **ranks, **bypass_proxies(inherited, host)}
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return environment | {name: fill_in(value, index, host, port) for name, value in spec.env.items()}


PROBE_SECONDS = 0.1
"""Seconds between two questions whether a worker is ready."""
STOPPED_SECONDS = 15.0
"""Seconds for which a worker that is not ready yet may be stopped by a signal. Nobody is told of a stopped process, and
nobody would look before `ready_timeout` is over."""
_EXEC_WORKER = str(Path(__file__).with_name("exec_worker.py"))


class LocalProcess:
    """A started worker. It leads a session of its own, so a Ctrl-C in the terminal does not reach it by itself.

    A thread waits for its end, so that ends are known in their order however seldom anybody asks.

    Args:
        worker: what others see of it; kept up to date by `refresh`.
        command: program and arguments.
        environment: the whole environment.
        keeper: file descriptor on which the process enlists with the keeper.
        cores: to pin it to; empty leaves it free.
        ready_path: of its readiness check; None: ready as it is.

    Raises:
        OSError: the process cannot be started, or its log cannot be written.
    """

    def __init__(
        self,
        worker: Worker,
        command: Sequence[str],
        environment: Mapping[str, str],
        keeper: int,
        cores: Sequence[str] = (),
        ready_path: str | None = None,
    ) -> None:
        self.worker = worker
        self.started_at = time.monotonic()
        self.last_answer = "it was not asked yet"
        self._end: tuple[int, float] | None = None
        self._ready = not ready_path
        with worker.log.open("ab") as log:
            self.log_start = log.tell()  # an earlier run's lines must not pass for this one's
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-S", _EXEC_WORKER, str(keeper), ",".join(cores), *command],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[keeper],
                start_new_session=True,
            )
        worker.pid = self._popen.pid
        worker.status = WorkerStatus.RUNNING if self._ready else WorkerStatus.STARTING
        self.session = Session(self._popen.pid)
        self._waiter = threading.Thread(target=self._await_end, name=f"wait-{worker.name}", daemon=True)
        self._waiter.start()
        if ready_path and worker.port is not None:  # a thread of its own, for one that is silent takes its time
            asks = threading.Thread(target=self._ask, args=(ready_path,), name=f"ask-{worker.name}", daemon=True)
            asks.start()

    def refresh(self) -> None:
        """Bring the worker's status up to date."""
        if self._ready and self.worker.status is WorkerStatus.STARTING:
            self.worker.status = WorkerStatus.RUNNING
        if self._end is not None and self.worker.exit_code is None:
            self.worker.exit_code, self.worker.ended_at = self._end
            self.worker.status = WorkerStatus.DONE if self.worker.exit_code == 0 else WorkerStatus.FAILED

    def log_tail(self, lines: int) -> str:
        """The last lines that this process wrote, behind earlier ones that name an error."""
        return exit_report.informative_tail(self.worker.log, lines, self.log_start)

    def collect(self, timeout: float) -> None:
        """Wait until the process has been reaped, so that not even a zombie is left."""
        self._waiter.join(timeout)
        self.refresh()

    def _await_end(self) -> None:
        self._end = (self._popen.wait(), time.time())

    def _ask(self, path: str) -> None:
        """Until it is ready, or has ended. Ends one that is stopped for too long."""
        worker, runs_at = self.worker, time.monotonic()
        while self._end is None and not self._ready:
            answer = probe(worker.host, worker.port or 0, path)
            self.last_answer = answer or self.last_answer
            self._ready = answer is None
            now = time.monotonic()
            runs_at = runs_at if self.session.stopped() else now
            if now - runs_at > STOPPED_SECONDS:
                worker.cause = f"was stopped by a signal for {STOPPED_SECONDS:g} s before it was ready"
                self.session.kill_leader()
                return
            time.sleep(PROBE_SECONDS)
