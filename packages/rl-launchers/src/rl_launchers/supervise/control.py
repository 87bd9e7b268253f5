"""Communication between a launcher and other processes through the run's name service; no port is needed.

| name | written by | content |
|---|---|---|
| `status` | the launcher, every `BEAT_SECONDS` | JSON: state, PID, host, heartbeat number, restarts |
| `workers` | the launcher, after each change | JSON: the workers and their hosts |
| `servers/<role>/<index>` | the launcher | address of a server for clients |
| `control/stop` | `rl stop` | `gracefully` or `now` |
| `control/scale/<role>` | `rl scale` | requested number of servers of the role |
| `replies/scale/<role>` | the launcher | JSON: progress or outcome of that request |
| `job` | the command that submitted the run | JSON: `launcher.kind`, the name of the scheduler |
| `heartbeat/<worker>` | each trainer rank | heartbeat, a number that increases while the rank runs |

No entry contains a secret.
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
"""Seconds between two heartbeats of a launcher, and between its reads of requests."""
SECOND_SIGNAL_SECONDS = 2 * COALESCE_SECONDS
"""Seconds between the three signals that request an immediate stop."""


class RunControl(AbstractContextManager["RunControl"]):
    """Context manager of the launcher that renews its status and reads requests.

    A separate thread reads and writes, so that a busy launcher is not mistaken for a dead one. A stop request becomes a
    signal to this process. If the file system is full or unavailable, the thread logs a warning and retries.

    Args:
        names: name service of the run, for example `FileNames(run_dir / "names")`.
        beat: seconds between two heartbeats, see `BEAT_SECONDS`.
    """

    def __init__(self, names: NameService, beat: float = BEAT_SECONDS) -> None:
        self.names, self._beat = names, beat
        self.heartbeats = Heartbeats(names)
        self._facts: dict[str, Any] = {"state": "preparing", "pid": os.getpid(), "host": socket.gethostname()}
        self._facts |= {"since": time.time(), "beat_seconds": beat, "trainer_restarts": 0}
        self._workers: Sequence[Worker] = ()
        self._written, self._beats, self._polled_at = "", 0, time.monotonic()
        self._published: dict[str, str] = {}
        self._scales: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._over = threading.Event()
        self._previous_handler: Any = None
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def __enter__(self) -> RunControl:
        for prefix in ("servers", "control", "replies", "heartbeat", "workers"):  # entries of an earlier command
            self.names.delete(prefix)
            for key in self.names.children(prefix):
                self.names.delete(key)
        self._write()
        if threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGTERM, self._receive)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        if self._previous_handler is not None:
            signal.signal(signal.SIGTERM, self._previous_handler)
        interrupted = self._facts["state"] == "stopping" or isinstance(error, Interrupted | KeyboardInterrupt)
        failed = isinstance(error, Exception)
        self.set_status(state="failed" if failed else "stopped" if interrupted else "finished")
        if failed:
            self.set_status(error=str(error).partition("\n")[0])
        self.publish({})
        with suppress(OSError):  # on a full disk, readers see that the heartbeats have ended
            self._write()

    def set_status(self, **facts: object) -> None:
        """Set fields of `status`, written with the next heartbeat."""
        self._facts |= facts

    def show(self, workers: Sequence[Worker]) -> None:
        """Set the workers to write, as the launcher has just polled them."""
        self._workers, self._polled_at = list(workers), time.monotonic()

    def publish(self, servers: Mapping[str, str]) -> None:
        """Replace the published servers, given as addresses by `<role>/<index>`, and log a warning if that fails."""
        try:
            for key in self._published.keys() - servers.keys():
                self.names.delete(f"servers/{key}")
                del self._published[key]
            for key, address in servers.items():
                if self._published.get(key) != address:
                    self.names.add(f"servers/{key}", address, replace=True)
                    self._published[key] = address
        except OSError as error:
            logger.warning("cannot write the addresses of the servers; retrying: %s", error)

    def scale_requests(self) -> dict[str, str]:
        """Return the number of servers requested for each role since the last call, as unparsed text."""
        requests = {}
        with suppress(queue.Empty):
            while True:
                role, count = self._scales.get_nowait()
                requests[role] = count
        return requests

    def answer_scale(self, role: str, count: str, done: bool, text: str, right: bool = True) -> None:
        """Log and write the progress or outcome of a scale request.

        Args:
            role: role of the servers.
            count: requested number, as in the request.
            done: whether this is the outcome, with no further reply.
            text: sentence for the user.
            right: whether the request has succeeded so far.
        """
        logger.log(20 if right else 30, "%s=%s: %s", role, count, text)
        reply = {"count": count, "done": done, "right": right, "text": text}
        with suppress(OSError):  # the log has the text
            self.names.add(f"replies/scale/{role}", json.dumps(reply), replace=True)

    def _receive(self, number: int, _: object) -> None:
        """Handle SIGTERM before the launcher installs its handlers (raise `Interrupted`) or after its end (ignore)."""
        if self._facts["state"] == "preparing":
            raise Interrupted(number)

    def _run(self) -> None:
        while not self._over.wait(self._beat):
            try:
                self._write()
                self._read()
            except (OSError, RLError) as error:
                self.heartbeats.forget()
                logger.warning("cannot read or write the run's name service; retrying: %s", error)

    def _write(self) -> None:
        """Renew `status`, and `workers` if they changed."""
        fields = ("name", "node", "host", "port", "pid", "status", "exit_code", "restarts")
        workers = json.dumps([{name: getattr(worker, name) for name in fields} for worker in self._workers])
        if workers != self._written:  # before the status, so that a finished run never lists workers
            self.names.add("workers", workers, replace=True)
            self._written = workers
        self._beats += 1
        since_poll = round(time.monotonic() - self._polled_at, 1)
        self.names.add(
            "status", json.dumps(self._facts | {"beat": self._beats, "time": time.time(), "looked": since_poll}), True
        )

    def _read(self) -> None:
        self.heartbeats.read()
        for key, value in self.names.children("control").items():
            if self.names.get(key) != value:
                continue  # another process is replacing this request
            self.names.delete(key)
            if key == "control/stop":
                self._stop(now=value == "now")
            else:
                self._scales.put((key.removeprefix("control/scale/"), value))

    def _stop(self, now: bool) -> None:
        """Send this process SIGTERM: once, or, if `now`, up to three times until the run ends."""
        logger.warning("rl stop: %s", "at once" if now else "after the current step")
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(2 * now):
            if not self._over.wait(SECOND_SIGNAL_SECONDS):
                os.kill(os.getpid(), signal.SIGTERM)
