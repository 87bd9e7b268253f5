"""Agents that are programs of their own, in whatever language and environment: a command, or a container."""

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
from collections.abc import Callable, Mapping, Sequence
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
    """A command that runs an episode. Subclass it with `command`.

    It reads a line of stdin, a JSON object with `data` (the row), `base_url` and `api_key`, and writes its result as a
    line of JSON to stdout: what `run` may return; or an object with `answer`, a text that the run's reward scores, and
    other figures. What it logs goes to stderr. A process for one episode has the URL and the
    key in its environment too, by the names that OpenAI's and Anthropic's clients know. It is ended after its result.

    A process runs in a directory of its own, is ended with all that it started, and can write nothing elsewhere (by
    Landlock).

    Args:
        reward: of the run.

    Raises:
        ConfigError: no command, not on Linux, or a kernel without Landlock where `confined`.
    """

    command: Sequence[str] = ()
    """Program and arguments; paths are absolute, or found by PATH."""
    long_lived: bool = False
    """Whether a process takes one episode after the other, each a line, until its stdin ends."""
    processes: int = 8
    """That run at the same time. Further episodes wait, within their deadline."""
    environment: Mapping[str, str] = {}
    """Variables that it has beside those of `inherited`."""
    inherited: Sequence[str] = ("PATH", "LANG", "TZ", "SSL_CERT_FILE")
    """Variables that it has from this process. No others: there are keys among them."""
    confined: bool = True
    """Whether it can write in its own directory alone."""
    shared_memory: bool = False
    """Whether a confined one can write in /dev/shm too, as `multiprocessing` needs it. There lie the weights that
    servers are about to take; let only a program in that is known."""

    def __init__(self, reward: Callable[..., Any]) -> None:
        self._reward, self._idle = reward, list[_Process]()
        self._places = asyncio.Semaphore(self.processes)
        name = type(self).__name__
        if not self.command:
            raise ConfigError(f"{name}.command: expected a program and its arguments, found none.")
        if self.confined and (lacking := confine.missing_kernel_features()):
            raise ConfigError(
                f"{name}: its processes cannot be kept from writing elsewhere: expected {' and '.join(lacking)}. Say "
                "`confined = False` in the class where they may."
            )
        if sys.platform != "linux":
            raise ConfigError(f"{name}: agents that are commands need Linux, found {sys.platform}.")

    async def run(
        self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any = None
    ) -> float | dict[str, float] | None:
        """Run an episode in a process, which is ended unless it gave a result and takes further episodes."""
        asked = json.dumps({"data": data, "base_url": base_url, "api_key": api_key})
        async with self._places:
            process = self._idle.pop() if self._idle else self._start_process(base_url, api_key)
            try:
                await process.ready()
                result = await process.run_episode(asked)
                if self.long_lived:
                    self._idle.append(process)
            finally:
                if process not in self._idle:
                    await process.stop()
        return await self._scored(result, data)

    async def close(self) -> None:
        """End all processes."""
        while self._idle:
            await self._idle.pop().stop()

    def build_command(self, name: str, variables: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
        """The command of a process, and a command that is run when it has ended (nothing for none).

        Args:
            name: of the process, its own.
            variables: names of those that it is to have.
        """
        return self.command, ()

    def _start_process(self, base_url: str, api_key: str) -> _Process:
        outside = bypass_proxies({**os.environ, **self.environment}, urlsplit(base_url).hostname or "")
        variables = {**self.environment, **outside}
        if not self.long_lived:
            for client in ("OPENAI", "ANTHROPIC"):
                variables |= {f"{client}_BASE_URL": base_url, f"{client}_API_KEY": api_key}
        command, after = self.build_command(f"rl-agent-{uuid.uuid4().hex}", sorted(variables))
        given = {name: os.environ[name] for name in self.inherited if name in os.environ} | variables
        return _Process(command, after, given, self.confined, self.shared_memory)

    async def _scored(self, result: Any, data: dict[str, Any]) -> Any:
        if not isinstance(result, dict) or "answer" not in result:
            return result
        answer = result.pop("answer")
        rest = {name: value for name, value in data.items() if name not in RESERVED_KEYS}
        reward = self._reward("", str(answer), [], [], **rest)
        return result | {"reward": await reward if inspect.isawaitable(reward) else reward}


class AgentContainer(AgentCommand):
    """An agent in a container: `command` is what runs in it, where that is not the image's own. The container is
    removed when it ends. It reaches the endpoint where `rollout.endpoint` listens on an address that it sees."""

    image: str = ""
    engine: str = "docker"
    """Or another with its command line, such as `podman`."""
    options: Sequence[str] = ("--network=host",)
    """Of `run`, such as limits on memory and processes."""
    inherited = (*AgentCommand.inherited, "HOME", "XDG_RUNTIME_DIR", "DOCKER_HOST")
    confined = False  # the engine's client is no agent

    def __init__(self, reward: Callable[..., Any]) -> None:
        if not self.image:
            raise ConfigError(f"{type(self).__name__}.image: expected the name of an image, found none.")
        self._inside, self.command = self.command, (self.engine,)
        super().__init__(reward)

    def build_command(self, name: str, variables: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
        """As its base says; variables go by name alone, so that no key is on a command line."""
        named = [part for variable in variables for part in ("-e", variable)]
        run = (self.engine, "run", "--rm", "-i", "--init", "--name", name, *named, *self.options, self.image)
        return (*run, *self._inside), (self.engine, "rm", "-f", name)


class _Process:
    """One that is kept, and all below it."""

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
        """Start it, unless it runs already and has written nothing since its last result."""
        if self._process is not None and self._process.stdout is not None:
            try:
                async with asyncio.timeout(0):
                    await self._process.stdout.read(1)
            except TimeoutError:
                return
        await self.stop()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
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
        """Its result of an episode.

        Raises:
            AgentError: it ended before, or wrote something else.
        """
        streams = self._process
        assert streams is not None
        assert streams.stdin is not None
        assert streams.stdout is not None
        with contextlib.suppress(ConnectionError):  # its end is told below
            streams.stdin.write(f"{line}\n".encode())
            await streams.stdin.drain()
        try:
            reply_line = await streams.stdout.readline()
        except ValueError:
            raise AgentError(f"{self._name}: its result has more than {_LONGEST_RESULT:,} bytes.") from None
        if not reply_line:
            code = await streams.wait()
            raise AgentError(f"{self._name} ended with exit code {code} before its result.{self._last_lines()}")
        try:
            return json.loads(reply_line)
        except ValueError:
            raise AgentError(
                f"{self._name}: expected its result as a line of JSON on stdout, found {reply_line[:200]!r}; "
                f"what it logs goes to stderr.{self._last_lines()}"
            ) from None

    async def stop(self) -> None:
        """End it with all that it started, and remove its directory; nothing where it does not run."""
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
