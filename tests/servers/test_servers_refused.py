"""Mistakes with real servers: each is one error that says what was expected, what was found and the remedy, with exit
code 2, before training starts, and nothing is left behind.

The environments are those that `infra/servers/build.py` makes; tests are skipped where there are none.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
from real_servers import KEY, Kind, faulty, interpreter_of, kind_of

from rl_apps.cli.driver import main
from rl_apps.run.components import weights_directory
from rl_contracts.data import ServeSpec
from rl_contracts.testing.models import make_tiny_model
from rl_inference import SGLangEngineConfig, VLLMEngineConfig
from rl_inference.testing import JobProcess, ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NIGHTLY = pytest.mark.nightly
BOTH = ["vllm", pytest.param("sglang", marks=NIGHTLY)]
OTHER = {"vllm": "sglang", "sglang": "vllm"}
FEW = ("recipe=embedded", "total_steps=2", "data.batch_size=4", "evaluation.rows=0")
SOON = 120.0
"""Seconds within which a mistake is told where nothing is started; to look at an interpreter imports the server."""
STARTED = 300.0
"""Where a server has to be started to find it out; a minute on an idle machine."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, hidden=32)


Refused = Callable[..., str]


@pytest.fixture
def refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path, record_property: Callable[[str, object], None]
) -> Refused:
    """`refused(kind, *settings)`: the one sentence of a command that starts nothing and leaves nothing behind."""

    def ask(kind: str, *settings: str, run_dir: Path = tmp_path / "run") -> str:
        begin, children = time.monotonic(), set(psutil.Process().children(recursive=True))
        own = (f"allocation={kind}:d1+fsdp:d1", f"model.path={model}", f"run_dir={run_dir}", *FEW)
        code = main("gsm8k-grpo", [*own, *settings])
        seconds = time.monotonic() - begin
        record_property("seconds", round(seconds, 1))
        told = capsys.readouterr().err.splitlines()[-1]
        assert code == 2, told
        assert seconds < SOON
        assert told.startswith("gsm8k-grpo: ConfigError: ")
        assert not (run_dir / "logs").exists()
        assert set(psutil.Process().children(recursive=True)) <= children
        return told

    return ask


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_port_in_use_is_rejected(refused, kind):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        told = refused(kind, f"rollout.port={port}")

    assert f"port {port} is in use by process" in told


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_interpreter_without_the_server_is_rejected(refused, kind):
    for python in (sys.executable, str(interpreter_of(OTHER[kind]))):
        told = refused(kind, f"rollout.server.python={python}")

        assert f"rollout.server.python={python} (Python 3." in told
        assert "found no such package" in told
        assert f"`python infra/servers/build.py {kind}`" in told
    assert "expected a Python interpreter, found" in refused(kind, "rollout.server.python=/no/such/python")


@pytest.mark.nightly
@pytest.mark.parametrize("kind", BOTH)
def test_interpreter_with_another_server_version_is_rejected(refused, monkeypatch, kind):
    python = interpreter_of(kind)
    later(monkeypatch)

    told = refused(kind, f"rollout.server.python={python}")

    assert f"rollout.server.python={python} (Python 3." in told
    assert "expected " in told
    assert f"{kind}" in told
    assert f">=9.1,<9.2, found {kind}" in told
    assert f"`python infra/servers/build.py {kind}`" in told


def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the run were made for versions that are still to come."""
    for config in (VLLMEngineConfig, SGLangEngineConfig):
        program = config.program
        monkeypatch.setattr(
            config, "program", lambda self, p=program: replace(p(self), min_version="9.1", below_version="9.2")
        )


@pytest.mark.nightly  # a server takes minutes to give up
@pytest.mark.parametrize("kind", BOTH)
def test_model_that_the_server_cannot_load_fails_with_its_log(tmp_path, kind, record_property):
    model = make_tiny_model(tmp_path / "model", layers=1, hidden=32)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["NobodysForCausalLM"]}))
    begin, run_dir = time.monotonic(), tmp_path / "run"
    command = [Path(sys.executable).with_name("gsm8k-grpo"), f"allocation={kind}:d1+fsdp:d1", f"model.path={model}"]

    done = subprocess.run(
        [*command, f"rollout.server.python={interpreter_of(kind)}", f"run_dir={run_dir}", *FEW],
        capture_output=True,
        text=True,
        timeout=STARTED,
    )

    record_property("seconds", round(time.monotonic() - begin, 1))
    assert done.returncode == 2, done.stderr
    assert "gsm8k-grpo: ServerStartError: rollout-0 " in done.stderr
    assert f"serve {model} in float32 on this machine" in done.stderr
    assert "NobodysForCausalLM" in done.stderr
    assert not (run_dir / "metrics.jsonl").exists()
    assert not weights_directory(run_dir).exists()
    left = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or ())]
    assert left == []


# ---- servers that run already


@dataclass
class Attached:
    """A real server, and the run that it was started for."""

    name: str
    kind: Kind
    process: JobProcess
    faults: Path
    run_dir: Path

    @property
    def settings(self) -> tuple[str, ...]:
        """Of a run that uses it."""
        return ("publish.route=disk", f"rollout.server.addresses=[{self.process.address}]")


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def attached(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Iterator[Attached]:
    directory, kind = tmp_path_factory.mktemp(request.param), kind_of(request.param)
    run_dir, faults = directory / "run", directory / "faults"
    faults.write_text("")
    spec = ServeSpec(str(model), device="cpu", weights_dir=str(weights_directory(run_dir, "disk")), cpus=1)
    job = faulty(kind.job(spec), faults)
    with JobProcess(model, directory / "server.log", KEY, job=job) as process:
        yield Attached(request.param, kind, process, faults, run_dir)


@NIGHTLY
def test_attached_server_with_another_key_is_rejected(refused, monkeypatch, attached):
    monkeypatch.setenv("RL_RUN_KEY", "another key")

    told = refused(attached.name, *attached.settings, run_dir=attached.run_dir)

    assert "answered 401: the request carries no valid key" in told
    assert "and its key in RL_RUN_KEY" in told


@NIGHTLY
def test_attached_server_with_raw_logprobs_or_other_version_is_rejected(refused, monkeypatch, attached):
    monkeypatch.setenv("RL_RUN_KEY", KEY)
    attached.faults.write_text("temperature")
    told = refused(attached.name, *attached.settings, run_dir=attached.run_dir)
    assert "its log-probs are not of logits / temperature, but raw: at temperature 10000 expected -" in told

    attached.faults.write_text("")
    later(monkeypatch)
    told = refused(attached.name, *attached.settings, run_dir=attached.run_dir)
    assert f"it runs {attached.name} " in told
    assert f"but this run requires {attached.name}" in told
    assert ">=9.1,<9.2" in told


@NIGHTLY
def test_attached_server_of_another_kind_is_rejected(refused, monkeypatch, attached, tmp_path, model):
    monkeypatch.setenv("RL_RUN_KEY", KEY)
    other = OTHER[attached.name]

    told = refused(other, *attached.settings, run_dir=attached.run_dir)
    assert f"it runs {attached.name} " in told
    assert f"but this run requires {other}" in told

    told = refused("embedded", *attached.settings, run_dir=attached.run_dir)
    # SGLang has a route of that name
    expected = {"vllm": "/model_info answered 404", "sglang": "it reports no weights_dir"}
    assert expected[attached.name] in told

    with ServerProcess(model, tmp_path / "embedded.log", KEY) as embedded:
        settings = ("publish.route=disk", f"rollout.server.addresses=[{embedded.address}]")
        told = refused(attached.name, *settings, run_dir=attached.run_dir)
    assert "/rl/info answered 404" in told
    assert "Expected one that was started with `" in told
