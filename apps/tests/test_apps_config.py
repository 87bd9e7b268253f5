"""Errors and warnings of commands before any process of a run starts."""

import os
import socket

import pytest

from rl_apps.cli import main as cli
from rl_apps.cli.driver import main
from rl_apps.preflight.checks import check_batch
from rl_apps.programs import gsm8k_grpo, gsm8k_sft
from rl_apps.run.components import weights_directory
from rl_apps.settings.compose import describe, to_yaml
from rl_apps.settings.synonyms import ASSIGNMENTS, RENAMED, SYNONYMS
from rl_contracts.errors import ConfigError
from rl_contracts.testing.processes import free_port


def _grpo(*overrides):
    return gsm8k_grpo.APP.config(overrides)


def _run(capsys, *arguments, app="gsm8k-grpo"):
    code = main(app, list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_frozen_parts_reach_the_engine():
    parts, frozen = ("vision_tower", "projector"), "actor.freeze=[vision_tower,projector]"
    assert _grpo("actor.dtype=float32", frozen).finetune_spec().freeze == parts
    assert _grpo("actor.dtype=float32").finetune_spec().freeze == ()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.generation.top_p=0.9", "rollout.generation: expected top_p=1.*is biased"),
        ("rollout.generation.frequency_penalty=0.5", "allow_biased_sampling=true .*found {'frequency_penalty': 0.5}"),
        ("rollout.generation.temperature=0", "have no advantage"),
        ("launcher.health_timeout=200", r"progress_timeout: expected more than launcher.health_timeout=200 s"),
        ("algorithm.proximal=current actor.minibatches=2", "algorithm.proximal: expected .*actor.minibatches"),
    ],
)
def test_compose_invalid_setting_is_rejected(override, message):
    with pytest.raises(ConfigError, match=message):
        _grpo(*override.split(" "))


def test_compose_setting_with_invalid_value_raises_config_error():
    for override in (
        "cluster.device=gpu",
        "rollout.interrupt=x",
        "rollout.port=70000",
        "rollout.reward_workers=0",
        "actor.dtype=x",
        "actor.freeze=[vision]",
        "critic.clip=-1",
        "data.batch_size=0",
        "rollout.group_size=0",
        "rollout.endpoint.discount=2",
    ):
        with pytest.raises(ConfigError, match=f"^{override.partition('=')[0]}: expected "):
            _grpo("algorithm=ppo", override)  # with a critic
    with pytest.raises(ConfigError, match=r"^actor\.optimizer\.lr: expected a number, found 'fast'"):
        _grpo("actor.optimizer.lr=fast")


def test_compose_allowed_biased_sampling_is_accepted():
    config = _grpo("rollout.generation.top_k=5", "rollout.allow_biased_sampling=true")
    assert config.rollout.generation.top_k == 5


@pytest.mark.parametrize(("form", "epochs", "expected"), [("rl", 0, 20), ("rl", 2, 9), ("rl", 9, 20), ("sft", 2, 8)])
def test_steps_end_with_the_epochs_if_earlier(form, epochs, expected):
    config = _grpo("total_steps=20", "data.batch_size=8", f"total_epochs={epochs}")

    assert config.steps_with(36, form) == expected


def test_deterministic_is_passed_to_the_engine():
    settings = ("actor.dtype=float32", "rollout.max_staleness=0")
    assert _grpo(*settings, "deterministic=true").finetune_spec().deterministic
    assert not _grpo(*settings).finetune_spec().deterministic
    with pytest.raises(
        ConfigError, match=r"unknown setting 'actor.engine.deterministic'. Did you mean 'deterministic'"
    ):
        _grpo("actor.engine.deterministic=true")


@pytest.mark.parametrize("app", [gsm8k_grpo.APP, gsm8k_sft.APP], ids=lambda app: app.name)
def test_every_setting_has_a_docstring(app):
    missing = [key for key, _, meaning in describe(app.config()) if not meaning]
    assert missing == []


@pytest.mark.parametrize("app", ["gsm8k-sft", "hh-rlhf-dpo"])
def test_supervised_command_rejects_several_minibatches(capsys, app):
    assert main(app, ["--dry-run", "actor.minibatches=4"]) == 2
    assert "actor.minibatches: expected 1: each batch is one optimizer step here" in capsys.readouterr().err


@pytest.mark.slow
def test_reward_model_unsupported_by_the_engine_is_rejected(capsys, monkeypatch):
    def check(settings, strategy, spec):
        if spec.head != "lm":
            raise ConfigError("this engine trains language models only")

    monkeypatch.setattr("rl_engines_fsdp.config.FSDPEngineConfig.check", check)

    assert main("hh-rlhf-dpo", ["--dry-run"]) == 0
    assert main("hh-rlhf-rm", ["--dry-run"]) == 2
    assert "this engine trains language models only" in capsys.readouterr().err


@pytest.mark.slow
def test_replay_with_an_unsupported_allocation_is_rejected(capsys, tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(_grpo()))
    (tmp_path / "batches").mkdir()
    (tmp_path / "batches" / "step_3-batch.safetensors").touch()

    assert cli.main(["replay", str(tmp_path), "--allocation", "fsdp:p2"]) == 2

    captured = capsys.readouterr()
    assert "pipeline and expert dimensions must be 1" in captured.err
    assert captured.out == ""


def test_check_batch_describes_a_step_or_suggests_a_batch_size():
    assert check_batch(16, 8, 2, 2) == (
        "16 prompts x 8 completions = 128 sequences per step, 2 minibatch(es) of 64, 8 prompts per step from each of 2 "
        "replica(s)"
    )
    with pytest.raises(ConfigError, match="use 4"):
        check_batch(3, 8, 1, 4)


def test_weights_directory_is_in_memory_only_for_shm(tmp_path):
    assert weights_directory(tmp_path, "disk") == tmp_path / "weights"
    assert weights_directory(tmp_path, "broadcast") == tmp_path / "weights"
    assert weights_directory(tmp_path, "shm") not in (tmp_path / "weights", weights_directory(tmp_path / "b"))


@pytest.mark.parametrize(
    ("foreign", "name"),
    [
        ("learning_rate", "actor.optimizer.lr"),
        ("max_new_tokens", "rollout.generation.max_new_tokens"),
        ("reward", "rollout.reward"),
        ("lora_rank", "actor.engine.lora.rank"),
        ("gconfig.n_samples", "rollout.group_size"),
        ("actor.eps_clip", "algorithm.loss.clip_low"),
        ("temperature", "rollout.generation.temperature"),
        ("eval_gconfig.temperature", "evaluation.temperature"),
        ("actor_rollout_ref.rollout.val_kwargs.temperature", "evaluation.temperature"),
        ("data.max_response_length", "rollout.generation.max_new_tokens"),
    ],
)
def test_foreign_name_of_a_setting_suggests_the_setting(foreign, name):
    with pytest.raises(ConfigError, match=f"unknown setting '{foreign}'. Did you mean '{name}'?"):
        _grpo(f"{foreign}=1")


def test_synonyms_and_renames_refer_to_existing_settings():
    configs = [gsm8k_grpo.APP.config([f"allocation={server}:d1+fsdp:d1"]) for server in ("embedded", "vllm")]
    keys = {key for config in configs for key, _, _ in describe(config)}
    names = {*SYNONYMS.values(), *RENAMED.values(), *(value.partition("=")[0] for value in ASSIGNMENTS.values())}
    assert all({name, name.rpartition(".")[0]} & keys for name in names)  # an entry of `options` is not a key
    assert not RENAMED.keys() & keys


@pytest.mark.parametrize("name", ["evaluation.rows", "actor.optimizer.momentum"])  # a setting, an entry of `options`
def test_earlier_name_of_a_setting_suggests_the_new_one(name):
    with pytest.raises(ConfigError, match=f"unknown setting '{name}'.*{RENAMED[name]}"):
        _grpo(f"{name}=1")


def test_port_in_use_is_rejected_before_start(capsys, tmp_path):
    with socket.socket() as taken:
        port = free_port(2) + 1
        taken.bind(("127.0.0.1", port))
        taken.listen()
        code, out, err = _run(
            capsys, f"rollout.port={port - 1}", "allocation=embedded:d2+fsdp:d2", f"run_dir={tmp_path / 'run'}"
        )

    assert code == 2
    assert out.splitlines()[3:] == ["loading and checking the data"]
    assert f"port {port} is in use by process {os.getpid()}" in err
    assert not (tmp_path / "run").exists()


def test_failing_data_set_names_its_line_without_traceback(capsys, monkeypatch, tmp_path):
    file = tmp_path / "own_failing_data.py"
    file.write_text("def load(**options):\n    return options['nothing']")
    monkeypatch.chdir(tmp_path)

    code, out, err = _run(capsys, f"data.name={file.stem}:load", "--dry-run")

    assert (code, out) == (2, "")
    assert f"KeyError: 'nothing' ({file}:2)" in err
    assert "Traceback" not in err


def test_completion_longer_than_the_context_is_a_warning(capsys):
    settings = ("rollout.generation.max_new_tokens=5000", "evaluation.max_new_tokens=6000")
    code, out, _ = _run(capsys, "--dry-run", *settings)
    assert code == 0
    assert [setting for setting in settings if f"warning: {setting} leaves no room" not in out] == []


def test_file_limit_below_concurrent_requests(capsys, monkeypatch):
    """An error for a local run, with the possible number of requests; a warning for a cluster, whose limits differ."""
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 4096))
    batch = ["--dry-run", "data.batch_size=256", "rollout.group_size=8", "rollout.max_staleness=1"]

    code, _, err = _run(capsys, *batch)
    allowed, allowed_out, _ = _run(capsys, *batch, "rollout.max_concurrent=455")
    above, _, _ = _run(capsys, *batch, "rollout.max_concurrent=456")
    cluster_out = _run(capsys, *batch, "launcher=slurm", "cluster.nodes=1")[1]

    shortage = "a trainer sends up to 4096 concurrent requests and needs about 4552 open files"
    assert (code, allowed, above) == (2, 0, 2)
    assert f"ConfigError: rollout.max_concurrent: {shortage}; the limit is 4096" in err
    assert "set rollout.max_concurrent=455." in err
    assert "open files" not in allowed_out
    assert f"warning: rollout.max_concurrent: {shortage}" in cluster_out


def test_defaults_have_no_warning(capsys):
    assert "warning" not in _run(capsys, "--dry-run")[1]


def test_canary_without_room_is_rejected(capsys):
    arguments = ["--dry-run", "publish.canary=always", "rollout.server.context_length=200"]
    micro_batch = "actor.micro_batch.max_tokens=150"

    code, _, err = _run(capsys, *arguments)
    second_code, _, second_err = _run(capsys, *arguments, micro_batch)

    assert (code, second_code) == (2, 2)
    assert "the servers' context: expected at least 240 tokens" in err
    assert "actor.micro_batch.max_tokens: expected at least 240 tokens" in second_err
    assert _run(capsys, "--dry-run", "publish.canary=always", "rollout.server.context_length=240")[0] == 0
