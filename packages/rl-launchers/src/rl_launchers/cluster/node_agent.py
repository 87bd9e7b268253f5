"""The agent: one small process on each machine of a cluster, which starts there what the launcher asks for.

It holds the scheduler of one machine, so that processes, logs, ports, devices and the keeper are what they are without
a cluster. It calls the launcher, tells it whenever the state of a worker changes and that it is alive, and ends itself
and all of its workers when the launcher is gone.

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
"""Seconds between two looks at the workers."""
HEARTBEAT_SECONDS = 1.0
"""Seconds after which something is said, whatever happens."""
GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL for the workers of a launcher that is gone."""
LAUNCHER_GONE = 3
"""Exit code of an agent whose launcher did not take leave."""


class NodeAgent:
    """Does what the launcher says.

    Args:
        wire: to the launcher.
        scheduler: of this machine.
        secrets: variables that workers have in their environment and that are never sent.
        patience: seconds without a word from the launcher after which it counts as gone.
    """

    def __init__(
        self, wire: MessageConnection, scheduler: LocalScheduler, secrets: dict[str, str], patience: float
    ) -> None:
        self._wire, self._scheduler, self._secrets, self._patience = wire, scheduler, secrets, patience
        self._meetings: dict[str, PortReservation] = {}
        self._said: dict[str, Message] = {}
        self._orders: dict[str, Callable[..., Any]] = {
            "add": self._add,
            "remove": self._remove,
            "restart": self._restart,
            "terminate": self._scheduler.terminate_workers,
            "meet": self._meet,
        }

    def serve(self) -> bool:
        """Until the launcher says that it is done, or is gone; True where it has said so."""
        threading.Thread(target=self._stay_alive, daemon=True).start()
        last_message = time.monotonic()
        with suppress(OSError, EOFError, ValueError):  # the launcher is gone, or talks nonsense
            while time.monotonic() - last_message < self._patience:
                if select.select([self._wire], [], [], POLL_SECONDS)[0]:
                    order = self._wire.receive()
                    last_message = time.monotonic()
                    if order["do"] == "end":
                        return True
                    if order["do"] != "nothing":
                        self._obey(order)
                        last_message = time.monotonic()  # it may have taken long
                self._report()
        return False

    def _obey(self, order: Message) -> None:
        answer: Message = {"answer": order["id"]}
        try:
            answer["result"] = self._orders[order["do"]](**order["with"])
        except RLError as error:
            answer["error"] = ["config" if isinstance(error, ConfigError) else "launch", str(error)]
        except Exception as error:  # noqa: BLE001 - told to the launcher, which ends the run
            answer["error"] = ["launch", f"{type(error).__name__}: {error}"]
        answer["workers"] = self._changes()
        self._wire.send(answer)

    def _add(self, spec: Message, indices: list[int], world: int, master: str) -> None:
        wanted = JobSpec(**(spec | {"command": tuple(spec["command"]), "scratch": tuple(spec["scratch"])}))
        hidden = {name: value for name, value in self._secrets.items() if name in wanted.env}
        wanted = replace(wanted, env=wanted.env | hidden)
        self._scheduler.add_workers(wanted, indices, RankGroup(world, tuple(indices), master))

    def _remove(self, role: str, indices: list[int], grace: float) -> list[Message]:
        """How they ended."""
        ending = [p for p in self._scheduler.processes() if p.worker.role == role and p.worker.index in indices]
        if ending:
            self._scheduler.remove_workers(role, indices, grace)
        if (meeting := self._meetings.pop(role, None)) is not None:
            meeting.release()
        return [state_of(process) for process in ending]

    def _restart(self, role: str, index: int, note: str) -> None:
        found = [worker for worker in self._scheduler.get_workers(role) if worker.index == index]
        if not found:
            raise LaunchError(f"there is no worker {role}-{index} to restart.")
        self._scheduler.restart_worker(found[0], note)

    def _meet(self, role: str) -> int:
        """A port for the ranks of a role, which is kept until they are removed."""
        self._meetings[role] = self._scheduler.reserve()
        return self._meetings[role].port

    def _report(self) -> None:
        if changed := self._changes():
            self._wire.send({"workers": changed})

    def _changes(self) -> list[Message]:
        """The workers of which something is new since the last time."""
        self._scheduler.poll()
        now = {process.worker.name: state_of(process) for process in self._scheduler.processes()}
        changed = [state for name, state in now.items() if self._said.get(name) != state]
        self._said = now
        return changed

    def _stay_alive(self) -> None:
        with suppress(OSError):
            while True:
                self._wire.send({})
                time.sleep(HEARTBEAT_SECONDS)


def state_of(process: LocalProcess) -> Message:
    """What the launcher knows of a worker."""
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
    """The agent process. Returns 0, or `LAUNCHER_GONE`."""
    launcher, node, host, log_dir, secrets_file = argv
    # a scheduler's request to end comes to the launcher too, which ends what is here in its own time
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # ignored ones its workers would inherit, and not hear a request to end
    secrets = json.loads(Path(secrets_file).read_text(encoding="utf-8"))
    at, _, port = launcher.rpartition(":")
    wire = connect_to_launcher(at, int(port), bytes.fromhex(secrets["agents"]), secrets["patience"] / 2)
    wire.send({"hello": node})
    scheduler = LocalScheduler(Path(log_dir), LocalSchedulerConfig(host=host))
    try:
        done = NodeAgent(wire, scheduler, secrets["workers"], secrets["patience"]).serve()
    finally:
        scheduler.delete_workers(grace=GRACE)
        wire.close()  # so the launcher knows that nothing is left here
    return 0 if done else LAUNCHER_GONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
