"""Servers, looked at before a run counts on them: the program of those that it starts, and those that run already."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from textwrap import shorten
from typing import Any
from urllib.parse import urlsplit

from rl_apps.run.app import Run
from rl_apps.run.components import attached, serve_spec, server_job
from rl_contracts import registry
from rl_contracts.config import GenerationConfig
from rl_contracts.data import STORED_ROUTES, ModelRequest
from rl_contracts.errors import ConfigError, InferenceError
from rl_contracts.inference import ServedModel, ServerProgram
from rl_contracts.models.directory import vocabulary_size
from rl_contracts.scheduler import RUN_KEY_VARIABLE

IMPORT_SECONDS = 600.0
"""For a server's module to be imported; a cold disk and a busy machine take minutes."""

FLAT = 1e4
"""A temperature at which every token is as likely as any other."""
FLAT_TOLERANCE = 0.1
"""Nats by which its log-probs may be off then: logits that are a hundred apart make a hundredth of one."""

SENTENCE = 400
"""Characters of what a server says; others answer with a page."""

_LOOK = """
import importlib, importlib.metadata, json, sys
found, problem = {}, ""
for name in sys.argv[2:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
if found:
    try:
        importlib.import_module(sys.argv[1])
    except BaseException as error:
        problem = "%s: %s" % (type(error).__name__, error)
print()
print(json.dumps(["%d.%d.%d" % sys.version_info[:3], found, problem]))
"""


def check_program(run: Run[Any], say: Callable[[str], None] = lambda _: None) -> None:
    """Refuse an interpreter that is not there, or has no such server of a version that will do; where the run starts
    servers.

    Args:
        say: told what takes seconds.

    Raises:
        ConfigError: says what was looked for, what there is, and the remedy.
    """
    starts = run.layout.rollout is not None and not attached(run.config, run.layout)
    if starts and (program := run.config.rollout.server.program()) is not None:
        say(f"checking {' or '.join(program.distributions)} in {program.python or sys.executable}")
        check_interpreter(program)


def check_interpreter(program: ServerProgram) -> None:
    """Run the interpreter of a kind of server, and see what it has.

    Raises:
        ConfigError: see `check_program`.
    """
    where = f"rollout.server.python={program.python}" if program.python else f"the servers' Python, {sys.executable}"
    python, found, problem = _probe_interpreter(program, where)
    expected = f"{where} (Python {python}): expected {program.describe_requirements}"
    if not found:
        raise ConfigError(f"{expected}, found no such package. {program.remedy}")
    (name, version), *_ = found.items()
    if not program.accepts(version):
        raise ConfigError(f"{expected}, found {name} {version}. {program.remedy}")
    if problem:
        raise ConfigError(
            f"{expected} that can be imported, found {name} {version}, of which `import {program.module}` ends with "
            f"{problem}. {program.remedy}"
        )


def _probe_interpreter(program: ServerProgram, where: str) -> tuple[str, dict[str, str], str]:
    """Ask the interpreter: its version, versions of what is installed, and what is wrong with the import."""
    own = {} if program.python else dict(os.environ)  # where modules of this interpreter lie is nothing to another
    environment = {**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, **own, **program.env}
    command = [program.python or sys.executable, "-c", _LOOK, program.module, *program.distributions]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=IMPORT_SECONDS)
        python, found, problem = json.loads(done.stdout.splitlines()[-1])
    except OSError as error:
        raise ConfigError(f"{where}: expected a Python interpreter, found {error}. {program.remedy}") from error
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{where}: expected `import {program.module}` within {IMPORT_SECONDS:g} s, found that it hangs."
        ) from None
    except (IndexError, ValueError):
        output = (done.stderr or done.stdout).strip().splitlines()
        last = output[-1] if output else "nothing said"
        raise ConfigError(
            f"{where}: expected a Python interpreter that imports {program.module}, found exit code {done.returncode}: "
            f"{last}. {program.remedy}"
        ) from None
    return python, found, problem


def check_attached(run: Run[Any], first_version: int) -> None:
    """Refuse servers that run already and that this run cannot use; nothing where it starts its own.

    Args:
        first_version: of the weights that the run puts on them at its start, at most.

    Raises:
        ConfigError: names the first one, what is wrong with it, and the command that would be right.
    """

    for index, address in enumerate(attached(run.config, run.layout)):
        try:
            asyncio.run(_probe_server(run, address, first_version))
        except InferenceError as error:
            why = shorten(str(error), SENTENCE).rstrip(".")
            raise ConfigError(
                f"rollout.server.addresses: {address} is no server that this run can use: {why}. "
                f"Expected one that was started with `{command_of(run, address, index)}`, and its key in "
                f"{RUN_KEY_VARIABLE}."
            ) from error


async def _probe_server(run: Run[Any], address: str, first_version: int) -> None:
    """Ask one server what it is, and let it generate a few tokens.

    Raises:
        InferenceError: it will not do; in words that go on a sentence about it.
    """
    assert run.layout.rollout is not None
    made = registry.load("rl.inference_engines", run.layout.rollout.backend)
    settings, spec = run.config.rollout, serve_spec(run)
    client = made(settings.server, spec, replace(settings.client, rejoin_timeout=0.0, probe_interval=0.0))
    client.initialize([address], os.environ.get(RUN_KEY_VARIABLE, ""))
    try:
        for server in client.servers:
            description = await client.describe(server)
            if description is not None:
                _check_description(description, run, first_version)
        generation = GenerationConfig(max_new_tokens=16, temperature=FLAT, ignore_eos=True)
        response = await client.agenerate(ModelRequest(list(range(1, 9)), generation, seed=1))
        check_flat(response.logprobs, vocabulary_size(spec.model_path))
    finally:
        await client.destroy()


def _check_description(description: ServedModel, run: Run[Any], first_version: int) -> None:
    route, program = run.config.publish.route, run.config.rollout.server.program()
    description.check(serve_spec(run), program, route in STORED_ROUTES)
    if description.version > first_version:
        raise InferenceError(
            f"it serves version {description.version} of another run's weights, and this run begins with version "
            f"{first_version} (start it anew)"
        )


def check_flat(logprobs: Sequence[float], vocabulary: int | None) -> None:
    """Whether log-probs of tokens that were sampled at the temperature `FLAT` are those of logits / temperature over
    the whole vocabulary: all the same then, -log(vocabulary).

    Raises:
        InferenceError: they are not.
    """
    least, most = min(logprobs), max(logprobs)
    expected = -math.log(vocabulary) if vocabulary else most
    if most - least > FLAT_TOLERANCE:
        raise InferenceError(
            f"its log-probs are not of logits / temperature, but raw: at temperature {FLAT:g} expected {expected:.2f} "
            f"for every token, found {least:.2f} to {most:.2f}"
        )
    if abs(most - expected) > FLAT_TOLERANCE:
        raise InferenceError(
            f"its log-probs are those of a part of the vocabulary, by a top-k or top-p of its own: at temperature "
            f"{FLAT:g} expected {expected:.2f} for every token of {vocabulary}, found {most:.2f}"
        )


def command_of(run: Run[Any], address: str, index: int = 0) -> str:
    """How this run would have started a server, for whoever starts it by hand."""
    job, at = server_job(run), urlsplit(address)
    words = [
        text.replace("{index}", str(index)).replace("{host}", at.hostname or "").replace("{port}", str(at.port or 80))
        for text in (*(f"{name}={value}" for name, value in job.env.items()), *job.command)
    ]
    return shlex.join(words)
