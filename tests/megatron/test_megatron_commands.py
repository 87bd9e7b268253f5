"""Commands train with the Megatron engine when the allocation selects it."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import Command

from rl_apps.cli.main import main
from rl_apps.programs.gsm8k_grpo import APP
from rl_apps.settings.compose import to_yaml
from rl_contracts.batch.trajectory import save_batch
from rl_contracts.testing import make_batch
from rl_contracts.testing.models import make_tiny_model

PPO_SETTINGS = {
    "algorithm": "ppo",
    "recipe": "embedded",
    "data.batch_size": 4,
    "rollout.group_size": 4,
    "rollout.generation.max_new_tokens": 12,
    "rollout.reward": "parity:reward",
}
PARITY = """
def reward(prompt, completions, prompt_ids, completion_ids, **data):
    return float(sum(completion_ids) % 2)
"""
"""Reward that is nonzero for some completions of a random model."""
WITHOUT_PPO_SETTINGS = {name: value for name, value in PPO_SETTINGS.items() if name != "algorithm"}
SERVER = "embedded:d1+"


@pytest.mark.parametrize(
    ("name", "layout", "settings"),
    [
        pytest.param("gsm8k-grpo", SERVER + "megatron:t2", PPO_SETTINGS, id="ppo", marks=pytest.mark.slow),
        *(
            pytest.param(
                name,
                layout,
                settings,
                id="-".join([name, layout.split(":")[-1], *filter(None, [settings.get("publish.route")])]),
                marks=pytest.mark.nightly,
            )
            for name, layout, settings in (
                ("gsm8k-sft", "megatron:t2", {}),
                ("hh-rlhf-rm", "megatron:p2", {}),
                ("hh-rlhf-dpo", "megatron:t2", {}),
                ("gsm8k-grpo", SERVER + "megatron:c2", PPO_SETTINGS),
                ("gsm8k-grpo", SERVER + "megatron:p2", WITHOUT_PPO_SETTINGS | {"publish.route": "disk"}),
                ("gsm8k-grpo", SERVER + "megatron:p2", WITHOUT_PPO_SETTINGS | {"publish.route": "broadcast"}),
                ("gsm8k-grpo", SERVER + "megatron:d2e2", WITHOUT_PPO_SETTINGS),
            )
        ),
    ],
)
def test_command_trains_in_megatron_layout(tmp_path, monkeypatch, name, layout, settings):
    (tmp_path / "parity.py").write_text(PARITY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    model = make_tiny_model(tmp_path / "model", "qwen3_moe" if "e2" in layout else "qwen3")
    run = {"allocation": layout, "model.path": model, "cluster.device": "cpu"}
    command = Command(name, tmp_path / "run", run | {"total_steps": 2, "evaluation.examples": 4} | settings)

    command.finish(280)

    for metric in ("grad_norm", "critic/grad_norm") if "algorithm" in settings else ("grad_norm",):
        norms = [record[metric] for record in command.steps()]
        assert len(norms) == 2
        assert all(0 < norm < 1e3 for norm in norms)


@pytest.mark.nightly
def test_replay_on_two_tensor_ranks_matches_fsdp_gradient(tmp_path, capsys):
    model = make_tiny_model(tmp_path / "model", layers=1)
    config = APP.config([f"model.path={model}", "recipe=embedded", "cluster.device=cpu"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    (tmp_path / "batches").mkdir()
    batch = make_batch(16).exclude("advantages")
    save_batch(batch, tmp_path / "batches" / "step_3-version_0.safetensors")

    results = []
    for allocation in ("fsdp:d1", "megatron:t2"):
        assert main(["replay", str(tmp_path), "--allocation", allocation]) == 0
        results.append(json.loads(capsys.readouterr().out))

    fsdp, megatron = results
    assert fsdp["grad_norm"] > 0
    assert megatron["grad_norm"] == pytest.approx(fsdp["grad_norm"], rel=1e-5)
    assert megatron["loss"] == pytest.approx(fsdp["loss"], abs=1e-5)


@pytest.mark.nightly
@pytest.mark.timeout(3300)
def test_default_run_on_two_tensor_ranks_reaches_target_of_fsdp(tmp_path, record_property):
    start = time.monotonic()
    command = Command("gsm8k-grpo", tmp_path / "run", {"allocation": SERVER + "megatron:t2", "seed": 1})
    command.finish(3000)
    record_property("seconds", round(time.monotonic() - start))
    accuracy = [record["eval/accuracy"] for record in command.records() if record.get("eval/accuracy") is not None]
    record_property("accuracy, first and last", f"{accuracy[0]:.3f}, {accuracy[-1]:.3f}")

    checker = Path(__file__).parents[2] / "infra" / "ci" / "check_learning.py"
    subprocess.run([sys.executable, str(checker), str(tmp_path / "run")], check=True, timeout=60)
