"""What a launcher and the tools around its run tell each other, as names in the run's directory: nothing listens.

| name | who writes it | what it holds |
|---|---|---|
| `status` | the launcher, every `BEAT_SECONDS` | JSON: state, process, host, beat, restarts |
| `workers` | the launcher, when it changes | JSON: what runs where |
| `servers/<role>/<index>` | the launcher | address of a server that clients may ask |
| `control/stop` | `rl stop` | `gracefully` or `now` |
| `control/scale/<role>` | `rl scale` | how many servers the role is to have |
| `answers/scale/<role>` | the launcher | JSON: what became of that |
| `job` | a command that handed the run in | JSON: the scheduler's kind |
| `pulse/<worker>` | each trainer rank | a number that grows as long as it lives |

None of it is secret.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Any

from rl_contracts.errors import RLError
from rl_contracts.runtime.logging import get_logger
from rl_contracts.runtime.name_service import NameService
from rl_contracts.scheduler import Worker
from rl_launchers.supervise.heartbeat import Heartbeats
from rl_launchers.supervise.interrupts import COALESCE_SECONDS, Interrupted

logger = get_logger("launcher")

BEAT_SECONDS = 2.0
"""Seconds between two signs of life of a launcher, and between its looks at what it is asked."""
SECOND_SIGNAL_SECONDS = 2 * COALESCE_SECONDS
"""Seconds between the three signals that mean: at once."""


class RunControl(AbstractContextManager["RunControl"]):
    """The launcher's end, from its `with` on: renews its status, and hears what it is asked.

    A thread writes and reads, so that a launcher that is busy is not taken for one that is dead. A request to stop
    becomes the signal that it stands for. A file system that is full or gone for a while is waited for.

    Args:
        names: of the run, for example `FileNames(run_dir / "names")`.
        beat: seconds, see `BEAT_SECONDS`.
    """

    def __init__(self, names: NameService, beat: float = BEAT_SECONDS) -> None:
        self.names, self._beat = names, beat
        self.pulses = Heartbeats(names)
        self._facts: dict[str, Any] = {"state": "preparing", "pid": os.getpid(), "host": socket.gethostname()}
        self._facts |= {"since": time.time(), "beat_seconds": beat, "trainer_restarts": 0}
        self._workers: Sequence[Worker] = ()
        self._written, self._beats, self._looked = "", 0, time.monotonic()
        self._published: dict[str, str] = {}
        self._scales: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._over = threading.Event()
        self._former: Any = None
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def __enter__(self) -> RunControl:
        for prefix in ("servers", "control", "answers", "pulse", "workers"):  # of an earlier command
            self.names.delete(prefix)
            for key in self.names.children(prefix):
                self.names.delete(key)
        self._write()
        if threading.current_thread() is threading.main_thread():
            self._former = signal.signal(signal.SIGTERM, self._receive)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        if self._former is not None:
            signal.signal(signal.SIGTERM, self._former)
        asked = self._facts["state"] == "stopping" or isinstance(error, Interrupted | KeyboardInterrupt)
        failed = isinstance(error, Exception)
        self.set_status(state="failed" if failed else "stopped" if asked else "finished")
        if failed:
            self.set_status(error=str(error).partition("\n")[0])
        self.publish({})
        with suppress(OSError):  # a full disk: it will be found silent
            self._write()

    def set_status(self, **facts: object) -> None:
        """What `status` is to say from its next beat on."""
        self._facts |= facts

    def show(self, workers: Sequence[Worker]) -> None:
        """The launcher looked at its workers, and these are they."""
        self._workers, self._looked = list(workers), time.monotonic()

    def publish(self, servers: Mapping[str, str]) -> None:
        """Let clients know these servers and no others: addresses by `<role>/<index>`."""
        try:
            for key in self._published.keys() - servers.keys():
                self.names.delete(f"servers/{key}")
                del self._published[key]
            for key, address in servers.items():
                if self._published.get(key) != address:
                    self.names.add(f"servers/{key}", address, replace=True)
                    self._published[key] = address
        except OSError as error:
            logger.warning("The addresses of servers could not be written, and will be again: %s", error)

    def scale_requests(self) -> dict[str, str]:
        """How many servers each role was asked to have since the last call, as it was written."""
        asked = {}
        with suppress(queue.Empty):
            while True:
                role, count = self._scales.get_nowait()
                asked[role] = count
        return asked

    def answer_scale(self, role: str, count: str, done: bool, text: str, right: bool = True) -> None:
        """Say what became of a request for so many servers; `done`: there is nothing to add."""
        logger.log(20 if right else 30, "%s=%s: %s", role, count, text)
        answer = {"count": count, "done": done, "right": right, "text": text}
        with suppress(OSError):  # the log has it
            self.names.add(f"answers/scale/{role}", json.dumps(answer), replace=True)

    def _receive(self, number: int, _: object) -> None:
        """A request to stop before the launcher hears any, or when it is done."""
        if self._facts["state"] == "preparing":
            raise Interrupted(number)

    def _run(self) -> None:
        while not self._over.wait(self._beat):
            try:
                self._write()
                self._read()
            except (OSError, RLError) as error:
                self.pulses.forget()
                logger.warning("The run's names cannot be written or read, and will be again: %s", error)

    def _write(self) -> None:
        """Renew the status; what runs where only where it changed."""
        shown = ("name", "node", "host", "port", "pid", "status", "exit_code", "restarts")
        workers = json.dumps([{name: getattr(worker, name) for name in shown} for worker in self._workers])
        if workers != self._written:  # first, so that a run that says it is over shows none
            self.names.add("workers", workers, replace=True)
            self._written = workers
        self._beats += 1
        looked = round(time.monotonic() - self._looked, 1)
        self.names.add(
            "status", json.dumps(self._facts | {"beat": self._beats, "time": time.time(), "looked": looked}), True
        )

    def _read(self) -> None:
        self.pulses.read()
        for key, value in self.names.children("control").items():
            if self.names.get(key) != value:
                continue  # somebody asks for something else just now
            self.names.delete(key)
            if key == "control/stop":
                self._stop(now=value == "now")
            else:
                self._scales.put((key.removeprefix("control/scale/"), value))

    def _stop(self, now: bool) -> None:
        """Send this process SIGTERM once; `now`: up to three times, until the run ends."""
        logger.warning("rl stop: %s", "at once" if now else "after the current step")
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(2 * now):
            if not self._over.wait(SECOND_SIGNAL_SECONDS):
                os.kill(os.getpid(), signal.SIGTERM)
