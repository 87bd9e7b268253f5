"""A command that was killed goes on where it was, when it is started again with the same run directory."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rl_contracts.testing.models import make_tiny_model

BIN = Path(sys.executable).parent


def _command(model: Path, run_dir: Path) -> list[str]:
    settings = {
        "run_dir": run_dir,
        "model.path": model,
        "total_steps": 12,
        "data.batch_size": 4,
        "evaluation.rows": 8,
        "recover.every": 3,
    }
    return [str(BIN / "gsm8k-sft"), *(f"{name}={value}" for name, value in settings.items())]


def _records(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    timed = ("time/", "throughput/", "memory/")
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(timed)} for line in lines]


@pytest.mark.slow
def test_sft_killed_and_started_again_ends_with_the_same_weights(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", layers=1, hidden=32)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    subprocess.run(_command(model, whole), check=True, capture_output=True, timeout=200)
    process = subprocess.Popen(_command(model, cut), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list((cut / "recover").glob("step_*")):
        assert process.poll() is None, "it ended before it had a recover point"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait(10)

    done = subprocess.run(_command(model, cut), check=True, capture_output=True, text=True, timeout=200)

    assert "12/12" in done.stdout
    found, expected = (load_file(d / "checkpoints" / "step_12" / "model.safetensors") for d in (cut, whole))
    assert all(found[name].equal(expected[name]) for name in expected)
    assert _records(cut) == _records(whole)
