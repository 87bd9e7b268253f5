"""Errors of `rl serve` before it loads a model."""

import os
import shutil
import socket

import pytest

from rl_apps.cli.main import main
from rl_contracts.testing.models import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", layers=1, hidden=32)


@pytest.mark.parametrize(
    ("directory", "options", "message"),
    [
        ("nowhere", (), "expected the directory of a run, a checkpoint or a Hugging Face model"),
        ("mute", (), "expected a tokenizer with a chat template"),
        ("tiny", ("--host", "0.0.0.0"), "environment variable RL_API_KEY, found '0.0.0.0'"),
        ("tiny", ("--port", "70000"), "port: expected"),
    ],
)
def test_serve_invalid_model_or_address_reports_one_line(
    model, tmp_path, monkeypatch, capsys, directory, options, message
):
    monkeypatch.delenv("RL_API_KEY", raising=False)
    for name in ("tiny", "mute"):
        shutil.copytree(model, tmp_path / name)
    (tmp_path / "mute" / "chat_template.jinja").unlink()

    assert main(["serve", str(tmp_path / directory), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_serve_port_in_use_is_rejected_before_the_model_loads(model, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code = main(["serve", str(model), "--port", str(taken.getsockname()[1])])

    assert code == 2
    assert f"is in use by process {os.getpid()}" in capsys.readouterr().err
