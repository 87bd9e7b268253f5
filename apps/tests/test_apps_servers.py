"""Checks of the interpreter and of attached servers. No test here starts a server."""

import sys

import pytest

from rl_apps.cli.driver import main
from rl_apps.preflight.servers import check_flat, check_interpreter
from rl_contracts.errors import ConfigError, InferenceError
from rl_contracts.inference import ServerProgram


def _program(python=sys.executable, module="rl_contracts", distributions=("rl-contracts",), **bounds):
    return ServerProgram(python, module, distributions, "Do that.", **bounds)


@pytest.mark.parametrize("python", [sys.executable, ""])
def test_check_interpreter_supported_version_passes(python):
    check_interpreter(
        _program(python, distributions=("no-such-thing", "rl-contracts"), min_version="0.1", below_version="1.0")
    )


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (_program("/nowhere/python"), r"python=/nowhere/python: expected a Python interpreter, found .*No such file"),
        (_program("/bin/false"), r"/bin/false: expected a Python .*found exit code 1: no output"),
        (_program(distributions=("no-a", "no-b"), min_version="0.3"), "expected no-a or no-b >=0.3, found no"),
        (_program(min_version="99"), r"\(Python 3\.\d+\.\d+\): expected rl-contracts >=99, found rl-contracts 0\.1"),
        (
            _program(min_version="0.0.1", below_version="0.1"),
            r"expected rl-contracts >=0\.0\.1,<0\.1, found rl-contracts 0\.1\.0",
        ),
        (
            _program("", module="rl_contracts.not_there"),
            r"servers' Python, .*fails with ModuleNotFoundError: No module",
        ),
    ],
)
def test_check_interpreter_unusable_names_finding_and_remedy(program, message):
    with pytest.raises(ConfigError, match=rf"{message}.*Do that\."):
        check_interpreter(program)


def test_check_interpreter_passes_environment_variables(tmp_path, monkeypatch):
    (tmp_path / "needy.py").write_text("import os\nos.environ['NEEDED']")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ConfigError, match="KeyError: 'NEEDED'"):
        check_interpreter(_program("", module="needy"))

    check_interpreter(_program("", module="needy", env={"NEEDED": "1"}))


def test_check_interpreter_of_another_python_drops_pythonpath(tmp_path, monkeypatch):
    (tmp_path / "ours.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    with pytest.raises(ConfigError, match="No module named 'ours'"):
        check_interpreter(_program(module="ours"))


@pytest.mark.parametrize("arguments", [[], ["--dry-run"]])
def test_command_with_a_missing_interpreter_starts_nothing(capsys, tmp_path, arguments):
    code = main("gsm8k-grpo", ["rollout.server.python=/nowhere/python", f"run_dir={tmp_path / 'run'}", *arguments])

    out, err = capsys.readouterr()
    assert code == 2
    assert ("checking rl-inference in /nowhere/python" in out) == (not arguments)
    assert "rollout.server.python=/nowhere/python: expected a Python interpreter" in err
    assert "-m pip install rl-inference" in err
    assert not (tmp_path / "run").exists()


def test_addresses_must_match_servers_and_are_printed_with_commands(capsys):
    arguments = ["rollout.server.addresses=[http://10.0.0.7:80,https://b:9000]", "--dry-run"]
    assert main("gsm8k-grpo", arguments) == 2
    assert "addresses: expected 1, the d of embedded:d1 (or none, to let the run start servers)" in (
        capsys.readouterr().err
    )

    assert main("gsm8k-grpo", ["allocation=embedded:d2+fsdp:d1", *arguments]) == 0
    plan = capsys.readouterr().out
    assert "x rollout" not in plan
    assert "expected at https://b:9000: " in plan
    assert "rl_inference.embedded_server --host b --port 9000 --name rollout-1" in plan


def test_addresses_with_a_port_are_rejected(capsys):
    assert main("gsm8k-grpo", ["rollout.server.addresses=[http://b:80]", "rollout.port=80", "--dry-run"]) == 2
    assert "rollout.port with rollout.server.addresses: expected 0" in capsys.readouterr().err


@pytest.mark.parametrize("logprobs", [[-5.0, -5.0], [-5.04, -4.96]])
def test_check_flat_log_probs_of_the_whole_vocabulary_pass(logprobs):
    check_flat(logprobs, 148)
    check_flat(logprobs, None)


@pytest.mark.parametrize(
    ("logprobs", "vocabulary", "message"),
    [
        (
            [-3.2, -9.0],
            148,
            r"without the temperature: at temperature 10000 expected -5\.00 for every token, found -9\.00 to -3\.20",
        ),
        ([-3.2, -3.5], None, "computed without the temperature"),
        ([-2.99, -2.99], 148, r"only part of the vocabulary.*-log\(148\) = -5\.00 for every token, found -2\.99"),
    ],
)
def test_check_flat_other_log_probs_are_rejected(logprobs, vocabulary, message):
    with pytest.raises(InferenceError, match=message):
        check_flat(logprobs, vocabulary)
