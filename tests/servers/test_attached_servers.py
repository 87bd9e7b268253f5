"""`rollout.server.addresses`: a run checks servers that it did not start, then uses them."""

import http.server
import json
import os
import sys
import threading

import pytest

from rl_apps.cli.driver import main
from rl_apps.embedded.prepare import EmbeddedRecipe, ModelShape, prepare_embedded
from rl_apps.run.components import weights_directory
from rl_inference.testing import ServerProcess

KEY = "the key of the servers"
SHORT_RUN = ("recipe=embedded", "total_steps=2", "data.batch_size=4", "evaluation.examples=8", "evaluation.every=2")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return prepare_embedded(1, EmbeddedRecipe(warm_up=None), cache_dir=tmp_path_factory.mktemp("cache"))


def _server(model, directory, name, **options):
    options = {"weights_dir": weights_directory(directory / "run", "disk"), **options}
    return ServerProcess(model, directory / f"{name}.log", KEY, options=options)


def _command(monkeypatch, directory, model, *addresses, key=KEY):
    monkeypatch.setenv("RL_RUN_KEY", key)
    settings = {
        "allocation": f"embedded:d{len(addresses)}+fsdp:d1",
        "model.path": model,
        "run_dir": directory / "run",
        "publish.route": "disk",
        "rollout.server.addresses": f"[{','.join(addresses)}]",
    }
    return main("gsm8k-grpo", [*(f"{name}={value}" for name, value in settings.items()), *SHORT_RUN])


def _rejection(monkeypatch, capsys, directory, model, address, **options):
    """Run a command that must fail before it starts a process; return its error message."""
    code = _command(monkeypatch, directory, model, address, **options)
    err = capsys.readouterr().err.splitlines()[-1]
    assert code == 2
    assert err.startswith("gsm8k-grpo: ConfigError: rollout.server.addresses: ")
    assert f"this run cannot use the server {address}: " in err
    assert f"-m rl_inference.embedded_server --host 127.0.0.1 --port {address.rpartition(':')[2]} " in err
    assert not (directory / "run" / "logs").exists()
    return err


def test_attached_address_without_a_suitable_server_is_rejected(monkeypatch, capsys, tmp_path, model):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    try:
        assert "/model_info answered 404" in _rejection(monkeypatch, capsys, tmp_path, model, address)
    finally:
        server.shutdown()
        server.server_close()

    assert "Cannot connect to host" in _rejection(monkeypatch, capsys, tmp_path, model, address)


@pytest.mark.nightly
def test_attached_server_with_other_key_model_or_directory_is_rejected(monkeypatch, capsys, tmp_path, model):
    other = prepare_embedded(1, EmbeddedRecipe(shape=ModelShape(layers=1), warm_up=None), cache_dir=tmp_path / "cache")
    with _server(model, tmp_path, "server") as server:
        message = _rejection(monkeypatch, capsys, tmp_path, model, server.address, key="another")
        assert "answered 401: the request carries no valid key" in message
        assert "and set RL_RUN_KEY to its key" in message

        message = _rejection(monkeypatch, capsys, tmp_path, other, server.address)
        assert f"it serves the model {model}, but this run requires {other}" in message

        message = _rejection(monkeypatch, capsys, tmp_path / "elsewhere", model, server.address)
        assert f"weight updates from {tmp_path}/run/weights, but this run writes them to {tmp_path}/else" in message


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"version": 7}, "it serves weight version 7, but this run begins with version 0"),
        ({"weights_dir": ""}, "it does not accept weight updates"),
    ],
)
def test_attached_server_at_another_version_or_read_only_is_rejected(
    monkeypatch, capsys, tmp_path, model, options, message
):
    with _server(model, tmp_path, "server", **options) as server:
        assert message in _rejection(monkeypatch, capsys, tmp_path, model, server.address)


@pytest.mark.nightly
def test_attached_server_with_raw_or_truncated_logprobs_is_rejected(monkeypatch, capsys, tmp_path, model):
    fault = tmp_path / "fault"
    fault.write_text("")
    monkeypatch.setenv("FAULT_FILE", str(fault))
    faulty = _server(model, tmp_path, "server")
    faulty.command = (sys.executable, "-m", "rl_inference.embedded_server.fault_injection")
    with faulty as server:
        for name, message in (
            (
                "temperature",
                "its log-probs are computed without the temperature: at temperature 10000",
            ),
            ("truncated", "its log-probs cover only part of the vocabulary"),
        ):
            fault.write_text(name)
            assert message in _rejection(monkeypatch, capsys, tmp_path, model, server.address)


def test_attached_server_without_info_is_rejected_by_its_logprobs(monkeypatch, capsys, tmp_path, model):
    kind = "rl_contracts.testing.null_inference:NullInferenceEngine"  # its model has another vocabulary
    settings = (f"allocation={kind}:d1+fsdp:d1", "rollout.server.addresses=[http://null:1]", f"model.path={model}")

    assert main("gsm8k-grpo", [*settings, f"run_dir={tmp_path / 'run'}", *SHORT_RUN]) == 2

    message = "this run cannot use the server http://null:1: its log-probs cover only part of the vocabulary"
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_attached_servers_are_used_and_left_running(monkeypatch, tmp_path, model):
    with _server(model, tmp_path, "one") as one, _server(model, tmp_path, "two") as two:
        code = _command(monkeypatch, tmp_path, model, one.address, two.address)

        assert code == 0
        assert one.exit_code is two.exit_code is None
    run = tmp_path / "run"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["server/servers"] == 2
    assert sorted(os.listdir(run / "logs")) == ["actor-0.log", "reward-0.log"]
    assert KEY not in (run / "config.yaml").read_text()
