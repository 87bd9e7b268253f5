"""Agents that run as separate programs, in any language: as a command or in a container."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from rl_contracts.errors import AgentError, ConfigError
from rl_contracts.reward import RESERVED_KEYS
from rl_contracts.runtime.machine import bypass_proxies
from rl_contracts.sandbox import confine, reaper
from rl_contracts.workflow import AgentWorkflow

_LONGEST_RESULT = 1 << 20
_STDERR_BYTES = 2000
_END_SECONDS = 60.0


class AgentCommand(AgentWorkflow):
    """Agent that runs a command for its episodes. Subclass it and define `command`.

    The process reads one line from stdin: a JSON object with `data` (the example), `base_url` and `api_key`. It writes
    its result to stdout as one line of JSON, and logs to stderr. The result is a value that `AgentWorkflow.run` may
    return, or an object with a text `answer` and other metrics. The run's reward function scores the `answer`.

    A process for a single episode also gets URL and key in the environment variables that the OpenAI and Anthropic
    clients read. It is stopped after its result.

    Each process runs in a separate directory. Landlock prevents it from writing elsewhere. Stopping a process also
    stops all processes that it started.

    Args:
        reward: reward function of the run.

    Raises:
        ConfigError: there is no command, the platform is not Linux, or `confined` is set and the kernel lacks Landlock.
    """

    command: Sequence[str] = ()
    """Program and arguments. Paths must be absolute; the program may also be found on PATH."""
    long_lived: bool = False
    """True if a process runs many episodes, one per line of stdin, until its stdin is closed."""
    processes: int = 8
    """Maximum number of concurrent processes. Further episodes wait; the wait counts toward their deadline."""
    environment: Mapping[str, str] = {}
    """Environment variables of the process, in addition to the variables in `inherited`."""
    inherited: Sequence[str] = ("PATH", "LANG", "TZ", "SSL_CERT_FILE")
    """Environment variables that are copied from this process. No others are copied, because some contain keys."""
    confined: bool = True
    """True if the process can write only in its own directory."""
    shared_memory: bool = False
    """True if a confined process can also write in /dev/shm, which `multiprocessing` requires. Weights on their way to
    servers are stored there, so allow this only for trusted programs."""

    def __init__(self, reward: Callable[..., float | Awaitable[float]]) -> None:
        self._reward, self._idle = reward, list[_Process]()
        self._process_slots = asyncio.Semaphore(self.processes)
        name = type(self).__name__
        if not self.command:
            raise ConfigError(f"{name}.command: expected a program and its arguments, found none.")
        if self.confined and (missing := confine.missing_kernel_features()):
            raise ConfigError(
                f"{name}: cannot confine its processes to their directory: expected {' and '.join(missing)}. To run "
                "them unconfined, set `confined = False` in the class."
            )
        if sys.platform != "linux":
            raise ConfigError(f"{name}: agents that run commands require Linux, found {sys.platform}.")

    async def run(
        self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any = None
    ) -> float | dict[str, float] | None:
        """Run one episode in a process. Stop the process unless it is `long_lived` and returned a result."""
        request = json.dumps({"data": data, "base_url": base_url, "api_key": api_key})
        async with self._process_slots:
            process = self._idle.pop() if self._idle else self._start_process(base_url, api_key)
            try:
                await process.ready()
                result = await process.run_episode(request)
                if self.long_lived:
                    self._idle.append(process)
            finally:
                if process not in self._idle:
                    await process.stop()
        return await self._with_reward(result, data)

    async def close(self) -> None:
        """Stop all processes."""
        while self._idle:
            await self._idle.pop().stop()

    def build_command(self, name: str, variables: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
        """Return the command of a process, and a command to run after its end (empty for none).

        Args:
            name: unique name of the process.
            variables: names of the environment variables that the agent must get.
        """
        return self.command, ()

    def _start_process(self, base_url: str, api_key: str) -> _Process:
        no_proxy = bypass_proxies({**os.environ, **self.environment}, urlsplit(base_url).hostname or "")
        variables = {**self.environment, **no_proxy}
        if not self.long_lived:
            for client in ("OPENAI", "ANTHROPIC"):
                variables |= {f"{client}_BASE_URL": base_url, f"{client}_API_KEY": api_key}
        command, after = self.build_command(f"rl-agent-{uuid.uuid4().hex}", sorted(variables))
        process_environment = {name: os.environ[name] for name in self.inherited if name in os.environ} | variables
        return _Process(command, after, process_environment, self.confined, self.shared_memory)

    async def _with_reward(self, result: Any, data: dict[str, Any]) -> Any:
        if not isinstance(result, dict) or "answer" not in result:
            return result
        answer = result.pop("answer")
        reward_args = {name: value for name, value in data.items() if name not in RESERVED_KEYS}
        reward = self._reward("", str(answer), [], [], **reward_args)
        return result | {"reward": await reward if inspect.isawaitable(reward) else reward}


class AgentContainer(AgentCommand):
    """Agent in a container. `command` replaces the image's default command if it is not empty.

    The container is removed at its end. `rollout.endpoint` must listen on an address that the container can reach.
    """

    image: str = ""
    """Name of the image."""
    engine: str = "docker"
    """Container program: `docker`, or one with the same command line such as `podman`."""
    options: Sequence[str] = ("--network=host",)
    """Options of the engine's command `run`, such as limits on memory and processes."""
    inherited = (*AgentCommand.inherited, "HOME", "XDG_RUNTIME_DIR", "DOCKER_HOST")
    confined = False  # this process is the engine's client, not the agent

    def __init__(self, reward: Callable[..., float | Awaitable[float]]) -> None:
        if not self.image:
            raise ConfigError(f"{type(self).__name__}.image: expected the name of an image, found none.")
        self._container_command, self.command = self.command, (self.engine,)
        super().__init__(reward)

    def build_command(self, name: str, variables: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
        """Return the commands that run and remove the container.

        Variables are passed by name, so that no key appears on a command line.
        """
        variable_options = [option for variable in variables for option in ("-e", variable)]
        run = (self.engine, "run", "--rm", "-i", "--init", "--name", name, *variable_options, *self.options, self.image)
        return (*run, *self._container_command), (self.engine, "rm", "-f", name)


class _Process:
    """Agent process under a reaper, which also kills all its descendants."""

    def __init__(
        self,
        command: Sequence[str],
        after: Sequence[str],
        environment: dict[str, str],
        confined: bool,
        shared_memory: bool,
    ) -> None:
        self._environment, self._name = environment, command[0]
        self._settings: dict[str, Any] = {"command": list(command), "after": list(after)}
        self._settings |= {"confine": confine.__file__ if confined else None, "shared_memory": shared_memory}
        self._process: asyncio.subprocess.Process | None = None
        self._owner: int | None = None

    async def ready(self) -> None:
        """Start the process, or restart it if it has ended or has written output since its last result."""
        if self._process is not None and self._process.stdout is not None:
            try:
                async with asyncio.timeout(0):
                    await self._process.stdout.read(1)
            except TimeoutError:
                return
        await self.stop()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `stop`
        self._directory = tempfile.mkdtemp(prefix="rl-agent-")
        child_end, self._owner = os.pipe()
        settings = json.dumps(self._settings | {"owner": child_end, "directory": self._directory})
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-IS", reaper.__file__, settings),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=self._errors,
                env={"HOME": self._directory, "TMPDIR": self._directory} | self._environment,
                pass_fds=(child_end,),
                start_new_session=True,
                limit=_LONGEST_RESULT,
            )
        finally:
            os.close(child_end)

    async def run_episode(self, line: str) -> Any:
        """Return the result of one episode.

        Args:
            line: the request, as JSON.

        Raises:
            AgentError: the process ended without a result, or its result is not valid JSON or too long.
        """
        streams = self._process
        assert streams is not None
        assert streams.stdin is not None
        assert streams.stdout is not None
        with contextlib.suppress(ConnectionError):  # the missing result is reported below
            streams.stdin.write(f"{line}\n".encode())
            await streams.stdin.drain()
        try:
            reply_line = await streams.stdout.readline()
        except ValueError:
            raise AgentError(
                f"{self._name}: expected a result of at most {_LONGEST_RESULT:,} bytes, found a longer line on stdout."
            ) from None
        if not reply_line:
            code = await streams.wait()
            raise AgentError(f"{self._name} ended with exit code {code} before its result.{self._last_lines()}")
        try:
            return json.loads(reply_line)
        except ValueError:
            raise AgentError(
                f"{self._name}: expected the result as a line of JSON on stdout, found {reply_line[:200]!r}; write "
                f"logs to stderr.{self._last_lines()}"
            ) from None

    async def stop(self) -> None:
        """Kill the process and all its descendants, and remove its directory. No effect if it was not started."""
        if self._owner is None:
            return
        os.close(self._owner)
        process, self._process, self._owner = self._process, None, None
        try:
            async with asyncio.timeout(_END_SECONDS):
                await (process.wait() if process is not None else asyncio.sleep(0))
        finally:
            self._errors.close()
            await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    def _last_lines(self) -> str:
        size = os.fstat(self._errors.fileno()).st_size
        text = os.pread(self._errors.fileno(), _STDERR_BYTES, max(0, size - _STDERR_BYTES)).decode(errors="replace")
        return f" Last lines of its stderr:\n{text.strip()}" if text.strip() else " It wrote nothing to stderr."
