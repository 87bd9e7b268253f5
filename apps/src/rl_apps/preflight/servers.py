"""Checks of servers before a run: the program of servers to start, and servers that already run."""

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
"""Time limit in seconds for the import of a server's module. On a busy machine, the import can take minutes."""

FLAT = 1e4
"""Sampling temperature at which all tokens are equally likely."""
FLAT_TOLERANCE = 0.1
"""Maximum spread of the log-probs at temperature `FLAT`, in nats. Logits that differ by 100 add a spread of 0.01."""

SENTENCE = 400
"""Maximum length of a quoted server message, in characters; some servers reply with a page."""

_PROBE_PROGRAM = """
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
    """Check that the Python interpreter of the run's servers exists and has a supported version of their package.

    Attached servers are not checked.

    Args:
        say: called with a progress message before the check.

    Raises:
        ConfigError: the interpreter or the package is missing, or its version is not supported.
    """
    starts = run.layout.rollout is not None and not attached(run.config, run.layout)
    if starts and (program := run.config.rollout.server.program()) is not None:
        say(f"checking {' or '.join(program.distributions)} in {program.python or sys.executable}")
        check_interpreter(program)


def check_interpreter(program: ServerProgram) -> None:
    """Run the interpreter of a kind of server, and check the installed packages and the import.

    Raises:
        ConfigError: see `check_program`.
    """
    where = f"rollout.server.python={program.python}" if program.python else f"the servers' Python, {sys.executable}"
    python, versions, problem = _probe_interpreter(program, where)
    expected = f"{where} (Python {python}): expected {program.describe_requirements}"
    if not versions:
        raise ConfigError(f"{expected}, found no such package. {program.remedy}")
    (name, version), *_ = versions.items()
    if not program.accepts(version):
        raise ConfigError(f"{expected}, found {name} {version}. {program.remedy}")
    if problem:
        raise ConfigError(
            f"{expected}, found {name} {version}, but `import {program.module}` fails with {problem}. {program.remedy}"
        )


def _probe_interpreter(program: ServerProgram, where: str) -> tuple[str, dict[str, str], str]:
    """Run the interpreter and return its Python version, versions of installed packages, and the import error or ""."""
    # module paths of this interpreter are not valid for another one
    inherited = {} if program.python else dict(os.environ)
    environment = {**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, **inherited, **program.env}
    command = [program.python or sys.executable, "-c", _PROBE_PROGRAM, program.module, *program.distributions]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=IMPORT_SECONDS)
        python, versions, problem = json.loads(done.stdout.splitlines()[-1])
    except OSError as error:
        raise ConfigError(f"{where}: expected a Python interpreter, found {error}. {program.remedy}") from error
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{where}: `import {program.module}` did not end within {IMPORT_SECONDS:g} s. Run this import in that "
            "interpreter to find the cause."
        ) from None
    except (IndexError, ValueError):
        output = (done.stderr or done.stdout).strip().splitlines()
        last = output[-1] if output else "no output"
        raise ConfigError(
            f"{where}: expected a Python interpreter that imports {program.module}, found exit code {done.returncode}: "
            f"{last}. {program.remedy}"
        ) from None
    return python, versions, problem


def check_attached(run: Run[Any], first_version: int) -> None:
    """Check the attached servers of a run: kind, model, version and log-probs. Does nothing if the run starts its own.

    Args:
        first_version: version with which the run begins; a server with a later version is rejected.

    Raises:
        ConfigError: the run cannot use a server; the message has the reason and the command that starts the server.
    """

    for index, address in enumerate(attached(run.config, run.layout)):
        try:
            asyncio.run(_probe_server(run, address, first_version))
        except InferenceError as error:
            why = shorten(str(error), SENTENCE).rstrip(".")
            raise ConfigError(
                f"rollout.server.addresses: this run cannot use the server {address}: {why}. "
                f"Start the server with `{command_of(run, address, index)}`, and set {RUN_KEY_VARIABLE} to its key."
            ) from error


async def _probe_server(run: Run[Any], address: str, first_version: int) -> None:
    """Ask one server for its description, and let it generate a few tokens.

    Raises:
        InferenceError: the run cannot use the server. The message refers to the server as "it".
    """
    assert run.layout.rollout is not None
    engine_class = registry.load("rl.inference_engines", run.layout.rollout.backend)
    settings, spec = run.config.rollout, replace(serve_spec(run), rejoin_timeout=0.0)
    client = engine_class(settings.server, spec, settings.client)
    client.initialize([address], os.environ.get(RUN_KEY_VARIABLE, ""))
    try:
        for server in client.servers:
            description = await client.describe(server)
            if description is not None:
                _check_description(description, run, first_version)
        temperature = min(FLAT, client.capabilities.max_temperature)
        generation = GenerationConfig(max_new_tokens=16, temperature=temperature, ignore_eos=True)
        response = await client.agenerate(ModelRequest(list(range(1, 9)), generation, seed=1))
        if temperature == FLAT:  # vLLM accepts no such temperature; it reports its `logprobs_mode` instead
            check_flat(response.logprobs, vocabulary_size(spec.model_path))
    finally:
        await client.destroy()


def _check_description(description: ServedModel, run: Run[Any], first_version: int) -> None:
    route, program = run.config.publish.route, run.config.rollout.server.program()
    description.check(serve_spec(run), program, route in STORED_ROUTES)
    if description.version > first_version:
        raise InferenceError(
            f"it serves weight version {description.version}, but this run begins with version {first_version}; "
            "restart the server"
        )


def check_flat(logprobs: Sequence[float], vocabulary: int | None) -> None:
    """Check that log-probs are computed from logits / temperature, over the whole vocabulary.

    At temperature `FLAT`, each log-prob must then be -log(vocabulary).

    Args:
        logprobs: log-probs of tokens sampled at temperature `FLAT`.
        vocabulary: number of tokens in the vocabulary, or None if unknown.

    Raises:
        InferenceError: the log-probs ignore the temperature, or cover only part of the vocabulary.
    """
    least, most = min(logprobs), max(logprobs)
    expected = -math.log(vocabulary) if vocabulary else most
    if most - least > FLAT_TOLERANCE:
        raise InferenceError(
            f"its log-probs are computed without the temperature: at temperature {FLAT:g} expected {expected:.2f} for "
            f"every token, found {least:.2f} to {most:.2f}"
        )
    if abs(most - expected) > FLAT_TOLERANCE:
        raise InferenceError(
            f"its log-probs cover only part of the vocabulary, due to its top-k or top-p: at temperature {FLAT:g} "
            f"expected -log({vocabulary}) = {expected:.2f} for every token, found {most:.2f}"
        )


def command_of(run: Run[Any], address: str, index: int = 0) -> str:
    """Return the command to start a server of this run manually."""
    job, url = server_job(run), urlsplit(address)
    words = [
        text.replace("{index}", str(index)).replace("{host}", url.hostname or "").replace("{port}", str(url.port or 80))
        for text in (*(f"{name}={value}" for name, value in job.env.items()), *job.command)
    ]
    return shlex.join(words)
