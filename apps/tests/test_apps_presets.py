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
QUICK = {"dapo", "distillation", "gspo", "ppo"}


@functools.cache
def _grpo(*overrides):
    return APP.config(overrides)


TEACHER = {"distillation": ("ref.path=/models/teacher",)}
"""Teacher of each preset that has one."""


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in PRESETS]
)
def test_preset_composes_and_its_loss_loads(name, tmp_path):
    config = _grpo(f"algorithm={name}", "actor.minibatches=2", *TEACHER.get(name, ()))
    make_policy_loss(config.algorithm, 2)
    (tmp_path / "config.yaml").write_text(compose.to_yaml(config))
    assert APP.config(file=tmp_path / "config.yaml") == config


@pytest.mark.slow
def test_presets_are_different_algorithms():
    algorithms = [_grpo(f"algorithm={name}", *TEACHER.get(name, ())).algorithm for name in PRESETS]
    assert all(a != b for i, a in enumerate(algorithms) for b in algorithms[:i])


@pytest.mark.parametrize("name", ["tis", "decoupled", "icepop", "geometric_mask", "sequence_mask", "m2po"])
def test_preset_with_one_minibatch_recomputes_only_for_m2po(name):
    algorithm = _grpo(f"algorithm={name}").algorithm
    assert make_policy_loss(algorithm, 1).proximal is PROXIMALS["recompute" if name == "m2po" else "current"]
    assert make_policy_loss(algorithm, 2).proximal is PROXIMALS["recompute"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", {"advantage.std": "group", "loss.clip_high": 0.28, "correction.cap": 2.0, "proximal": "auto"}),
        ("dr_grpo", {"advantage.std": "none", "aggregation.kind": "constant_length"}),
        ("rloo", {"advantage.leave_one_out": True, "loss.kind": "importance"}),
        ("gspo", {"ratio": "sequence", "loss.clip_low": 3e-4, "loss.clip_high": 4e-4}),
        ("cispo", {"loss.kind": "cispo", "loss.clip_low": 1.0}),
        ("m2po", {"mask.kind": "second_moment", "mask.threshold": 0.04, "correction.kind": "plain"}),
        ("lite_ppo", {"advantage.std": "batch", "aggregation.kind": "token_mean"}),
        ("gdpo", {"advantage.kind": "gdpo", "loss.kind": "clip"}),
        ("maxrl", {"advantage.std": "mean", "loss.kind": "clip"}),
        ("icepop", {"correction.kind": "mask", "correction.floor": 0.5, "correction.cap": 5.0}),
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


def test_single_setting_of_a_preset_can_be_overridden():
    expected = _grpo("algorithm=dapo").algorithm
    expected.loss.clip_high, expected.loss.options, expected.reward.overlong_cache = 0.5, {"dual_clip": 3.0}, 9
    overrides = ("algorithm.loss.clip_high=0.5", "algorithm.loss.options.dual_clip=3.0")
    assert _grpo("algorithm=dapo", *overrides, "algorithm.reward.overlong_cache=9").algorithm == expected


def test_overlong_penalty_follows_the_length_limit():
    assert _grpo("algorithm=dapo", "rollout.generation.max_new_tokens=50").algorithm.reward.overlong_max == 50


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("rollout.group_size=1", "rollout.group_size with algorithm.advantage.kind=outcome .*: expected at least 2"),
        (
            "algorithm.reward.overlong_max=64 algorithm.reward.overlong_cache=8",
            "overlong_max: expected at most rollout.generation.max_new_tokens=32",
        ),
        ("algorithm.kl.coef=0.1", "algorithm.kl.coef with algorithm.kl.place=none"),
        ("algorithm.kl.plaec=loss", "Did you mean 'algorithm.kl.place'"),
        ("critic.clip=-1", "critic.clip"),
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
        ("rollout.endpoint.discount=0", r"rollout.endpoint.discount: expected in \(0, 1\]|endpoint.discount"),
        ("algorithm=distillation", "ref.path with algorithm.reward.scale=0: expected a teacher"),
    ],
)
def test_algorithm_incompatible_with_the_run_is_rejected(overrides, message):
    with pytest.raises(ConfigError, match=message):
        _grpo(*overrides.split(" "))


def test_entropy_bonus_gives_the_engine_an_entropy_gradient():
    assert _grpo("algorithm.entropy_coef=0.01").finetune_spec().entropy_grad
    assert not _grpo().finetune_spec().entropy_grad


def test_reference_has_no_optimizer_and_critic_its_own_rate():
    config = _grpo("algorithm=ppo", "critic.lr=0.5", "actor.optimizer.beta2=0.5")
    assert config.reference_spec().optimizer is None
    assert config.critic_spec().optimizer == replace(config.actor.optimizer, lr=0.5)
    assert config.actor.optimizer.lr != 0.5
    assert config.critic_spec().head == "value"
    assert config.finetune_spec().head == "lm"


def _reject(capsys, *arguments):
    assert main("gsm8k-grpo", list(arguments)) == 2
    return capsys.readouterr().err


def test_unknown_policy_loss_is_rejected_before_start(capsys):
    assert "unknown name 'clipp'; did you mean 'clip'?" in _reject(capsys, "algorithm.loss.kind=clipp")


def test_missing_reference_model_is_rejected_before_start(capsys):
    arguments = ("algorithm=reinforce_pp", "ref.path=/nowhere/model")
    message = _reject(capsys, *arguments)
    assert "ref.path /nowhere/model: expected config.json, found nothing there" in message
    assert "there is no such directory" in message


def test_dry_run_names_the_models_besides_the_policy(capsys, tmp_path):
    assert main("gsm8k-grpo", ["--dry-run", "algorithm=ppo", f"run_dir={tmp_path}/run"]) == 0
    assert "a critic besides the policy, from embedded" in capsys.readouterr().out
