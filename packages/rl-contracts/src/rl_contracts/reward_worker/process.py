"""One worker process as its owner sees it: start it, ask it one thing at a time, kill it when it is late."""

from __future__ import annotations

import contextlib
import json
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
from rl_contracts.reward_worker import messages
from rl_contracts.sandbox import reaper
from rl_contracts.scheduler import RUN_KEY_VARIABLE

_CHUNK = 1 << 16
_STDERR_BYTES = 4000
_LOG_BYTES = 16 << 20
_END_TIMEOUT = 10.0


class WorkerProcess:
    """A process with a directory for temporary files (`TMPDIR`), which is removed when the process ends.

    On Linux a reaper (`rl_contracts.sandbox.reaper`) starts it, and ends it with all processes below it. It does not
    get the run key.

    Args:
        target: registry name or dotted path of the function.
        timeout: seconds that the owner allows for a call, which the function can ask for.
        log: what the function prints and logs is appended here; None: kept for errors alone. On Linux its first half
            is removed whenever it has more than 16 MiB.

    Raises:
        ConfigError: the process cannot be started.
    """

    def __init__(self, target: str, timeout: float, log: Path | None = None) -> None:
        self._what = f"reward {target!r}"
        peer = None
        try:
            peer, owner = os.pipe()
            self._owner = os.fdopen(owner, "wb", buffering=0)
            self._directory = tempfile.TemporaryDirectory(prefix="rl-reward-", ignore_cleanup_errors=True)
            directory = self._directory.name
            self._printed = (log or Path(directory, "stderr.log")).open("a+b")
            self._begin = os.fstat(self._printed.fileno()).st_size
            # a session of its own: Ctrl-C in the terminal goes to the owner alone
            self._process = subprocess.Popen(
                _command(peer, directory),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._printed,
                bufsize=0,
                env={k: v for k, v in os.environ.items() if k != RUN_KEY_VARIABLE} | {"TMPDIR": directory},
                pass_fds=(peer,),
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"{self._what}: its worker process cannot be started: {error}") from error
        finally:
            if peer is not None:
                os.close(peer)
        self._pipes = [pipe for pipe in (self._process.stdin, self._process.stdout) if pipe]
        self._in, self._out = (pipe.fileno() for pipe in self._pipes)
        os.set_blocking(self._in, False)
        self._events = select.poll()
        self._events.register(self._out, select.POLLIN)
        self._number = 0
        self._setup = messages.encode({"target": target, "path": sys.path, "timeout": timeout})

    def is_alive(self) -> bool:
        """Whether it has not ended, and has written nothing since its last reply."""
        return self._process.poll() is None and not self._events.poll(0)

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
        except ValueError as error:
            raise ConfigError(self._disturbed(error)) from None
        if "refused" in answer:
            raise ConfigError(f"{self._what} cannot be used: {answer['refused']}")

    def score(self, call: bytes, timeout: float) -> dict[str, Any]:
        """The answer to a call within `timeout` seconds, as `rl_contracts.reward_worker.__main__` describes it.

        Raises:
            RewardError: it took longer, the process ended, or it sent something else.
        """
        try:
            return self._exchange(call, timeout)
        except TimeoutError:
            raise RewardError(
                f"{self._what} took longer than its limit of {timeout:g} s; its worker was killed. Raise the timeout "
                f"or make the function end.{self._last_lines()}"
            ) from None
        except EOFError:
            raise RewardError(self._ended("while it scored")) from None
        except ValueError as error:
            raise RewardError(self._disturbed(error)) from None

    def kill(self) -> None:
        """End it and all processes below it, from any thread; a caller that waits for a reply gets an error."""
        if sys.platform == "linux":
            with contextlib.suppress(OSError, ValueError):  # the reaper has ended, or the pipe is closed
                self._owner.write(b"\n")
        elif self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill it, wait until it is gone, and remove its directory."""
        self.kill()
        for file in (self._owner, *self._pipes, self._printed):
            file.close()
        try:
            self._process.wait(_END_TIMEOUT)
        except subprocess.TimeoutExpired:  # the reaper is stopped; or one of its processes is stuck in the kernel
            self._process.kill()
        self._directory.cleanup()

    def _exchange(self, frame: bytes, timeout: float) -> dict[str, Any]:
        """Send a call and return its reply.

        Raises:
            TimeoutError: there is none within `timeout` seconds.
            EOFError: the process closed its pipe.
            ValueError: it sent something else.
        """
        deadline = time.monotonic() + timeout
        self._number += 1
        unsent, received = self._write(memoryview(messages.numbered(self._number, frame))), bytearray()
        while (reply := messages.reply(received, self._number)) is None:
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
                received += chunk
        return reply

    def _write(self, frame: memoryview) -> memoryview:
        """Write what the pipe takes; the rest."""
        try:
            return frame[os.write(self._in, frame) :]
        except BlockingIOError:
            return frame
        except BrokenPipeError:
            return frame[:0]  # it died; the end of its results says so too

    def _ended(self, doing: str) -> str:
        """Describe the end of a process that closed its pipe."""
        try:
            code = self._process.wait(timeout=5.0)  # its reaper ends what it left behind
            number = -code if code < 0 else code - 128  # of the process itself, or of the one below the reaper
            is_signal = number in signal.Signals
            how = f"ended by signal {signal.Signals(number).name}" if is_signal else f"ended with exit code {code}"
        except subprocess.TimeoutExpired:
            how = "closed its pipe, but lived on, and was killed"
        return f"{self._what}: its worker {how} {doing}.{self._last_lines()}"

    def _disturbed(self, error: ValueError) -> str:
        return (
            f"{self._what}: its worker's pipe has {error} instead of a reply; the worker was killed. The function must "
            "not write to descriptors that it did not open."
        )

    def _last_lines(self) -> str:
        file = self._printed.fileno()  # read without moving the place at which the process writes
        size = os.fstat(file).st_size
        begin = max(self._begin if self._begin <= size else 0, size - _STDERR_BYTES)  # the reaper may shorten it
        text = os.pread(file, _STDERR_BYTES, begin).decode(errors="replace").strip()
        return f" Last lines of its stderr:\n{text}" if text else " It wrote nothing to stderr."


def _command(owner: int, directory: str) -> list[str]:
    """Return the command of a worker: on Linux that of its reaper, which reads the descriptor `owner` and removes the
    directory also when its owner was killed."""
    worker = [sys.executable, "-P", "-m", "rl_contracts.reward_worker"]
    if sys.platform != "linux":
        return worker
    settings = {"command": worker, "directory": None, "confine": None, "owner": owner, "stderr_bytes": _LOG_BYTES}
    settings["after"] = ["rm", "-rf", directory]
    return [sys.executable, "-IS", reaper.__file__, json.dumps(settings)]
