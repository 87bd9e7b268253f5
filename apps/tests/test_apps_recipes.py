"""Which defaults a run has: the embedded model's own, or those of a published recipe for any other."""

import pytest

from rl_apps.cli.driver import main
from rl_apps.programs import gsm8k_grpo, gsm8k_sft, hh_rlhf
from rl_apps.settings.compose import compose, to_yaml
from rl_contracts.errors import ConfigError

APPS = [gsm8k_grpo.APP, gsm8k_sft.APP, hh_rlhf.REWARD_MODEL, hh_rlhf.DPO]
RATES = {"gsm8k-grpo": (3e-4, 1e-6), "gsm8k-sft": (3e-3, 1e-5), "hh-rlhf-rm": (1e-3, 1e-5), "hh-rlhf-dpo": (3e-4, 5e-7)}
OTHER = "model.path=/a/model"


@pytest.mark.parametrize("app", APPS, ids=lambda app: app.name)
def test_embedded_model_brings_its_own_defaults_and_any_other_has_published_ones(app):
    toy, other = app.config(), app.config([OTHER])

    assert (toy.recipe, other.recipe) == ("embedded", "pretrained")
    assert (toy.actor.optimizer.lr, other.actor.optimizer.lr) == RATES[app.name]


def test_nothing_of_the_demonstration_reaches_a_run_of_another_model():
    toy, other = gsm8k_grpo.APP.config(), gsm8k_grpo.APP.config([OTHER])

    assert (toy.rollout.generation.max_new_tokens, toy.rollout.generation.temperature) == (32, 1.3)
    assert (other.rollout.generation.max_new_tokens, other.rollout.generation.temperature) == (1024, 1.0)
    assert other.evaluation.generation.max_new_tokens == 1024
    assert other.evaluation.generation.temperature == toy.evaluation.generation.temperature == 0
    assert toy.rollout.server.slots == 128
    assert other.rollout.server == type(other.rollout.server)()
    assert (toy.actor.optimizer.warmup_steps, other.actor.optimizer.warmup_steps) == (20, 0)


def test_what_the_user_says_wins_over_a_recipe(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("rollout: {generation: {max_new_tokens: 77}}\nmodel: {path: /a/model}\n")

    config = gsm8k_grpo.APP.config(["actor.optimizer.lr=0.5"], file)

    assert (config.recipe, config.rollout.generation.max_new_tokens) == ("pretrained", 77)
    assert config.actor.optimizer.lr == 0.5
    assert config.rollout.generation.temperature == 1.0


def test_recipe_may_be_chosen_and_an_unknown_one_is_refused():
    assert gsm8k_grpo.APP.config([OTHER, "recipe=embedded"]).actor.optimizer.lr == 3e-4
    with pytest.raises(ConfigError, match="recipe=toy: unknown recipe; there are embedded, pretrained"):
        gsm8k_grpo.APP.config(["recipe=toy"])


def test_config_of_a_run_composes_again_without_the_apps_file(tmp_path):
    file = tmp_path / "config.yaml"
    config = gsm8k_grpo.APP.config([OTHER, "total_steps=7"])
    file.write_text(to_yaml(config))
    assert compose(type(config), [file]) == config


def test_other_servers_are_not_given_settings_of_the_embedded_models_server():
    config = gsm8k_sft.APP.config(["allocation=fsdp:d1"])
    assert not hasattr(config.rollout.server, "slots")


def test_help_and_printed_config_say_which_recipe_it_is(capsys):
    assert main("gsm8k-grpo", ["--cfg", "job", OTHER]) == 0
    assert "recipe: pretrained" in capsys.readouterr().out
    assert main("gsm8k-grpo", ["--dry-run"]) == 0
    assert "recipe: embedded" in capsys.readouterr().out
    assert main("gsm8k-grpo", ["--help"]) == 0
    text = capsys.readouterr().out
    assert "recipe='embedded'" in text
    assert "verl's GSM8K examples" in text
