"""Names in docs/coming-from.md and docs/coming-from-areal.md exist: of this project, and of the installed TRL."""

import math
import pkgutil
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from rl_apps.programs.gsm8k_grpo import APP
from rl_apps.settings.compose import describe
from rl_apps.settings.synonyms import SYNONYMS
from rl_contracts.batch.trajectory import pack
from rl_contracts.registry import load_component
from rl_contracts.testing.batches import make_batch
from rl_trainers.algorithms.config import MaskConfig
from rl_trainers.algorithms.functional.correction import OffPolicy

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text().replace("\\|", "").splitlines()
    if line.startswith("| ") and not line.startswith("| AReaL")
]
NO_SETTINGS = {"+", "RolloutWorkflow.arun_episode", "Trajectory", "sglang:d4+fsdp:d4"}
"""Code in the last column that is not a setting."""


def _code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_rows_have_existing_settings_and_a_name_of_another_library() -> None:
    assert all(len(row) == 4 and row[3] and any(row[:3]) for row in ROWS)
    configs = [APP.config([f"allocation={server}:d1+fsdp:d1"]) for server in ("embedded", "vllm")]
    keys = {key for config in configs for key, _, _ in describe(config)}
    named = [name.partition("=")[0] for row in ROWS for name in _code(row[3]) if name not in NO_SETTINGS]

    assert len(named) > 60
    assert [name for name in named if not any(key == name or key.startswith(f"{name}.") for key in keys)] == []


def test_trl_column_lists_names_of_trl() -> None:
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
    trl_names = set(re.findall(r"^ +(\w+): ", text, re.MULTILINE)) | {"GRPOTrainer"}

    named = [name for row in ROWS for name in _code(row[2]) if name not in values]

    assert len(named) > 40
    assert [name for name in named if name not in trl_names] == []
    assert [value for value in values - {"accelerate"} if f'"{value}"' not in text] == []


def test_synonyms_suggest_the_setting_of_the_row() -> None:
    mismatches = []
    for row in ROWS:
        settings = [name.partition("=")[0] for name in _code(row[3])]
        for name in (name.partition("=")[0] for cell in row[:3] for name in _code(cell)):
            suggestion = SYNONYMS.get(name) or SYNONYMS.get(name.rsplit(".", 1)[-1])
            if suggestion and settings and not any(f"{setting}.".startswith(f"{suggestion}.") for setting in settings):
                mismatches.append((name, suggestion, settings))

    assert mismatches == []


def test_counterparts_of_classes_of_areal_exist() -> None:
    page = PAGE.with_name("coming-from-areal.md").read_text()

    names = set(re.findall(r"`(rl_\w+\.[\w.]+)`", page))

    assert len(names) > 60
    for name in names:
        pkgutil.resolve_name(name)  # raises an error if the name does not exist


@pytest.mark.parametrize(("drift", "accepted"), [(-0.4, True), (-0.42, False), (0.68, True), (0.7, False)])
def test_geometric_mask_matches_the_inverse_bounds_of_verl(drift: float, accepted: bool) -> None:
    batch = make_batch(1, lengths=(4, 4))
    batch["loss_mask"][:] = True
    packed = pack(batch)
    log_ratio = torch.tensor([drift - 0.3, drift + 0.3, drift - 0.1, drift + 0.1])
    off = OffPolicy(log_ratio, packed["loss_mask"], packed)
    mask = load_component(MaskConfig("ratio", level="geometric", low=0.667, high=2.0))

    assert (math.log(0.5) <= -float(log_ratio.mean()) <= math.log(1.5)) is accepted
    assert mask(off).tolist() == [not accepted] * 4
