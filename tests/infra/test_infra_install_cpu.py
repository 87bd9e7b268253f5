"""infra/install_cpu.sh installs torch for CPUs, and reports CUDA libraries in the environment."""

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "infra" / "install_cpu.sh"
CUDA = ("nvidia", "cuda", "triton")


def _install(path, environment, *extras):
    variables = {**os.environ, "PATH": path, "UV_PROJECT_ENVIRONMENT": str(environment)}
    return subprocess.run([SCRIPT, *extras], env=variables, capture_output=True, text=True, check=False)


@pytest.fixture
def uv(tmp_path):
    """A stub of uv that records its arguments and reads the list of installed packages from a file."""
    program = tmp_path / "uv"
    program.write_text(
        f"""#!/bin/bash
echo "$*" >>{tmp_path}/calls
case "$1 $2" in
"export "*) echo "torch==2.14.1" >"${{@: -1}}" ;;
"pip install") cp "${{@: 6:1}}" {tmp_path}/constraints ;;
"pip freeze") cat {tmp_path}/installed ;;
esac
"""
    )
    program.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "last"),
    [(("ray", "plot"), ["--editable", "apps[ray,plot]"]), (("--workspace",), ["--group", "dev"])],
    ids=["extras", "workspace"],
)
def test_install_pins_torch_to_the_cpu_build(uv, arguments, last):
    (uv / "installed").write_text("numpy==2.5.5\ntorch==2.14.1+cpu\n")

    done = _install(f"{uv}:{os.environ['PATH']}", uv / "venv", *arguments)

    assert done.returncode == 0, done.stderr
    calls = [line.split() for line in (uv / "calls").read_text().splitlines()]
    assert ("--package" in calls[0]) == (arguments != ("--workspace",))
    installs = [words[6:] for words in calls if words[:2] == ["pip", "install"]]
    assert installs == [["--torch-backend", "cpu", "torch"], last]
    assert (uv / "constraints").read_text().splitlines() == ["torch==2.14.1", "torch==2.14.1+cpu"]


def test_install_names_cuda_libraries_in_the_environment(uv):
    (uv / "installed").write_text("nvidia-cublas==13.1\ntorch==2.14.1\ntriton==3.8.0\n")

    done = _install(f"{uv}:{os.environ['PATH']}", uv / "venv")

    assert done.returncode == 1
    assert f"found nvidia-cublas==13.1 triton==3.8.0 in {uv / 'venv'}; remove it" in done.stderr


def _locked(*words):
    """Return the locked requirements of rl-apps."""
    if shutil.which("uv") is None:
        pytest.skip("no uv on PATH")
    command = ["uv", "export", "--quiet", "--frozen", "--no-hashes", "--no-annotate", "--package", "rl-apps", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def test_only_torch_depends_on_cuda_libraries():
    assert [line for line in _locked() if line.startswith(CUDA)]

    assert [line for line in _locked("--prune", "torch") if line.startswith(CUDA)] == []


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_install_provides_a_torch_without_cuda_and_runs(tmp_path, record_property):
    try:
        socket.create_connection(("download.pytorch.org", 443), timeout=10).close()
    except OSError as error:
        pytest.skip(f"download.pytorch.org cannot be reached: {error}")
    environment, begun = tmp_path / "venv", time.perf_counter()
    done = _install(os.environ["PATH"], environment)
    assert done.returncode == 0, done.stderr
    record_property("minutes to install without CUDA libraries", round((time.perf_counter() - begun) / 60, 1))
    size = sum(path.stat().st_size for path in environment.rglob("*") if path.is_file())
    record_property("GB of an environment without CUDA libraries", round(size / 1e9, 2))

    command = [environment / "bin" / "python", "-c", "import torch; print(torch.version.cuda)"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "None\n"
    command = [environment / "bin" / "gsm8k-grpo", "--dry-run"]
    dry_run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert dry_run.returncode == 0, dry_run.stderr
