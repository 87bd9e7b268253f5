"""Defaults of a run: those of the embedded model, or of a published recipe for all other models."""

import pytest

from rl_apps.cli.driver import main
from rl_apps.programs import gsm8k_grpo, gsm8k_sft, hh_rlhf, vision
from rl_apps.settings.compose import compose, to_yaml
from rl_contracts.errors import ConfigError

APPS = [gsm8k_grpo.APP, gsm8k_sft.APP, hh_rlhf.REWARD_MODEL, hh_rlhf.DPO]
RATES = {"gsm8k-grpo": (3e-4, 1e-6), "gsm8k-sft": (3e-3, 1e-5), "hh-rlhf-rm": (1e-3, 1e-5), "hh-rlhf-dpo": (3e-4, 5e-7)}
OTHER = "model.path=/a/model"


@pytest.mark.parametrize("app", APPS, ids=lambda app: app.name)
def test_recipe_is_embedded_or_pretrained_depending_on_the_model(app):
    embedded, pretrained = app.config(), app.config([OTHER])

    assert (embedded.recipe, pretrained.recipe) == ("embedded", "pretrained")
    assert (embedded.actor.optimizer.lr, pretrained.actor.optimizer.lr) == RATES[app.name]


def test_pretrained_recipe_has_no_setting_of_the_embedded_recipe():
    embedded, pretrained = gsm8k_grpo.APP.config(), gsm8k_grpo.APP.config([OTHER])

    assert (embedded.rollout.generation.max_new_tokens, embedded.rollout.generation.temperature) == (32, 1.3)
    assert (pretrained.rollout.generation.max_new_tokens, pretrained.rollout.generation.temperature) == (1024, 1.0)
    sampling = pretrained.evaluation.sampling(pretrained.rollout.generation)
    assert (sampling.max_new_tokens, sampling.temperature) == (1024, 0)
    assert embedded.rollout.server.max_sequences == 128
    assert pretrained.rollout.server == type(pretrained.rollout.server)()
    assert (embedded.actor.optimizer.warmup_steps, pretrained.actor.optimizer.warmup_steps) == (20, 0)


@pytest.mark.parametrize(
    ("app", "data"),
    [
        (vision.CLEVR_COUNT_SFT, "clevr_count_70k"),
        (vision.CLEVR_COUNT_GRPO, "clevr_count_70k"),
        (vision.GEOMETRY3K_GRPO, "geometry3k"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_recipe_of_vision_apps_selects_the_data(app, data):
    assert app.config().data.name == "drawn-scenes"
    assert app.config([OTHER]).data.name == data


def test_user_settings_override_the_recipe(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("rollout: {generation: {max_new_tokens: 77}}\nmodel: {path: /a/model}\n")

    config = gsm8k_grpo.APP.config(["actor.optimizer.lr=0.5"], file)

    assert (config.recipe, config.rollout.generation.max_new_tokens) == ("pretrained", 77)
    assert config.actor.optimizer.lr == 0.5
    assert config.rollout.generation.temperature == 1.0


def test_recipe_can_be_set_and_an_unknown_one_raises_config_error():
    assert gsm8k_grpo.APP.config([OTHER, "recipe=embedded"]).actor.optimizer.lr == 3e-4
    with pytest.raises(ConfigError, match=r"recipe=toy\b.*embedded, pretrained"):
        gsm8k_grpo.APP.config(["recipe=toy"])


def test_saved_config_composes_without_the_defaults_of_the_app(tmp_path):
    file = tmp_path / "config.yaml"
    config = gsm8k_grpo.APP.config([OTHER, "total_steps=7"])
    file.write_text(to_yaml(config))
    assert compose(type(config), [file]) == config


def test_recipe_sets_no_embedded_server_settings_on_other_servers():
    config = gsm8k_sft.APP.config(["allocation=fsdp:d1"])
    assert not hasattr(config.rollout.server, "max_sequences")


def test_help_and_printed_config_show_the_recipe(capsys):
    assert main("gsm8k-grpo", ["--cfg", "job", OTHER]) == 0
    assert "recipe: pretrained" in capsys.readouterr().out
    assert main("gsm8k-grpo", ["--dry-run"]) == 0
    assert "recipe embedded" in capsys.readouterr().out
    assert main("gsm8k-grpo", ["--help", "recipe"]) == 0
    text = capsys.readouterr().out
    assert "recipe='embedded'" in text
    assert "verl's GSM8K examples" in text
