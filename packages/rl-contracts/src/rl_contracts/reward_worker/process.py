"""One worker process as its owner sees it: start it, ask it one thing at a time, kill it when it is late."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rl_contracts.errors import ConfigError, RewardError
from rl_contracts.reward_worker import wire

_CHUNK = 1 << 16
_STDERR_BYTES = 4000
_END_TIMEOUT = 10.0


class WorkerProcess:
    """Belongs to the thread that makes it, which must live as long: on Linux a process dies with its parent's thread.

    Args:
        target: registry name or dotted path of the function.
        timeout: seconds that the owner allows for a call, which the function can ask for.
        log: what the function prints and logs is appended here; None: kept for errors alone.

    Raises:
        ConfigError: the process cannot be started.
    """

    def __init__(self, target: str, timeout: float, log: Path | None = None) -> None:
        self._what = f"reward {target!r}"
        # a session of its own: the whole group can be killed, and Ctrl-C in the terminal goes to the parent alone
        try:
            self._printed: Any = tempfile.TemporaryFile() if log is None else log.open("a+b")  # noqa: SIM115 - see close
            self._begin = os.fstat(self._printed.fileno()).st_size
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rl_contracts.reward_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._printed,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"{self._what}: its worker process cannot be started: {error}") from error
        self._pipes = [pipe for pipe in (self._process.stdin, self._process.stdout) if pipe]
        self._in, self._out = (pipe.fileno() for pipe in self._pipes)
        os.set_blocking(self._in, False)
        self._events = select.poll()
        self._events.register(self._out, select.POLLIN)
        self._setup = wire.encode({"target": target, "path": sys.path, "timeout": timeout})

    def lives(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def start(self, timeout: float) -> None:
        """Wait until the function is imported, at most `timeout` seconds.

        Raises:
            ConfigError: it cannot be, or takes too long.
        """
        try:
            answer = self._exchange(self._setup, timeout)
        except TimeoutError:
            raise ConfigError(
                f"{self._what}: its worker was not ready after {timeout:g} s; importing the function takes too long "
                f"or hangs.{self._last_lines()}"
            ) from None
        except EOFError:
            raise ConfigError(self._ended("before its function was imported")) from None
        if "refused" in answer:
            raise ConfigError(f"{self._what} cannot be used: {answer['refused']}")

    def score(self, call: bytes, timeout: float) -> dict[str, Any]:
        """The answer to a call within `timeout` seconds, as `rl_contracts.reward_worker.__main__` describes it.

        Raises:
            RewardError: it took longer, or the process ended.
        """
        try:
            answer: dict[str, Any] = self._exchange(call, timeout)
        except TimeoutError:
            raise RewardError(
                f"{self._what} took longer than its limit of {timeout:g} s; its worker was killed. Raise the timeout "
                f"or make the function end.{self._last_lines()}"
            ) from None
        except EOFError:
            raise RewardError(self._ended("while it scored")) from None
        return answer

    def kill(self) -> None:
        """End the process group, from any thread; whoever waits for an answer learns that it ended."""
        if self.lives():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill it and wait until it is gone."""
        self.kill()
        for file in (*self._pipes, self._printed):
            file.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it is stuck in the kernel, where nothing ends it
            self._process.wait(_END_TIMEOUT)

    def _exchange(self, frame: bytes, timeout: float) -> Any:
        """Send a frame and return the value of the one that answers it."""
        deadline = time.monotonic() + timeout
        unsent, answer = self._write(memoryview(frame)), bytearray()
        while (value := wire.complete(answer)) is None:
            if unsent:
                self._events.register(self._in, select.POLLOUT)
            ready = [descriptor for descriptor, _ in self._events.poll(1000 * max(0.0, deadline - time.monotonic()))]
            if not ready:
                raise TimeoutError
            if self._in in ready:
                self._events.unregister(self._in)
                unsent = self._write(unsent)
            if self._out in ready:
                chunk = os.read(self._out, _CHUNK)
                if not chunk:
                    raise EOFError
                answer += chunk
        return value

    def _write(self, frame: memoryview) -> memoryview:
        """Write what the pipe takes; the rest."""
        try:
            return frame[os.write(self._in, frame) :]
        except BlockingIOError:
            return frame
        except BrokenPipeError:
            return frame[:0]  # it died; the end of its results says so too

    def _ended(self, doing: str) -> str:
        """What happened where its pipe is closed: it ends, or has ended by itself."""
        try:
            code = self._process.wait(timeout=0.2)
            how = f"ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        except subprocess.TimeoutExpired:
            how = "closed its pipe, but lived on, and was killed"
        return f"{self._what}: its worker {how} {doing}.{self._last_lines()}"

    def _last_lines(self) -> str:
        file = self._printed.fileno()  # read without moving the place at which the process writes
        begin = max(self._begin, os.fstat(file).st_size - _STDERR_BYTES)
        text = os.pread(file, _STDERR_BYTES, begin).decode(errors="replace").strip()
        return f" Last lines of its stderr:\n{text}" if text else " It wrote nothing to stderr."
