"""Configuration errors with real servers: the command prints one error, exits with 2 and leaves nothing behind.

The error must come before training and name the problem, the expected value and the fix. The tests need the
environments of `infra/servers/build.py`.
"""

from __future__ import annotations

import json
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
SHORT_RUN = ("recipe=embedded", "total_steps=2", "data.batch_size=4", "evaluation.examples=0")
ERROR_SECONDS = 120.0
"""Time limit of an error without a server start; the check of an interpreter imports the server."""
SERVER_START_SECONDS = 300.0
"""Time limit of an error that needs a server start; an idle machine needs one minute."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, hidden=32)


Rejected = Callable[..., str]


@pytest.fixture
def rejected(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path, record_property: Callable[[str, object], None]
) -> Rejected:
    """Function that runs a command that must fail before it starts a process, and returns its error message."""

    def run(kind: str, *settings: str, run_dir: Path = tmp_path / "run") -> str:
        begin, children = time.monotonic(), set(psutil.Process().children(recursive=True))
        common = (f"allocation={kind}:d1+fsdp:d1", f"model.path={model}", f"run_dir={run_dir}", *SHORT_RUN)
        code = main("gsm8k-grpo", [*common, *settings])
        seconds = time.monotonic() - begin
        record_property("seconds", round(seconds, 1))
        message = capsys.readouterr().err.splitlines()[-1]
        assert code == 2, message
        assert seconds < ERROR_SECONDS
        assert message.startswith("gsm8k-grpo: ConfigError: ")
        assert not (run_dir / "logs").exists()
        assert set(psutil.Process().children(recursive=True)) <= children
        return message

    return run


@pytest.mark.parametrize("kind", BOTH)
def test_interpreter_without_the_server_is_rejected(rejected, kind):
    python = sys.executable
    message = rejected(kind, f"rollout.server.python={python}")

    assert f"rollout.server.python={python} (Python 3." in message
    assert "found no such package" in message
    assert f"`python infra/servers/build.py {kind}`" in message


@pytest.mark.nightly
def test_interpreter_with_another_server_version_is_rejected(rejected, monkeypatch):
    python = interpreter_of("vllm")
    require_later_versions(monkeypatch)

    message = rejected("vllm", f"rollout.server.python={python}")

    assert f"rollout.server.python={python} (Python 3." in message
    assert ">=9.1,<9.2, found vllm" in message
    assert "`python infra/servers/build.py vllm`" in message


def require_later_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engines require server versions that do not exist yet."""
    for config in (VLLMEngineConfig, SGLangEngineConfig):
        program = config.program
        monkeypatch.setattr(
            config, "program", lambda self, p=program: replace(p(self), min_version="9.1", below_version="9.2")
        )


@pytest.mark.nightly  # a server needs minutes to fail
@pytest.mark.parametrize("kind", BOTH)
def test_model_that_the_server_cannot_load_fails_with_its_log(tmp_path, kind, record_property):
    model = make_tiny_model(tmp_path / "model", layers=1, hidden=32)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["UnknownForCausalLM"]}))
    begin, run_dir = time.monotonic(), tmp_path / "run"
    command = [Path(sys.executable).with_name("gsm8k-grpo"), f"allocation={kind}:d1+fsdp:d1", f"model.path={model}"]

    done = subprocess.run(
        [*command, f"rollout.server.python={interpreter_of(kind)}", f"run_dir={run_dir}", *SHORT_RUN],
        capture_output=True,
        text=True,
        timeout=SERVER_START_SECONDS,
    )

    record_property("seconds", round(time.monotonic() - begin, 1))
    assert done.returncode == 2, done.stderr
    assert "gsm8k-grpo: ServerStartError: rollout-0 " in done.stderr
    assert f"serve {model} in float32 on this machine" in done.stderr
    assert "UnknownForCausalLM" in done.stderr
    assert not (run_dir / "metrics.jsonl").exists()
    assert not weights_directory(run_dir).exists()
    leftover = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or ())]
    assert leftover == []


# ---- servers that the run did not start


@dataclass
class Attached:
    """A running server, and the run directory for which it was started."""

    name: str
    kind: Kind
    process: JobProcess
    faults: Path
    run_dir: Path

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings of a run that uses the server."""
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
def test_attached_server_with_another_key_is_rejected(rejected, monkeypatch, attached):
    monkeypatch.setenv("RL_RUN_KEY", "another key")

    message = rejected(attached.name, *attached.settings, run_dir=attached.run_dir)

    assert "answered 401: the request carries no valid key" in message
    assert "and set RL_RUN_KEY to its key" in message


@NIGHTLY
def test_attached_sglang_with_raw_logprobs_is_rejected(rejected, monkeypatch, attached):
    if attached.name == "vllm":
        pytest.skip("vLLM accepts no temperature above 2; it reports how it computes log-probs")
    monkeypatch.setenv("RL_RUN_KEY", KEY)
    attached.faults.write_text("temperature")

    message = rejected(attached.name, *attached.settings, run_dir=attached.run_dir)

    attached.faults.write_text("")
    assert "its log-probs are computed without the temperature: at temperature 10000" in message


@NIGHTLY
def test_attached_server_of_another_version_is_rejected(rejected, monkeypatch, attached):
    monkeypatch.setenv("RL_RUN_KEY", KEY)
    require_later_versions(monkeypatch)

    message = rejected(attached.name, *attached.settings, run_dir=attached.run_dir)
    assert f"it runs {attached.name} " in message
    assert f"but this run requires {attached.name}" in message
    assert ">=9.1,<9.2" in message


@NIGHTLY
def test_attached_server_of_another_kind_is_rejected(rejected, monkeypatch, attached, tmp_path, model):
    monkeypatch.setenv("RL_RUN_KEY", KEY)
    other = OTHER[attached.name]

    message = rejected(other, *attached.settings, run_dir=attached.run_dir)
    assert f"it runs {attached.name} " in message
    assert f"but this run requires {other}" in message

    message = rejected("embedded", *attached.settings, run_dir=attached.run_dir)
    # SGLang also has a route /model_info.
    expected = {"vllm": "/model_info answered 404", "sglang": "it reports no weights_dir"}
    assert expected[attached.name] in message

    with ServerProcess(model, tmp_path / "embedded.log", KEY) as embedded:
        settings = ("publish.route=disk", f"rollout.server.addresses=[{embedded.address}]")
        message = rejected(attached.name, *settings, run_dir=attached.run_dir)
    assert "/rl/info answered 404" in message
    assert "Start the server with `" in message
