"""Named evaluation sets: the values that they inherit, and mistakes in them."""

import json
from pathlib import Path

import pytest

from rl_apps.preflight.checks import check_held_out
from rl_apps.preflight.trial_episode import try_evaluation_sets
from rl_apps.programs.gsm8k_grpo import APP as GRPO
from rl_apps.programs.gsm8k_sft import APP as SFT
from rl_apps.run.app import Run
from rl_apps.settings.compose import compose, describe, to_yaml
from rl_apps.settings.config import GRPOConfig
from rl_apps.settings.data import load_rows
from rl_apps.settings.device_layout import layout_of
from rl_apps.settings.evaluation_sets import configs_of_sets
from rl_contracts.errors import ConfigError, DataError
from rl_contracts.testing.models import make_tiny_model

RUN = ("data.name=gsm8k", "data.path=questions", "data.columns.question=problem", "data.test_split=dev")


def _sets(*overrides):
    return configs_of_sets(GRPO.config([*RUN, *(f"evaluation.sets.{override}" for override in overrides)]))


def test_set_without_values_inherits_those_of_the_run():
    config = GRPO.config([*RUN, "evaluation.n=4", "evaluation.k=[2]", "evaluation.sets.same.temperature=1"])
    same = configs_of_sets(config)["same"]
    assert same.data == config.data
    assert same.rollout == config.rollout
    assert (same.evaluation.n, same.evaluation.k, same.evaluation.examples) == (4, [2], config.evaluation.examples)
    assert (same.evaluation.temperature, config.evaluation.temperature) == (1.0, 0.0)


def test_set_with_data_name_inherits_no_path_columns_or_split():
    data = _sets("math.data.name=chat", "math.data.path=math.jsonl")["math"].data
    assert (data.name, data.path, data.columns, data.test_split) == ("chat", "math.jsonl", {}, "test")


def test_set_with_path_only_keeps_data_set_and_columns():
    data = _sets("hard.data.path=hard.jsonl", "hard.data.test_split=all")["hard"].data
    assert (data.name, data.path, data.columns) == ("gsm8k", "hard.jsonl", {"question": "problem"})
    assert data.test_split == "all"


def test_set_with_n_has_default_k_and_own_reward():
    config = _sets("a.n=8", "a.reward=math", "b.examples=0")
    assert list(config) == ["a"]
    assert (config["a"].evaluation.ks, config["a"].rollout.reward) == ([1, 8], "math")


def test_sets_are_read_back_from_yaml_and_listed_in_help(tmp_path):
    config = GRPO.config(["evaluation.sets.a.n=8", "evaluation.sets.b.data.columns.question=q"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert compose(GRPOConfig, [tmp_path / "config.yaml"]) == config
    assert "evaluation.sets.NAME.data.path" in {key for key, _, _ in describe(config)}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["evaluation.sets.a.n=4", "evaluation.sets.a.k=[8]"], r"evaluation\.sets\.a\.k: expected 1 to "),
        (["evaluation.sets.a.temperature=-1"], r"evaluation\.sets\.a\.temperature: expected 0 "),
        (["evaluation.sets.a.n=2", "evaluation.examples=0"], r"evaluation\.sets\.a\.examples: expected a number"),
        (["evaluation.sets.a.temprature=1"], r"Did you mean 'evaluation\.sets\.NAME\.temperature'"),
        (["evaluation.sets.a.data.pth=x"], r"Did you mean 'evaluation\.sets\.NAME\.data\.path'"),
        (["evaluation.sets=[{name: a}]"], r"expected settings with a name, evaluation\.sets\.NAME\.SETTING=VALUE"),
        (["evaluation.sets.a=math"], r"expected settings with a name, evaluation\.sets\.NAME\.SETTING=VALUE"),
        (["evaluation.sets={a b: {n: 2}}"], r"evaluation\.sets: expected names of letters"),
    ],
)
def test_set_mistake_is_rejected_with_its_key(overrides, message):
    with pytest.raises(ConfigError, match=message):
        GRPO.config(overrides)


def _run(app, directory, *overrides, servers="embedded:d1+"):
    config = app.config([*overrides, f"allocation={servers}fsdp:d1", f"run_dir={directory}"])
    return Run(config, layout_of(config.allocation, "optional"), Path(directory), "cpu")


def test_sets_without_servers_are_rejected(tmp_path):
    with pytest.raises(ConfigError, match=r"evaluation\.sets: expected none without servers"):
        check_held_out(_run(SFT, tmp_path, "evaluation.sets.a.n=2", servers=""), "sft")


@pytest.mark.parametrize(
    ("override", "error"),
    [("reward=nope", ConfigError), ("data.path=nope", DataError), ("data.name=nope", ConfigError)],
)
def test_set_with_unknown_component_is_rejected_with_its_name(tmp_path, override, error):
    run = _run(GRPO, tmp_path, "evaluation.sets.a.data.name=gsm8k", f"evaluation.sets.a.{override}")
    with pytest.raises(error, match=r"evaluation\.sets\.a: "):
        check_held_out(run, "rl")


def test_set_may_be_a_single_file_with_its_own_reward(tmp_path):
    (tmp_path / "dev.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "two"}) + "\n")
    model = make_tiny_model(tmp_path / "model", "llama", layers=1, hidden=32)
    overrides = ["evaluation.sets.a.data.name=gsm8k", f"evaluation.sets.a.data.path={tmp_path / 'dev.jsonl'}"]
    run = _run(GRPO, tmp_path, f"model.path={model}", *overrides)
    run.config.model.directories[str(model)] = str(model)
    of_set = configs_of_sets(run.config)["a"]
    assert len(load_rows(of_set.data, "set", "rl", 1)) == 1
    with pytest.raises(ConfigError, match=r"evaluation\.sets\.a: .*'#### 72'"):
        try_evaluation_sets(run)
