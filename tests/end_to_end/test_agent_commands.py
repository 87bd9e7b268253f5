"""Agents in separate processes and containers, including misbehaving ones, which must not stop the run."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

from rl_contracts.config import GenerationConfig
from rl_contracts.errors import AgentError, ConfigError
from rl_contracts.runtime.clock import SystemClock
from rl_contracts.sandbox import confine
from rl_contracts.testing import NullInferenceEngine, NullInferenceEngineConfig
from rl_contracts.testing.chat_formats import format_completion, make_chat_tokenizer
from rl_contracts.workflow import AgentWorkflow
from rl_workflows import AgentCommand, AgentContainer, AgentEpisodeWorkflow, Ticket
from rl_workflows.agents.endpoint.server import HttpRolloutEndpoint
from rl_workflows.rollout.episode import Episodes
from rl_workflows.rollout.groups import run_group

ROW = {"messages": [{"role": "user", "content": "what is 2 + 3?"}], "answer": "5", "prompt_id": 0}
TOKENIZER = make_chat_tokenizer("llama3")

PROGRAM = """
import json, os, subprocess, sys, time, urllib.request

def ask(episode, url=None, key=None):
    body = json.dumps({"model": "policy", "messages": episode["data"]["messages"]}).encode()
    request = urllib.request.Request((url or episode["base_url"]) + "/chat/completions", body, {
        "content-type": "application/json", "authorization": "Bearer " + (key or episode["api_key"])})
    return json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]["content"]

for number, line in enumerate(sys.stdin, 1):
    episode = json.loads(line)
"""
GOOD = "print(json.dumps({'answer': ask(episode), 'number': number}), flush=True)"


@pytest.fixture
async def endpoint() -> AsyncIterator[HttpRolloutEndpoint]:
    endpoint = HttpRolloutEndpoint(TOKENIZER)
    yield endpoint
    await endpoint.destroy()


def contains_answer(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, *, answer: str) -> float:
    return float(answer in completions)


def make_program(directory: Path, body: str, **settings: Any) -> AgentCommand:
    """Return an agent that runs the code for each line of stdin."""
    path = directory / f"agent{len(list(directory.iterdir()))}.py"
    path.write_text(PROGRAM + textwrap.indent(textwrap.dedent(body), "    "))
    command = (sys.executable, "-ISu", str(path))
    return type("Program", (AgentCommand,), {"command": command} | settings)(contains_answer)


async def run_agent(agent: AgentWorkflow, endpoint: HttpRolloutEndpoint, size: int = 1, deadline: float = 60.0) -> Any:
    ids = TOKENIZER.encode(format_completion("llama3", "it is 5"), add_special_tokens=False)
    config = NullInferenceEngineConfig(seconds_per_token=0.0, vocab_size=len(TOKENIZER))
    engine = NullInferenceEngine(config, answer=lambda request: ids)
    workflow = AgentEpisodeWorkflow(agent, endpoint, GenerationConfig(max_new_tokens=32), 400, deadline=deadline)
    try:
        return await run_group(Episodes(workflow, engine, SystemClock(), seed=1), ROW, Ticket(0, 3), size, 1)
    finally:
        await agent.close()


def pids_with(text: str) -> list[str]:
    """Return the ids of the processes with a text in their command line."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            pids += [path.parent.name] if text in path.read_text() else []
        except (FileNotFoundError, ProcessLookupError):
            continue
    return pids


async def test_command_gets_url_and_key_in_environment(endpoint: HttpRolloutEndpoint, tmp_path: Path) -> None:
    body = """
        assert not any(episode["api_key"] in part for part in sys.argv)
        assert os.environ["ANTHROPIC_API_KEY"] == episode["api_key"] and "A_SECRET" not in os.environ
        open("file", "w").write("text")
        reply = ask(episode, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
        print(json.dumps({"answer": reply, "own": os.environ["OWN"] == "1"}))
        time.sleep(600)
    """
    os.environ["A_SECRET"] = "1"
    try:
        group = await run_agent(make_program(tmp_path, body, environment={"OWN": "1"}), endpoint, size=2)
    finally:
        del os.environ["A_SECRET"]

    assert group.error is None
    assert [row.reward for row in group.trajectories] == [1.0, 1.0]
    assert group.metrics.results()["agent/own"] == 1.0
    assert not pids_with(str(tmp_path))


async def test_long_lived_command_runs_many_episodes(endpoint: HttpRolloutEndpoint, tmp_path: Path) -> None:
    group = await run_agent(make_program(tmp_path, GOOD, long_lived=True, processes=1), endpoint, size=6)

    assert group.error is None
    assert [row.reward for row in group.trajectories] == [1.0] * 6
    assert group.metrics.results()["agent/number"] == 3.5  # the mean of 1 to 6
    assert not pids_with(str(tmp_path))


async def test_long_lived_command_that_dies_is_restarted(endpoint: HttpRolloutEndpoint, tmp_path: Path) -> None:
    marker = f"/dev/shm/test-{uuid4().hex}"
    body = f"if not os.path.exists({marker!r}):\n    open({marker!r}, 'w').close()\n    os._exit(3)\n{GOOD}"
    agent = make_program(tmp_path, body, long_lived=True, processes=1, shared_memory=True)
    try:
        first = await run_agent(agent, endpoint)
        second = await run_agent(agent, endpoint, size=2)
    finally:
        os.remove(marker)

    assert isinstance(first.error, AgentError)
    assert second.error is None


async def test_long_lived_command_with_extra_output_is_not_reused(
    endpoint: HttpRolloutEndpoint, tmp_path: Path
) -> None:
    body = (
        "result = {'answer': ask(episode), 'number': number}\n"
        "print(json.dumps(result) + '\\n' + json.dumps({'answer': 'none'}), flush=True)"
    )
    group = await run_agent(make_program(tmp_path, body, long_lived=True, processes=1), endpoint, size=4)

    assert group.error is None
    assert [row.reward for row in group.trajectories] == [1.0] * 4
    assert group.metrics.results()["agent/number"] == 1.0
    assert not pids_with(str(tmp_path))


async def test_long_lived_command_that_exits_while_idle_is_restarted(tmp_path: Path) -> None:
    body = "print(json.dumps({'reward': 1.0, 'pid': os.getpid()}), flush=True)\nos._exit(0)"
    agent = make_program(tmp_path, body, long_lived=True, processes=1)
    try:
        pids = set()
        for _ in range(3):
            result = await agent.run(ROW, base_url="http://127.0.0.1:1/v1", api_key="none")
            pids.add(result["pid"])  # type: ignore[index, call-overload]
            async with asyncio.timeout(30):
                while pids_with(str(tmp_path)):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)  # until the event loop notices the exit
    finally:
        await agent.close()
    assert len(pids) == 3


class Exits(AgentWorkflow):
    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any) -> float:
        sys.exit("injected")


class Cancels(AgentWorkflow):
    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any) -> float:
        raise asyncio.CancelledError("injected")


@pytest.mark.parametrize(
    ("agent", "message"), [(Exits(), "SystemExit: injected"), (Cancels(), "CancelledError: injected")]
)
async def test_agent_raising_exit_or_cancellation_fails_only_its_episode(
    agent: AgentWorkflow, message: str, endpoint: HttpRolloutEndpoint
) -> None:
    group = await run_agent(agent, endpoint)

    assert isinstance(group.error, AgentError)
    assert message in str(group.error)


MISBEHAVING = {
    "never finishes": (
        """
        while True:
            try:
                ask(episode)
            except OSError:  # rejected after the maximum number of calls
                time.sleep(0.01)
        """,
        "did not end within 2 s",
    ),
    "crashes": ("raise KeyError('injected')", "ended with exit code 1 before its result. Last lines"),
    "is killed": ("os.kill(os.getpid(), 11)", "ended with exit code 139 before its result. It wrote nothing"),
    "prints text": ("print('so far so good')", "found b'so far so good"),
    "prints too much": ("print('x' * 3_000_000)", "at most 1,048,576 bytes"),
    "closes stdout": ("os.close(1); time.sleep(600)", "did not end within 2 s"),
    "forks": (
        """
        for number in range(20):
            if os.fork() == 0:
                os.setsid()
                os.fork()
                while True:
                    time.sleep(1)
        time.sleep(600)
        """,
        "did not end within 2 s",
    ),
    "is a fork bomb": ("n = 0\nwhile n < 60 or time.sleep(600):\n    os.fork()\n    n += 10", "did not end within 2 s"),
}
IN_CI = {"prints text", "prints too much", "is a fork bomb"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.nightly) for name in MISBEHAVING]
)
async def test_misbehaving_command_is_killed_and_counted_as_agent_failure(
    endpoint: HttpRolloutEndpoint, tmp_path: Path, name: str
) -> None:
    body, message = MISBEHAVING[name]
    bad, good = make_program(tmp_path, body), make_program(tmp_path, GOOD)

    failed = await run_agent(bad, endpoint, deadline=2.0 if "2 s" in message else 60.0)
    succeeded = await run_agent(good, endpoint)

    assert isinstance(failed.error, AgentError)
    assert failed.error.boundary == "agent"
    assert message in str(failed.error)
    assert failed.trajectories == []
    assert succeeded.error is None
    assert not pids_with(str(tmp_path))


async def test_command_cannot_write_outside_its_directory(endpoint: HttpRolloutEndpoint, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    body = f"""
        import shutil
        os.makedirs("deep/er"); open("deep/er/file", "w").write("1"); os.rename("deep/er/file", "file")
        denied = 0
        for attempt in (
            lambda: open({str(outside / "new")!r}, "w"),
            lambda: open({str(outside / "kept")!r}, "w"),
            lambda: os.remove({str(outside / "kept")!r}),
            lambda: os.mkdir({str(outside / "new")!r}),
            lambda: subprocess.run(["touch", {str(outside / "new")!r}], check=True, capture_output=True),
            lambda: open("/dev/shm/{tmp_path.name}", "w"),
        ):
            try:
                attempt()
            except (PermissionError, subprocess.CalledProcessError):
                denied += 1
        ask(episode)
        print(json.dumps({{"reward": 0.5, "denied": denied}}))
    """
    group = await run_agent(make_program(tmp_path, body), endpoint)

    assert group.error is None
    assert group.metrics.results()["agent/denied"] == 6.0
    assert [(path.name, path.read_text()) for path in outside.iterdir()] == [("kept", "kept")]


class Floods(AgentWorkflow):
    """Agent that makes `calls` calls on 16 connections, whatever the responses are."""

    def __init__(self, calls: int) -> None:
        self.calls, self.statuses = calls, Counter[bytes]()

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any) -> float:
        url = urlsplit(base_url)
        body = json.dumps({"model": "policy", "messages": data["messages"], "max_tokens": 1})
        request = (
            f"POST {url.path}/chat/completions HTTP/1.1\r\nhost: {url.netloc}\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {api_key}\r\ncontent-length: {len(body)}\r\n\r\n{body}"
        ).encode()

        async def caller() -> None:
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            while self.calls > 0:
                self.calls -= 1
                writer.write(request)
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(head.partition(b"content-length:")[2].split()[0]))
                self.statuses[head.split()[1]] += 1
            writer.close()

        await asyncio.gather(*(caller() for _ in range(16)))
        raise RuntimeError("too many requests")


@pytest.mark.slow
async def test_agent_above_call_limit_is_rejected_and_others_succeed(
    endpoint: HttpRolloutEndpoint, tmp_path: Path
) -> None:
    flood = Floods(10_000)
    failed, succeeded = await asyncio.gather(
        run_agent(flood, endpoint, deadline=200.0), run_agent(make_program(tmp_path, GOOD), endpoint)
    )

    assert isinstance(failed.error, AgentError)
    assert flood.statuses == {b"200": 256, b"429": 10_000 - 256}  # EndpointConfig.max_calls
    assert succeeded.error is None


async def test_agent_command_excludes_endpoint_from_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "corp.example")
    code = "import json, os; print(json.dumps({'hosts': os.environ['no_proxy'].split(',')}))"
    agent_class: Any = type("ProxyReader", (AgentCommand,), {"command": (sys.executable, "-IS", "-c", code)})
    result = await agent_class(contains_answer).run({}, base_url="http://agents.example:1/v1", api_key="k")
    assert {"corp.example", "127.0.0.1", "agents.example"} <= set(result["hosts"])


async def test_command_ends_when_its_owner_is_killed(tmp_path: Path) -> None:
    code = f"""
import asyncio, sys
from rl_workflows import AgentCommand
class Sleeps(AgentCommand):
    command = ("sleep", "98{os.getpid()}")
asyncio.run(Sleeps(print).run({{}}, base_url="", api_key=""))
"""
    owner = subprocess.Popen([sys.executable, "-c", code])  # noqa: ASYNC220
    mark, deadline = f"98{os.getpid()}", time.monotonic() + 60
    while len(pids_with(mark)) < 3:  # owner, reaper, sleep
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    owner.kill()
    owner.wait()

    while pids_with(mark):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_container_gets_key_by_name_and_is_removed(endpoint: HttpRolloutEndpoint, tmp_path: Path) -> None:
    """The container engine is a script that records its arguments and runs the command without a container."""
    engine, calls = tmp_path / "engine", tmp_path / "calls"
    engine.write_text(
        f"#!{sys.executable} -IS\nimport os, sys, json\n"
        f"open({str(calls)!r}, 'a').write(json.dumps(sys.argv[1:]) + '\\n')\n"
        "if sys.argv[1] == 'run':\n    command = sys.argv[sys.argv.index('an-image') + 1:]\n"
        "    os.execv(command[0], command)\n"
    )
    engine.chmod(0o755)
    (tmp_path / "agent.py").write_text(PROGRAM + "    " + GOOD)
    agent_class: Any = type(
        "Contained",
        (AgentContainer,),
        {
            "image": "an-image",
            "engine": str(engine),
            "command": (sys.executable, "-IS", str(tmp_path / "agent.py")),
            "options": ("--memory=1g",),
        },
    )
    group = await run_agent(agent_class(contains_answer), endpoint)

    assert group.error is None
    run, removed = (json.loads(line) for line in calls.read_text().splitlines())
    name = run[run.index("--name") + 1]
    assert run[run.index("OPENAI_API_KEY") - 1] == "-e"
    assert not any("=" in part and part != "--memory=1g" for part in run)
    assert removed == ["rm", "-f", name]


def test_agent_command_with_invalid_settings_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"AgentCommand.command: expected a program"):
        AgentCommand(contains_answer)
    with pytest.raises(ConfigError, match=r"AgentContainer.image: expected the name"):
        AgentContainer(contains_answer)
    monkeypatch.setattr(confine, "missing_kernel_features", lambda: ["Landlock"])
    confined = type("Confined", (AgentCommand,), {"command": ("true",)})
    with pytest.raises(ConfigError, match=r"Confined: .*expected Landlock.*`confined = False`"):
        confined(contains_answer)
    assert type("Unconfined", (confined,), {"confined": False})(contains_answer)
