"""Node agent: a small process on each machine of a cluster that starts and stops workers for the launcher.

The agent uses the scheduler of a single machine (`LocalScheduler`). Processes, logs, ports, devices and the reaper work
as they do without a cluster. The agent connects to the launcher, reports each change of a worker's state and sends
heartbeats. If it loses the launcher, it stops its workers and exits.

    python -m rl_launchers.cluster.node_agent LAUNCHER:PORT NODE HOST LOG_DIRECTORY SECRETS_FILE
"""

from __future__ import annotations

import json
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl_contracts.errors import ConfigError, LaunchError, RLError
from rl_contracts.scheduler import JobSpec, WorkerStatus
from rl_launchers.cluster.messages import Message, MessageConnection, connect_to_launcher
from rl_launchers.local.process import LocalProcess, RankGroup
from rl_launchers.local.resources import PortReservation
from rl_launchers.local.scheduler import LocalScheduler, LocalSchedulerConfig

POLL_SECONDS = 0.1
"""Seconds between two polls of the workers."""
HEARTBEAT_SECONDS = 1.0
"""Seconds between two heartbeats."""
GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL for workers that still run when the agent ends."""
LAUNCHER_GONE = 3
"""Exit code of an agent that lost its launcher without an `end` message."""


class NodeAgent:
    """Executes the orders of the launcher.

    Args:
        wire: connection to the launcher.
        scheduler: scheduler of this machine.
        secrets: environment variables of workers that are never sent over the connection.
        patience: seconds without a message from the launcher after which the agent gives up.
    """

    def __init__(
        self, wire: MessageConnection, scheduler: LocalScheduler, secrets: dict[str, str], patience: float
    ) -> None:
        self._wire, self._scheduler, self._secrets, self._timeout = wire, scheduler, secrets, patience
        self._rendezvous_ports: dict[str, PortReservation] = {}
        self._reported: dict[str, Message] = {}
        self._handlers: dict[str, Callable[..., Any]] = {
            "add": self._add,
            "remove": self._remove,
            "restart": self._restart,
            "terminate": self._scheduler.terminate_workers,
            "meet": self._reserve_rendezvous_port,
        }

    def serve(self) -> bool:
        """Execute orders until the launcher ends the agent or is lost. Return whether the launcher ended it."""
        threading.Thread(target=self._send_heartbeats, daemon=True).start()
        last_message = time.monotonic()
        with suppress(OSError, EOFError, ValueError):  # the launcher is gone, or sent an invalid message
            while time.monotonic() - last_message < self._timeout:
                if select.select([self._wire], [], [], POLL_SECONDS)[0]:
                    order = self._wire.receive()
                    last_message = time.monotonic()
                    if order["do"] == "end":
                        return True
                    if order["do"] != "nothing":
                        self._execute(order)
                        last_message = time.monotonic()  # the order may have taken long
                self._report()
        return False

    def _execute(self, order: Message) -> None:
        reply: Message = {"answer": order["id"]}
        try:
            reply["result"] = self._handlers[order["do"]](**order["with"])
        except RLError as error:
            reply["error"] = ["config" if isinstance(error, ConfigError) else "launch", str(error)]
        except Exception as error:  # noqa: BLE001 - the launcher receives it and ends the run
            reply["error"] = ["launch", f"{type(error).__name__}: {error}"]
        reply["workers"] = self._changed_workers()
        self._wire.send(reply)

    def _add(self, spec: Message, indices: list[int], world: int, master: str) -> None:
        job = JobSpec(**(spec | {"command": tuple(spec["command"]), "scratch": tuple(spec["scratch"])}))
        secret_env = {name: value for name, value in self._secrets.items() if name in job.env}
        job = replace(job, env=job.env | secret_env)
        self._scheduler.add_workers(job, indices, RankGroup(world, tuple(indices), master))

    def _remove(self, role: str, indices: list[int], grace: float) -> list[Message]:
        """Stop workers and return their final states."""
        processes = [p for p in self._scheduler.processes() if p.worker.role == role and p.worker.index in indices]
        if processes:
            self._scheduler.remove_workers(role, indices, grace)
        if (rendezvous := self._rendezvous_ports.pop(role, None)) is not None:
            rendezvous.release()
        return [state_of(process) for process in processes]

    def _restart(self, role: str, index: int, note: str) -> None:
        matches = [worker for worker in self._scheduler.get_workers(role) if worker.index == index]
        if not matches:
            raise LaunchError(f"cannot restart {role}-{index}: this node has no such worker.")
        self._scheduler.restart_worker(matches[0], note)

    def _reserve_rendezvous_port(self, role: str) -> int:
        """Reserve a port as the rendezvous (MASTER_PORT) of a role's ranks, until the role is removed."""
        self._rendezvous_ports[role] = self._scheduler.reserve()
        return self._rendezvous_ports[role].port

    def _report(self) -> None:
        if changed := self._changed_workers():
            self._wire.send({"workers": changed})

    def _changed_workers(self) -> list[Message]:
        """Return the states of the workers that changed since the last call."""
        self._scheduler.poll()
        states = {process.worker.name: state_of(process) for process in self._scheduler.processes()}
        changed = [state for name, state in states.items() if self._reported.get(name) != state]
        self._reported = states
        return changed

    def _send_heartbeats(self) -> None:
        with suppress(OSError):
            while True:
                self._wire.send({})
                time.sleep(HEARTBEAT_SECONDS)


def state_of(process: LocalProcess) -> Message:
    """Return the state of a worker as the launcher receives it."""
    worker = process.worker
    starting = worker.status is WorkerStatus.STARTING
    return {
        "role": worker.role,
        "index": worker.index,
        "host": worker.host,
        "port": worker.port,
        "log": str(worker.log),
        "status": worker.status.value,
        "exit_code": worker.exit_code,
        "cause": worker.cause,
        "pid": worker.pid,
        "ended_at": worker.ended_at,
        "restarts": worker.restarts,
        "log_start": process.log_start,
        "last_answer": process.last_answer if starting else "",
    }


def main(argv: list[str]) -> int:
    """Run the agent. Return 0 if the launcher ended it, else `LAUNCHER_GONE`."""
    launcher, node, host, log_dir, secrets_file = argv
    # the launcher gets the cluster's stop signal too, and stops these workers in an orderly way
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not SIG_IGN: workers would inherit it and ignore stop requests
    secrets = json.loads(Path(secrets_file).read_text(encoding="utf-8"))
    launcher_host, _, port = launcher.rpartition(":")
    wire = connect_to_launcher(launcher_host, int(port), bytes.fromhex(secrets["agents"]), secrets["patience"] / 2)
    wire.send({"hello": node})
    scheduler = LocalScheduler(Path(log_dir), LocalSchedulerConfig(host=host))
    try:
        done = NodeAgent(wire, scheduler, secrets["workers"], secrets["patience"]).serve()
    finally:
        scheduler.delete_workers(grace=GRACE)
        wire.close()  # signals to the launcher that all workers have ended
    return 0 if done else LAUNCHER_GONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
