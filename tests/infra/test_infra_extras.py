"""The extras with the real servers: an environment holds one of them, or neither, as the lock has it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _dry_run(tmp_path, *extras):
    """What `uv sync` would install for the apps with extras into an environment that is not there."""
    if shutil.which("uv") is None:
        pytest.skip("no uv on PATH")
    asked = [word for extra in extras for word in ("--extra", extra)]
    return subprocess.run(
        ["uv", "sync", "--dry-run", "--locked", "--offline", "--package", "rl-apps", *asked],
        cwd=ROOT,
        env={**os.environ, "UV_PROJECT_ENVIRONMENT": str(tmp_path / "venv")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(("extra", "other"), [("vllm", "sglang"), ("sglang", "vllm")])
def test_extra_installs_its_server_and_not_the_other(tmp_path, extra, other):
    said = _dry_run(tmp_path, extra).stderr

    assert f"+ {extra}==" in said
    assert f"+ {other}==" not in said


def test_both_server_extras_together_conflict(tmp_path):
    done = _dry_run(tmp_path, "vllm", "sglang")

    assert done.returncode != 0
    assert "incompatible with the declared conflicts" in done.stderr
