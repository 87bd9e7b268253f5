"""`clevr-count-sft` and then `clevr-count-grpo`, with their default settings, teach a tiny model to count."""

import subprocess
import sys
from pathlib import Path

import pytest

from rl_contracts.runtime.json_lines import json_lines
from rl_contracts.runtime.run_files import steps_in

pytest.importorskip("torchvision")
SHUFFLED = Path(__file__).parents[1] / "support" / "shuffled_scenes.py"
GUESSING = 1 / 4
"""Fraction of scenes with one of the four counts."""


def _run(directory: Path, name: str, *settings: str, trial: str = "default") -> list[float]:
    """Run a command in a directory, and return the held-out accuracy of each evaluation."""
    command = [str(Path(sys.executable).parent / name), f"trial={trial}", *settings]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    records = json_lines(directory / "runs" / name / trial / "metrics.jsonl")
    return [record["eval/accuracy"] for record in records if record.get("eval/accuracy") is not None]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with a run of `clevr-count-sft`."""
    directory = tmp_path_factory.mktemp("vision")
    _run(directory, "clevr-count-sft")
    return directory


@pytest.fixture(scope="module")
def accuracies(directory: Path) -> list[float]:
    return _run(directory, "clevr-count-grpo")


@pytest.mark.guarantee(
    "After `clevr-count-sft`, `clevr-count-grpo` raises held-out accuracy by at least 0.15, to at least 0.85, with the "
    "default settings of both.",
    area="algorithms",
)
@pytest.mark.nightly
def test_clevr_count_grpo_raises_accuracy_after_sft(accuracies: list[float], record_property) -> None:
    record_property("held-out accuracy before and after", f"{accuracies[0]:.3f}, {accuracies[-1]:.3f}")

    assert accuracies[-1] >= max(0.85, accuracies[0] + 0.15)


@pytest.mark.nightly
def test_accuracy_with_shuffled_images_is_that_of_guessing(directory: Path, accuracies: list[float]) -> None:
    checkpoints = directory / "runs" / "clevr-count-grpo" / "default" / "checkpoints"
    model = checkpoints / f"step_{steps_in(checkpoints)[-1]}"
    settings = [f"model.path={model}", "recipe=embedded", f"data.name={SHUFFLED}:ShuffledScenes", "total_steps=1"]

    shuffled = _run(directory, "clevr-count-grpo", *settings, trial="shuffled")

    assert abs(shuffled[0] - GUESSING) < 0.08
