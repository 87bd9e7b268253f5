"""One worker process as its owner sees it: start it, give it one call at a time, kill it when it is late."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rl_contracts.errors import ConfigError, RewardError
from rl_contracts.logging import get_logger
from rl_contracts.metrics import Figures
from rl_contracts.reward_worker import wire

_CHUNK = 1 << 16
_STDERR_BYTES = 4000
_log = get_logger("reward")


@dataclass(slots=True)
class Call:
    """One call that waits for its reward."""

    frame: bytes
    """The call as it goes to the worker."""
    result: asyncio.Future[float]
    """Gets the reward, or a `RewardError`."""
    figures: Figures | None = None
    """What the function recorded, by the time that the result is there."""

    def fail(self, error: Exception) -> None:
        """Give up, unless nobody waits any more."""
        if not self.result.done():
            self.result.set_exception(error)


class WorkerProcess:
    """Belongs to one event loop, whose thread makes all calls.

    Args:
        target: registry name or dotted path of the function.
        call_timeout: seconds that one call may take, counted from when the worker gets it; it has one at a time.
        start_timeout: seconds until the function must have been imported.
        on_idle: called when the worker can take a call.
        on_end: called once when the worker is gone without having been asked to; its call, if it had one, has failed
            by then. The argument tells whether it had one.
    """

    def __init__(
        self,
        target: str,
        call_timeout: float,
        start_timeout: float,
        on_idle: Callable[[WorkerProcess], None],
        on_end: Callable[[WorkerProcess, bool], None],
    ) -> None:
        self._target, self._call_timeout = target, call_timeout
        self._on_idle, self._on_end = on_idle, on_end
        self._loop = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = self._loop.create_future()
        """Done when the function is imported; a `ConfigError` if it cannot be."""
        self.started.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._call: Call | None = None
        self._waits_to_write = False
        self._incoming, self._outgoing, self._stderr = bytearray(), bytearray(), bytearray()
        # a session of its own: the whole group can be killed, and Ctrl-C in the terminal goes to the parent alone
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rl_contracts.reward_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self._pipes = [pipe for pipe in (self.process.stdin, self.process.stdout, self.process.stderr) if pipe]
        self._in, self._out, self._err = (pipe.fileno() for pipe in self._pipes)
        for descriptor in (self._in, self._out, self._err):
            os.set_blocking(descriptor, False)
        self._loop.add_reader(self._out, self._read_results)
        self._loop.add_reader(self._err, self._read_stderr)
        self._deadline = self._loop.call_later(start_timeout, self._start_overdue, start_timeout)
        self._send(wire.encode({"target": target, "path": sys.path}))

    def submit(self, call: Call) -> None:
        """Give the idle worker a call; its deadline runs from now."""
        self._call = call
        self._deadline = self._loop.call_later(self._call_timeout, self._call_overdue, call)
        self._send(call.frame)

    def kill(self, reason: Exception) -> None:
        """End the process group and fail its call, if it has one. Does not wait for the end: see `process`."""
        self._deadline.cancel()
        if not self._loop.is_closed():
            for descriptor in (self._out, self._err):
                self._loop.remove_reader(descriptor)
            self._loop.remove_writer(self._in)
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        for pipe in self._pipes:
            pipe.close()
        if not self._loop.is_closed():
            if not self.started.done():
                self.started.set_exception(reason)
            if self._call is not None:
                self._call.fail(reason)
        self._call = None

    def _send(self, data: bytes) -> None:
        self._outgoing += data
        self._write_pending()

    def _write_pending(self) -> None:
        try:
            del self._outgoing[: os.write(self._in, self._outgoing)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._outgoing.clear()  # it died; the end of its results says so too
        if bool(self._outgoing) != self._waits_to_write:
            self._waits_to_write = bool(self._outgoing)
            if self._waits_to_write:
                self._loop.add_writer(self._in, self._write_pending)
            else:
                self._loop.remove_writer(self._in)

    def _read_results(self) -> None:
        try:
            chunk = os.read(self._out, _CHUNK)
        except BlockingIOError:
            return
        if not chunk:
            self._ended()
            return
        self._incoming += chunk
        for answer in wire.take(self._incoming):
            self._take(answer)

    def _take(self, answer: dict[str, Any]) -> None:
        self._deadline.cancel()
        if "refused" in answer:
            self._give_up(ConfigError(f"reward {self._target!r} cannot be used: {answer['refused']}"))
            return
        call, self._call = self._call, None
        if "ready" in answer:
            self.started.set_result(None)
        elif call is not None and not call.result.done():
            if "figures" in answer:
                call.figures = Figures.from_json(answer["figures"])
            if "value" in answer:
                call.result.set_result(answer["value"])
            else:
                call.fail(RewardError(f"reward {self._target!r} raised {answer['error']}"))
        self._on_idle(self)

    def _read_stderr(self) -> None:
        with contextlib.suppress(BlockingIOError):
            chunk = os.read(self._err, _CHUNK)
            if not chunk:
                self._loop.remove_reader(self._err)
            _log.debug("%s (pid %d): %s", self._target, self.process.pid, chunk.decode(errors="replace").rstrip())
            self._stderr += chunk
            del self._stderr[:-_STDERR_BYTES]

    def _start_overdue(self, seconds: float) -> None:
        self._read_results()  # what arrived while this loop was busy counts as in time
        if not self.started.done():
            self._read_stderr()
            self._give_up(
                ConfigError(
                    f"reward {self._target!r}: its worker was not ready after {seconds:g} s; importing the function "
                    f"takes too long or hangs.{self._last_lines()}"
                )
            )

    def _call_overdue(self, call: Call) -> None:
        self._read_results()
        if self._call is call:
            self._read_stderr()
            self._give_up(
                RewardError(
                    f"reward {self._target!r} took longer than its limit of {self._call_timeout:g} s; its worker was "
                    f"killed. Raise the timeout or make the function end.{self._last_lines()}"
                )
            )

    def _ended(self) -> None:
        """The pipe is closed: the process ends or has ended by itself."""
        self._read_stderr()
        try:
            code = self.process.wait(timeout=0.2)
            how = f"ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        except subprocess.TimeoutExpired:
            how = "closed its pipe, but lived on, and was killed"
        doing = "while it scored" if self.started.done() else "before its function was imported"
        error = f"reward {self._target!r}: its worker {how} {doing}.{self._last_lines()}"
        self._give_up(RewardError(error) if self.started.done() else ConfigError(error))

    def _give_up(self, error: Exception) -> None:
        had_call = self._call is not None
        self.kill(error)
        self._on_end(self, had_call)

    def _last_lines(self) -> str:
        text = self._stderr.decode(errors="replace").strip()
        return f" Last lines of its stderr:\n{text}" if text else " It wrote nothing to stderr."
