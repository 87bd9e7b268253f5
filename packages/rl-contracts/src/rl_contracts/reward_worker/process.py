"""Owner's side of one worker process: start it, send one call at a time, kill it on a timeout."""

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
    """Worker process with its own directory for temporary files (`TMPDIR`), which is removed when the process ends.

    On Linux a reaper (`rl_contracts.sandbox.reaper`) starts the process, and kills it with all of its descendants. The
    environment of the process does not have the run key.

    Args:
        target: registry name or dotted path of the function.
        timeout: time limit of a call in seconds; the function can read it.
        log: file to which the output and logs of the function are appended, or None to keep them only for error
            messages. On Linux the beginning is dropped whenever the file exceeds 16 MiB.

    Raises:
        ConfigError: the process cannot be started.
    """

    def __init__(self, target: str, timeout: float, log: Path | None = None) -> None:
        self._name = f"reward {target!r}"
        reaper_end = None
        try:
            reaper_end, owner_end = os.pipe()
            self._owner = os.fdopen(owner_end, "wb", buffering=0)
            self._directory = tempfile.TemporaryDirectory(prefix="rl-reward-", ignore_cleanup_errors=True)
            directory = self._directory.name
            self._log = (log or Path(directory, "stderr.log")).open("a+b")
            self._log_start = os.fstat(self._log.fileno()).st_size
            # start_new_session, so that Ctrl-C in the terminal reaches only the owner
            self._process = subprocess.Popen(
                _command(reaper_end, directory),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                bufsize=0,
                env={k: v for k, v in os.environ.items() if k != RUN_KEY_VARIABLE} | {"TMPDIR": directory},
                pass_fds=(reaper_end,),
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"{self._name}: its worker process cannot be started: {error}") from error
        finally:
            if reaper_end is not None:
                os.close(reaper_end)
        self._pipes = [pipe for pipe in (self._process.stdin, self._process.stdout) if pipe]
        self._in, self._out = (pipe.fileno() for pipe in self._pipes)
        os.set_blocking(self._in, False)
        self._events = select.poll()
        self._events.register(self._out, select.POLLIN)
        self._number = 0
        self._setup = messages.encode({"target": target, "path": sys.path, "timeout": timeout})

    def is_ready(self) -> bool:
        """Return whether the process is running and has sent nothing since its last reply."""
        return self._process.poll() is None and not self._events.poll(0)

    def start(self, timeout: float) -> None:
        """Wait until the function is imported, for at most `timeout` seconds.

        Raises:
            ConfigError: the import fails or takes too long.
        """
        try:
            reply = self._exchange(self._setup, timeout)
        except TimeoutError:
            raise ConfigError(
                f"{self._name}: its worker was not ready after {timeout:g} s; importing the function takes too long "
                f"or hangs.{self._last_lines()}"
            ) from None
        except EOFError:
            raise ConfigError(self._exit_message("before its function was imported")) from None
        except ValueError as error:
            raise ConfigError(self._protocol_message(error)) from None
        if "import_error" in reply:
            raise ConfigError(f"{self._name} cannot be used: {reply['import_error']}")

    def score(self, call: bytes, timeout: float) -> dict[str, Any]:
        """Send a call and return the reply, as described in `rl_contracts.reward_worker.__main__`.

        Raises:
            RewardError: there is no reply within `timeout` seconds, the process exited, or it sent something else.
        """
        try:
            return self._exchange(call, timeout)
        except TimeoutError:
            raise RewardError(
                f"{self._name} took longer than its limit of {timeout:g} s; its worker was killed. Raise the timeout "
                f"or make the function return sooner.{self._last_lines()}"
            ) from None
        except EOFError:
            raise RewardError(self._exit_message("while it scored")) from None
        except ValueError as error:
            raise RewardError(self._protocol_message(error)) from None

    def kill(self) -> None:
        """Kill the process and its descendants. Any thread may call this; a pending call raises an error."""
        if sys.platform == "linux":
            with contextlib.suppress(OSError, ValueError):  # the reaper has ended, or the pipe is closed
                self._owner.write(b"\n")
        elif self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the process, wait until it exits, and remove its directory."""
        self.kill()
        for file in (self._owner, *self._pipes, self._log):
            file.close()
        try:
            self._process.wait(_END_TIMEOUT)
        except subprocess.TimeoutExpired:  # the reaper is stopped, or a descendant is stuck in the kernel
            self._process.kill()
        self._directory.cleanup()

    def _exchange(self, frame: bytes, timeout: float) -> dict[str, Any]:
        """Send a call and return its reply.

        Raises:
            TimeoutError: there is no reply within `timeout` seconds.
            EOFError: the process closed its pipe.
            ValueError: the process sent something else.
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
        """Write as much as the pipe accepts, and return the remaining bytes."""
        try:
            return frame[os.write(self._in, frame) :]
        except BlockingIOError:
            return frame
        except BrokenPipeError:
            return frame[:0]  # the process exited; the read that follows raises EOFError

    def _exit_message(self, doing: str) -> str:
        """Return the error message for a process that closed its pipe."""
        try:
            code = self._process.wait(timeout=5.0)  # the reaper may still be killing descendants
            number = -code if code < 0 else code - 128  # of the process itself, or of the worker below the reaper
            is_signal = number in signal.Signals
            outcome = f"ended by signal {signal.Signals(number).name}" if is_signal else f"ended with exit code {code}"
        except subprocess.TimeoutExpired:
            outcome = "closed its pipe without exiting and was killed"
        return f"{self._name}: its worker {outcome} {doing}.{self._last_lines()}"

    def _protocol_message(self, error: ValueError) -> str:
        return (
            f"{self._name}: expected a reply from its worker, found {error}; the worker was killed. The function must "
            "return a short result and not write to file descriptors that it did not open."
        )

    def _last_lines(self) -> str:
        file = self._log.fileno()  # pread does not move the write position of the process
        size = os.fstat(file).st_size
        # the reaper may have shortened the file
        begin = max(self._log_start if self._log_start <= size else 0, size - _STDERR_BYTES)
        text = os.pread(file, _STDERR_BYTES, begin).decode(errors="replace").strip()
        return f" Last lines of its stderr:\n{text}" if text else " It wrote nothing to stderr."


def _command(owner: int, directory: str) -> list[str]:
    """Return the command that starts a worker.

    On Linux this is the command of a reaper that runs the worker. The reaper polls the descriptor `owner`, and removes
    the directory even if the owner was killed.
    """
    worker = [sys.executable, "-P", "-m", "rl_contracts.reward_worker"]
    if sys.platform != "linux":
        return worker
    settings = {"command": worker, "directory": None, "confine": None, "owner": owner, "stderr_bytes": _LOG_BYTES}
    settings["after"] = ["rm", "-rf", directory]
    return [sys.executable, "-IS", reaper.__file__, json.dumps(settings)]
