"""Extras with inference servers: the lock file allows at most one of them per environment."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _dry_run(tmp_path, *extras):
    """Run `uv sync --dry-run` for rl-apps with extras, into an empty environment."""
    if shutil.which("uv") is None:
        pytest.skip("no uv on PATH")
    flags = [word for extra in extras for word in ("--extra", extra)]
    return subprocess.run(
        ["uv", "sync", "--dry-run", "--locked", "--offline", "--package", "rl-apps", *flags],
        cwd=ROOT,
        env={**os.environ, "UV_PROJECT_ENVIRONMENT": str(tmp_path / "venv")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(("extra", "other"), [("vllm", "sglang"), ("sglang", "vllm")])
def test_extra_installs_its_server_and_not_the_other(tmp_path, extra, other):
    output = _dry_run(tmp_path, extra).stderr

    assert f"+ {extra}==" in output
    assert f"+ {other}==" not in output


def test_both_server_extras_together_conflict(tmp_path):
    done = _dry_run(tmp_path, "vllm", "sglang")

    assert done.returncode != 0
    assert "incompatible with the declared conflicts" in done.stderr
