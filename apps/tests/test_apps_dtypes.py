"""`model.dtype`, and the dtypes of trainer and servers that follow it."""

import pytest

from rl_apps.cli.driver import main
from rl_apps.plan.inputs import read_inputs
from rl_apps.plan.memory import SERVER_DEVICE
from rl_apps.plan.page import page
from rl_apps.plan.planner import plan
from rl_apps.programs import gsm8k_grpo, gsm8k_sft
from rl_apps.settings.dtypes import describe_dtypes, gpus_have_bfloat16, resolve_dtypes, warn_float32

DETERMINISTIC = ("deterministic=true", "rollout.max_staleness=0")


def _resolved(*overrides, has_bfloat16=True, stored=None, app=gsm8k_grpo.APP):
    config = app.config(overrides)
    resolve_dtypes(config, has_bfloat16, stored)
    return config


@pytest.mark.parametrize(
    ("overrides", "has_bfloat16", "expected"),
    [
        ((), True, "trainer bfloat16, servers bfloat16"),
        ((), False, "trainer float32, servers float32"),
        (DETERMINISTIC, True, "trainer float32, servers float32"),
        (("model.dtype=bfloat16",), False, "trainer bfloat16, servers bfloat16"),
        (("actor.dtype=float32",), True, "trainer float32, servers bfloat16"),
        (("rollout.server.dtype=float16",), True, "trainer bfloat16, servers float16"),
        (("allocation=vllm:d1+fsdp:d1",), True, "trainer bfloat16, servers bfloat16"),
    ],
)
def test_dtypes_follow_the_device_unless_set(overrides, has_bfloat16, expected):
    assert describe_dtypes(_resolved(*overrides, has_bfloat16=has_bfloat16)) == expected


def test_trainer_publishes_in_the_dtype_of_the_servers():
    mixed, equal = _resolved("actor.dtype=float32"), _resolved()
    given = _resolved("actor.dtype=float32", "actor.engine.serve_dtype=float32")

    assert [config.actor.engine.serve_dtype for config in (mixed, equal, given)] == ["bfloat16", "", "float32"]


def test_dtypes_of_a_run_without_servers_describe_the_trainer():
    config = _resolved("allocation=fsdp:d1", app=gsm8k_sft.APP)

    assert (config.model.dtype, describe_dtypes(config)) == ("bfloat16", "trainer bfloat16")


def test_dtypes_of_an_earlier_run_are_kept_until_one_is_set():
    stored = {"actor.dtype": "float32", "rollout.server.dtype": "float16"}  # written before `model.dtype` existed

    kept, changed = _resolved(stored=stored), _resolved("model.dtype=bfloat16", stored=stored)

    assert (kept.model.dtype, describe_dtypes(kept)) == ("float32", "trainer float32, servers float16")
    assert describe_dtypes(changed) == "trainer bfloat16, servers bfloat16"


def test_float32_on_gpus_with_bfloat16_gives_one_warning_that_names_it():
    [warning] = warn_float32(_resolved("actor.dtype=float32"), has_bfloat16=True)

    assert "actor.dtype=float32" in warning
    assert "rollout.server.dtype" not in warning
    assert not warn_float32(_resolved(), has_bfloat16=True)
    assert not warn_float32(_resolved("model.dtype=float32"), has_bfloat16=False)
    assert not warn_float32(_resolved(*DETERMINISTIC), has_bfloat16=True)


@pytest.mark.parametrize(("output", "expected"), [("9.0\n8.0", True), ("9.0\n7.5", False), ("[N/A]", True)])
def test_gpus_have_bfloat16_from_compute_capability_8(output, expected, tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{output}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    gpus_have_bfloat16.cache_clear()

    assert gpus_have_bfloat16() is expected
    gpus_have_bfloat16.cache_clear()


@pytest.mark.parametrize(("dtype", "expected", "warnings"), [("auto", "bfloat16", 0), ("float32", "float32", 1)])
def test_dry_run_on_gpus_prints_the_dtypes_and_one_warning(dtype, expected, warnings, tmp_path, capsys):
    gpus = ("cluster.device=cuda", "cluster.devices=2", "allocation=embedded:d1+fsdp:d1", f"model.dtype={dtype}")

    assert main("gsm8k-grpo", [*gpus, f"run_dir={tmp_path / 'run'}", "--dry-run"]) == 0

    text = capsys.readouterr().out
    assert f"Dtype: trainer {expected}, servers {expected}" in text
    assert text.count("warning: actor.dtype=float32") == warnings


def test_plan_with_a_gpu_prints_bfloat16_or_warns():
    automatic, slow = (
        plan(read_inputs("gsm8k-grpo", [f"model.dtype={name}"], "H100"), splits=False) for name in ("auto", "float32")
    )

    assert "Dtype: trainer bfloat16, servers bfloat16\nA step" in page(automatic)
    assert "\nwarning: actor.dtype=float32 and rollout.server.dtype=float32" in page(slow)
    weights = [_server_memory(each)["weights"] for each in (automatic, slow)]
    assert weights[0] == weights[1] / 2


def _server_memory(result):
    [memory] = [each for each in result.case.memory if each.owner == SERVER_DEVICE]
    return memory.parts
