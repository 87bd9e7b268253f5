"""Worker process on this machine: its environment, log, readiness check and exit."""

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
"""Variables that limit the threads of numeric libraries. Without them every worker starts one thread per core."""

DEFAULTS = {
    "PYTHONUNBUFFERED": "1",  # so that the log has the last lines before a SIGKILL
    "PYTHONFAULTHANDLER": "1",  # so that the log has the stack of a crash in native code
    "GOMP_SPINCOUNT": "1000",
}
"""Environment variables that a worker gets unless the launcher's environment sets them.

`GOMP_SPINCOUNT`: OpenMP threads spin while they wait for each other, by default 300,000 times. With another program on
one of two cores, a step of a tiny model took 1.3 s instead of 0.04 s. With 1,000 spins it takes 0.08 s there, and still
0.04 s on idle cores."""

NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
LOOPBACK = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
"""Name of the loopback interface."""


def fill_in(text: str, index: int, host: str, port: int | None) -> str:
    """Replace `{index}`, `{host}` and `{port}`; keep all other braces.

    Raises:
        ConfigError: the text contains `{port}`, but the workers of the role have no port.
    """
    if "{port}" in text and port is None:
        raise ConfigError(f"{text!r} uses {{port}}, but the role has no port. Set needs_port=True in its JobSpec.")
    return text.replace("{index}", str(index)).replace("{host}", host).replace("{port}", str(port))


@dataclass(frozen=True)
class RankGroup:
    """Ranks of a role, and the subset on this machine."""

    world: int
    """Total number of ranks."""
    here: tuple[int, ...]
    """Ranks on this machine, in order."""
    master: str = ""
    """Rendezvous address `host:port`; empty for a reserved port of this machine."""


def ranks_of(group: RankGroup, index: int, port: int, host: str) -> dict[str, str]:
    """Return the environment variables that torchrun sets for one rank.

    Args:
        group: ranks of the role.
        index: rank, counted over all machines.
        port: rendezvous port, unless `group.master` is set.
        host: rendezvous host, unless `group.master` is set.
    """
    address = group.master.rpartition(":") if group.master else (host, "", str(port))
    return {
        "RANK": str(index),
        "LOCAL_RANK": str(group.here.index(index)),
        "WORLD_SIZE": str(group.world),
        "LOCAL_WORLD_SIZE": str(len(group.here)),
        "MASTER_ADDR": address[0],
        "MASTER_PORT": address[2],
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
    """Return the complete environment of one worker.

    Later sources override earlier ones: `DEFAULTS`, NCCL's interface, thread counts, `inherited`, `ranks`, hosts to
    reach without a proxy, GPUs, `spec.env`. NCCL's interface is set only if `host` is a loopback address, because NCCL
    prefers other interfaces.

    Args:
        spec: role of the worker.
        inherited: environment of the launcher.
        index: index of the worker in its role.
        host: address of this machine.
        port: port of the worker.
        ranks: variables of torchrun; empty if the role is not `spmd`.
        gpus: visible GPUs; None keeps `CUDA_VISIBLE_DEVICES` as inherited.
    """
    threads = {name: str(spec.cpus) for name in THREAD_VARIABLES}
    interface = {NCCL_INTERFACE: LOOPBACK} if host.startswith("127.") or host in ("localhost", "::1") else {}
    environment = {**DEFAULTS, **interface, **threads, **inherited, **ranks, **bypass_proxies(inherited, host)}
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return environment | {name: fill_in(value, index, host, port) for name, value in spec.env.items()}


PROBE_SECONDS = 0.1
"""Seconds between two readiness checks of a worker."""
STOPPED_SECONDS = 15.0
"""Seconds for which a signal such as SIGSTOP may stop a worker before it is ready. A parent process gets no notice of a
stopped child, so without this limit the stop would be noticed only after `ready_timeout`."""
_EXEC_WORKER = str(Path(__file__).with_name("exec_worker.py"))


class LocalProcess:
    """Process of a started worker. It leads a separate session, so Ctrl-C in the terminal does not signal it directly.

    A thread waits for the end of the process, so that the order of several ends is known even between rare polls.

    Args:
        worker: public state of the process; `refresh` updates it.
        command: program and arguments.
        environment: complete environment.
        reaper: file descriptor on which the process registers with the reaper.
        ready_path: URL path of the readiness check; None if the worker is ready once started.

    Raises:
        OSError: the process cannot be started, or its log cannot be written.
    """

    def __init__(
        self,
        worker: Worker,
        command: Sequence[str],
        environment: Mapping[str, str],
        reaper: int,
        ready_path: str | None = None,
    ) -> None:
        self.worker = worker
        self.started_at = time.monotonic()
        self.last_answer = "not checked yet"
        self._end: tuple[int, float] | None = None
        self._ready = not ready_path
        with worker.log.open("ab") as log:
            self.log_start = log.tell()  # `log_tail` must not return lines of an earlier process
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-S", _EXEC_WORKER, str(reaper), *command],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[reaper],
                start_new_session=True,
            )
        worker.pid = self._popen.pid
        worker.status = WorkerStatus.RUNNING if self._ready else WorkerStatus.STARTING
        self.session = Session(self._popen.pid)
        self._waiter = threading.Thread(target=self._await_end, name=f"wait-{worker.name}", daemon=True)
        self._waiter.start()
        if ready_path and worker.port is not None:  # a separate thread, because a check may block until its timeout
            prober = threading.Thread(
                target=self._await_ready, args=(ready_path,), name=f"probe-{worker.name}", daemon=True
            )
            prober.start()

    def refresh(self) -> None:
        """Update the status and exit code of `worker`."""
        if self._ready and self.worker.status is WorkerStatus.STARTING:
            self.worker.status = WorkerStatus.RUNNING
        if self._end is not None and self.worker.exit_code is None:
            self.worker.exit_code, self.worker.ended_at = self._end
            self.worker.status = WorkerStatus.DONE if self.worker.exit_code == 0 else WorkerStatus.FAILED

    def log_tail(self, lines: int) -> str:
        """Return the last lines that this process wrote, preceded by earlier lines that name an error."""
        return exit_report.informative_tail(self.worker.log, lines, self.log_start)

    def collect(self, timeout: float) -> None:
        """Wait up to `timeout` seconds until the process has been reaped, so that no zombie remains."""
        self._waiter.join(timeout)
        self.refresh()

    def _await_end(self) -> None:
        self._end = (self._popen.wait(), time.time())

    def _await_ready(self, path: str) -> None:
        """Check readiness until the process is ready or has ended; kill it after `STOPPED_SECONDS` in stopped state."""
        worker, last_running = self.worker, time.monotonic()
        while self._end is None and not self._ready:
            problem = probe(worker.host, worker.port or 0, path)
            self.last_answer = problem or self.last_answer
            self._ready = problem is None
            now = time.monotonic()
            last_running = last_running if self.session.stopped() else now
            if now - last_running > STOPPED_SECONDS:
                worker.cause = f"was stopped by a signal for {STOPPED_SECONDS:g} s before it was ready"
                self.session.kill_leader()
                return
            time.sleep(PROBE_SECONDS)
