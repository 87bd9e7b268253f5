"""Algorithm presets compose, and combinations of algorithm and run settings that do not work are rejected."""

import functools
import re
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest

from rl_apps.cli.driver import main
from rl_apps.programs.gsm8k_grpo import APP
from rl_apps.settings import compose
from rl_contracts.errors import ConfigError
from rl_trainers.algorithms.objective import make_policy_loss
from rl_trainers.algorithms.proximal import PROXIMALS

PRESETS = sorted(path.stem for path in (Path(compose.CONF) / "algorithm").glob("*.yaml"))


@functools.cache
def _grpo(*overrides):
    return APP.config(overrides)


TEACHER = {"distillation": ("ref.path=/models/teacher",)}
"""Teacher of each preset that has one."""


@pytest.mark.parametrize("name", ["dapo", "distillation", "ppo"])
def test_preset_written_to_yaml_composes_to_the_same_config(name, tmp_path):
    config = _grpo(f"algorithm={name}", "actor.minibatches=2", *TEACHER.get(name, ()))
    (tmp_path / "config.yaml").write_text(compose.to_yaml(config))
    assert APP.config(file=tmp_path / "config.yaml") == config


@pytest.mark.slow
def test_presets_are_different_algorithms_whose_losses_load():
    algorithms = [_grpo(f"algorithm={name}", *TEACHER.get(name, ())).algorithm for name in PRESETS]
    for algorithm in algorithms:
        make_policy_loss(algorithm, 2)
    assert all(a != b for i, a in enumerate(algorithms) for b in algorithms[:i])


@pytest.mark.parametrize("name", ["tis", "geometric_mask", "m2po"])
def test_preset_with_one_minibatch_recomputes_only_for_m2po(name):
    algorithm = _grpo(f"algorithm={name}").algorithm
    assert make_policy_loss(algorithm, 1).proximal is PROXIMALS["recompute" if name == "m2po" else "current"]
    assert make_policy_loss(algorithm, 2).proximal is PROXIMALS["recompute"]


@pytest.mark.parametrize(  # test_apps_preset_values.py tests the other presets
    ("name", "expected"),
    [
        ("gdpo", {"advantage.kind": "gdpo", "loss.kind": "clip"}),
        ("maxrl", {"advantage.std": "mean", "loss.kind": "clip"}),
    ],
)
def test_preset_has_the_settings_of_its_paper(name, expected):
    algorithm = _grpo(f"algorithm={name}").algorithm
    assert {key: attrgetter(key)(algorithm) for key in expected} == expected


DOCS = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()


@pytest.mark.slow
def test_docs_list_the_correction_of_each_preset():
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in DOCS.splitlines() if line.startswith("|")]
    header = next(row for row in cells if row[0] == "preset")
    table = cells[cells.index(header) + 2 :][: len(PRESETS)]
    documented = {row[0].split("`")[1]: row[header.index("correction")] for row in table}
    assert sorted(documented) == PRESETS
    for name, cell in documented.items():
        correction = _grpo(f"algorithm={name}", *TEACHER.get(name, ())).algorithm.correction
        cap = re.fullmatch(r"at most ([\d.]+)", cell)
        assert (correction.kind == "truncate") == bool(cap), name
        if cap:
            assert (correction.level, correction.cap) == ("token", float(cap[1])), name
    exceptions = re.search(r"\*\*Every preset but (.*?) multiplies the loss of a token by", DOCS, re.DOTALL)[1]
    assert set(re.findall(r"`(\w+)`", exceptions)) == {
        name for name, cell in documented.items() if "at most" not in cell
    }


def test_overlong_penalty_follows_the_length_limit():
    assert _grpo("algorithm=dapo", "rollout.generation.max_new_tokens=50").algorithm.reward.overlong_max == 50


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "algorithm.reward.overlong_max=64 algorithm.reward.overlong_cache=8",
            "overlong_max: expected at most rollout.generation.max_new_tokens=32",
        ),
        ("algorithm.kl.coef=0.1", "algorithm.kl.coef with algorithm.kl.place=none"),
        ("critic.lr=1e-4", "critic with algorithm.advantage.kind=outcome: expected the defaults"),
        ("ref.path=/models/teacher", "ref.path with algorithm.kl.place=none: expected no path"),
        (
            "rollout.endpoint.credit=turn",
            "rollout.endpoint.credit with algorithm.advantage.kind=outcome: expected `episode`",
        ),
        *(
            (f"rollout.endpoint.credit=turn rollout.endpoint.discount=0.9 algorithm.advantage.kind={override}", message)
            for message in ["rollout.endpoint.discount with rollout.endpoint.credit=turn: expected 1; other values"]
            for override in (
                "gae",
                "return algorithm.advantage.gamma=0.9",
                "return algorithm.reward.scale=2",
            )
        ),
        ("algorithm=distillation", "ref.path with algorithm.reward.scale=0: expected a teacher"),
    ],
)
def test_algorithm_incompatible_with_the_run_is_rejected(overrides, message):
    with pytest.raises(ConfigError, match=message):
        _grpo(*overrides.split(" "))


def test_entropy_bonus_gives_the_engine_an_entropy_gradient():
    assert _grpo("actor.dtype=float32", "algorithm.entropy_coef=0.01").finetune_spec().entropy_grad
    assert not _grpo("actor.dtype=float32").finetune_spec().entropy_grad


def test_reference_has_no_optimizer_and_critic_its_own_rate():
    config = _grpo("algorithm=ppo", "critic.lr=0.5", "actor.optimizer.beta2=0.5", "actor.dtype=bfloat16")
    assert config.reference_spec().dtype == config.critic_spec().dtype == "bfloat16"
    assert config.reference_spec().optimizer is None
    assert config.critic_spec().optimizer == replace(config.actor.optimizer, lr=0.5)
    assert config.actor.optimizer.lr != 0.5
    assert config.critic_spec().head == "value"
    assert config.finetune_spec().head == "lm"


def test_dry_run_names_the_models_besides_the_policy(capsys, tmp_path):
    assert main("gsm8k-grpo", ["--dry-run", "algorithm=ppo", f"run_dir={tmp_path}/run"]) == 0
    assert "a critic besides the policy, from embedded" in capsys.readouterr().out
