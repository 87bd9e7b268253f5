"""docs/coming-from.md: our names are settings that there are, and TRL's are of the version that is named."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from rl_apps.compose import describe
from rl_apps.gsm8k_grpo import APP
from rl_apps.synonyms import SYNONYMS

PAGE = Path(__file__).parents[1] / "docs" / "coming-from.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text().replace("\\|", "").splitlines()
    if line.startswith("| ") and not line.startswith("| AReaL")
]
NO_SETTINGS = {"+", "RolloutWorkflow.arun_episode", "Trajectory", "sglang:d4+fsdp:d4"}
"""Code in our column that is no setting."""


def _code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_our_names_are_settings() -> None:
    configs = [APP.config([f"allocation={server}:d1+fsdp:d1"]) for server in ("embedded", "vllm")]
    keys = {key for config in configs for key, _, _ in describe(config)}
    named = [name.partition("=")[0] for row in ROWS for name in _code(row[3]) if name not in NO_SETTINGS]

    assert len(named) > 60
    assert [name for name in named if not any(key == name or key.startswith(f"{name}.") for key in keys)] == []


def test_names_of_trl_are_its_own() -> None:
    spec, training = find_spec("trl"), find_spec("transformers")
    assert spec is not None
    assert training is not None
    library, values = Path(str(spec.origin)).parent, {"sapo", "cispo", "grpo", "dapo", "dr_grpo", "accelerate"}
    sources = [
        library / "trainer" / "grpo_config.py",
        library / "trainer" / "grpo_trainer.py",
        library / "trainer" / "base_config.py",
        Path(str(training.origin)).parent / "training_args.py",
    ]
    text = "\n".join(source.read_text() for source in sources)
    known = set(re.findall(r"^ +(\w+): ", text, re.MULTILINE)) | {"GRPOTrainer"}

    named = [name for row in ROWS for name in _code(row[2]) if name not in values]

    assert len(named) > 40
    assert [name for name in named if name not in known] == []
    assert [value for value in values - {"accelerate"} if f'"{value}"' not in text] == []


def test_setting_that_an_unknown_one_is_answered_with_is_that_of_its_row() -> None:
    wrong = []
    for row in ROWS:
        ours = [name.partition("=")[0] for name in _code(row[3])]
        for name in (name.partition("=")[0] for cell in row[:3] for name in _code(cell)):
            answer = SYNONYMS.get(name.rsplit(".", 1)[-1])
            if answer and ours and not any(f"{one}.".startswith(f"{answer}.") for one in ours):
                wrong.append((name, answer, ours))

    assert wrong == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[3])
def test_row_has_a_name_of_ours_and_of_somebody_else(row: list[str]) -> None:
    assert len(row) == 4
    assert row[3]
    assert any(row[:3])
