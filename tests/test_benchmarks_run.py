"""The benchmarks run and end with one JSON object."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent / "benchmarks"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_grpo_step_quick_last_line_has_the_figures_of_both_cases() -> None:
    command = [sys.executable, str(BENCHMARKS / "grpo_step.py"), "--quick"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=560, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    figures = json.loads(result.stdout.splitlines()[-1])
    for case in ("uniform", "long_tail"):
        ours = figures[case]["ours"]
        assert ours["completions_per_s"] > 0
        assert ours["tokens_per_s"] > 0
    assert figures["uniform"]["ours"]["mean_tokens"] == 64


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_embedded_server_quick_last_line_has_the_ratio_of_both_cases() -> None:
    command = [sys.executable, str(BENCHMARKS / "embedded_server.py"), "--quick"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    figures = json.loads(result.stdout.splitlines()[-1])
    assert figures["logprob_error"] < 2e-5
    for case in ("uniform", "long_tail"):
        assert figures[case]["tokens_per_s"]["ours"] > 0
        assert figures[case]["ratio"]["transformers"] > 0
    assert figures["long_tail"]["requests"] == 80
