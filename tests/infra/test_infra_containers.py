"""Checks of the container files without a container daemon: names exist and versions agree."""

import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONTAINERS = ROOT / "infra" / "containers"
FILES = sorted(path.name for path in CONTAINERS.glob("Dockerfile.*") if path.suffix != ".dockerignore")
SERVERS = ("sglang", "vllm")


def _instructions(name):
    """Return (instruction, arguments) pairs of a file, with continued lines joined."""
    text = re.sub(r"(?m)^\s*#.*\n", "", (CONTAINERS / name).read_text()).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def _locked(name):
    packages = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    return {package["version"] for package in packages if package["name"] == name}


@pytest.mark.parametrize("name", FILES)
def test_base_images_are_pinned_and_synced_packages_exist(name):
    instructions = _instructions(name)
    stages = {match[1] for _, rest in instructions if (match := re.search(r" AS (\w+)$", rest))}

    bases = [rest.split()[0] for instruction, rest in instructions if instruction == "FROM"]
    assert all(base == "${SERVER}" or re.search(r":v?\d+\.\d+", base) for base in bases)
    assert ("${SERVER}" in bases) == bool(stages)
    assert stages in (set(), set(SERVERS))
    syncs = [rest for instruction, rest in instructions if instruction == "RUN" and "uv sync" in rest]
    assert ["--frozen" in sync for sync in syncs] == [True, False]
    assert all("--locked" in sync or "--frozen" in sync for sync in syncs)
    packages = {path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")} | {"rl-apps"}
    words = [word for sync in syncs for word in shlex.split(sync)]
    assert {after for word, after in pairwise(words) if word == "--package"} <= packages
    assert all((ROOT / source).is_file() for source in re.findall(r"type=bind,source=([^, ]+)", " ".join(syncs)))


def test_images_share_uv_and_ignored_files_and_run_as_a_user():
    text = {name: (CONTAINERS / name).read_text() for name in FILES}
    assert len({re.search(r"(?:UV_VERSION=|astral-sh/uv:)([\d.]+)", content)[1] for content in text.values()}) == 1
    assert len({(CONTAINERS / f"{name}.dockerignore").read_text() for name in FILES}) == 1
    for name in FILES:
        instructions = _instructions(name)
        users = [rest for instruction, rest in instructions if instruction == "USER"]
        assert users in (["rl"], ["1000"]), name
        last = [instruction for instruction, _ in instructions].index("USER")
        assert not [rest for instruction, rest in instructions[last:] if instruction == "RUN"], name
        assert any("PATH=/opt/venv/bin:$PATH" in rest for _, rest in instructions)


def _install_steps(name, server):
    """Return the two `uv sync` commands of an image file, with the server as the build argument."""
    syncs = [rest for instruction, rest in _instructions(name) if instruction == "RUN" and "uv sync" in rest]
    steps = [
        sync[sync.index("uv sync") :].replace('${SERVER:+--extra "$SERVER"}', f"--extra {server}") for sync in syncs
    ]
    return [shlex.split(step) for step in steps]


def _context(directory):
    """Copy the tracked files of the repository to a directory and return it."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, directory / name)
    return directory


def _uv(words, directory, environment):
    if shutil.which("uv") is None:
        pytest.skip("no uv on PATH")
    variables = os.environ | {"UV_PROJECT_ENVIRONMENT": str(environment), "UV_LINK_MODE": "hardlink"}
    variables.pop("VIRTUAL_ENV", None)
    done = subprocess.run(words, cwd=directory, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "server"),
    [("Dockerfile.cpu", ""), ("Dockerfile.cuda", "vllm"), ("Dockerfile.servers", "")],
)
def test_install_steps_resolve_in_an_empty_directory(name, server, tmp_path):
    """The first step must resolve with only the two files that its layer mounts."""
    third_party, whole = _install_steps(name, server)
    first = tmp_path / "first"
    first.mkdir()
    for source in ("uv.lock", "pyproject.toml"):
        shutil.copy(ROOT / source, first)
    (tmp_path / "whole").mkdir()

    output = _uv([*third_party, "--dry-run", "--offline"], first, tmp_path / "venv")
    assert "+ ray==" in output
    assert "+ torch==" in output
    assert not server or f"+ {server}==" in output
    assert "rl-apps" not in output
    assert "+ rl-apps" in _uv([*whole, "--dry-run", "--offline"], _context(tmp_path / "whole"), tmp_path / "venv")


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_cpu_install_steps_provide_a_working_command(tmp_path):
    third_party, whole = _install_steps("Dockerfile.cpu", "")
    context, environment = _context(tmp_path / "rl"), tmp_path / "venv"

    _uv(third_party, context, environment)
    assert not (environment / "bin" / "gsm8k-grpo").exists()
    _uv(whole, context, environment)
    shutil.rmtree(context)  # the environment must not depend on the sources

    (command,) = (json.loads(rest) for kind, rest in _instructions("Dockerfile.cpu") if kind == "CMD")
    (tmp_path / "elsewhere").mkdir()
    plan = [environment / "bin" / command[0], "cluster.device=cpu", "launcher=ray", "launcher.options.address=local"]
    done = subprocess.run(
        [*plan, "--dry-run"], cwd=tmp_path / "elsewhere", capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert str(environment) in done.stdout
    assert (environment / "bin" / "ray").exists()


def test_servers_image_has_the_locked_server_versions():
    text = (CONTAINERS / "Dockerfile.servers").read_text()

    tags = {server: {tag} for tag, server in re.findall(r"FROM \S+:v([\d.]+) AS (\w+)", text)}
    assert tags == {server: _locked(server) for server in SERVERS}


@pytest.mark.parametrize("server", SERVERS)
def test_command_of_the_servers_image_has_valid_settings(capsys, monkeypatch, server):
    from rl_apps.cli.driver import main

    (command,) = (rest for instruction, rest in _instructions("Dockerfile.servers") if instruction == "CMD")
    arguments = re.search(r"gsm8k-grpo ([^\"]+)", command)[1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")

    main("gsm8k-grpo", [*arguments.replace("$SERVER", server).split(), "cluster.device=cuda", "--dry-run"])

    # The interpreter is checked last and exists only in the image, so all other settings are valid.
    assert "rollout.server.python=server-python: expected a Python interpreter" in capsys.readouterr().err
