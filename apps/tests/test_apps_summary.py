"""Summary of a finished run."""

import json
import shlex

import pytest

from rl_apps.run.summary import after_grpo, after_sft, last_checkpoint
from rl_apps.settings import compose
from rl_apps.settings.config import GRPOConfig, SFTConfig
from rl_apps.settings.evaluation_sets import EvaluationSetConfig


def test_after_sft_initial_accuracy_of_zero_has_no_percentage(tmp_path):
    records = [{"step": 0, "loss/eval": 4.0, "eval/accuracy": 0.0}, {"step": 1, "loss/eval": 3.0, "eval/accuracy": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    lines = after_sft(SFTConfig(), tmp_path)
    assert "Held-out loss: 4.0000 -> 3.0000 (-25%)" in lines
    assert "Held-out accuracy: 0.0000 -> 0.5000" in lines


def test_after_grpo_reports_unused_prompts(tmp_path):
    records = [{"step": 1, "version": 1, "groups/left_over": 0.0}, {"step": 2, "version": 2, "groups/left_over": 5.0}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    lines = after_grpo(GRPOConfig(), tmp_path)
    assert "5 prompts were not used" in "\n".join(lines)


def test_after_grpo_without_any_reward_suggests_another_model(tmp_path):
    for last, expected in ((0.0, True), (0.5, False)):
        records = [{"step": 1, "version": 1, "reward/mean": 0.0}, {"step": 2, "version": 2, "reward/mean": last}]
        (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
        assert ("the model learned nothing" in "\n".join(after_grpo(GRPOConfig(), tmp_path))) == expected


def test_after_grpo_graded_reward_is_not_called_accuracy(tmp_path):
    records = [
        {"step": 0, "eval/reward": 1.0, "eval/accuracy": 1.0},  # only here, all rewards happen to be 0 or 1
        {"step": 3, "version": 3, "eval/reward": 12.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    assert "Held-out reward (greedy): 1.000 -> 12.500" in after_grpo(GRPOConfig(), tmp_path)
    (tmp_path / "rollouts").mkdir()
    records = "".join(
        json.dumps({"prompt_id": prompt, "completion": "\u2028"}, ensure_ascii=False) + "\n" for prompt in (7, 8, 8)
    )
    (tmp_path / "rollouts" / "eval_step_3-0.jsonl").write_text(records)
    text = "\n".join(after_grpo(GRPOConfig(), tmp_path))
    assert "Held-out reward (greedy, 2 problems): 1.000 -> 12.500" in text
    assert "accuracy" not in text


def test_after_grpo_without_steps_reports_the_initial_accuracy(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0, "eval/reward": 0.5, "eval/accuracy": 0.5}))
    lines = after_grpo(GRPOConfig(total_steps=0), tmp_path)
    assert "Held-out accuracy (greedy): 0.500" in lines
    assert not any(line.startswith("Try next") for line in lines)


def test_after_grpo_names_each_evaluation_set(tmp_path):
    records = [
        {"step": 0, "eval/math/reward": 0.25, "eval/math/accuracy": 0.25, "eval/code/reward": 0.4},
        {"step": 3, "eval/math/reward": 0.5, "eval/math/accuracy": 0.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    config = GRPOConfig()
    config.evaluation.sets = {name: EvaluationSetConfig() for name in ("math", "code")}
    lines = after_grpo(config, tmp_path)
    assert "Held-out accuracy of math: 0.250 -> 0.500" in lines
    assert "Held-out reward of code: 0.400" in lines


@pytest.mark.parametrize(("parent", "program"), [(0, "rl"), (7, "uv run --package rl-apps rl")])
def test_next_command_is_relative_to_the_current_directory(tmp_path, monkeypatch, parent, program):
    monkeypatch.setattr("rl_apps.run.summary.uv_parent", lambda: parent)
    run_dir = tmp_path / "runs" / "sft" / "1"
    (run_dir / "checkpoints" / "step_3").mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "data").mkdir()
    config = SFTConfig()
    config.data.path = "data"
    monkeypatch.chdir(tmp_path)

    on_policy, reinforced = after_grpo(GRPOConfig(), run_dir, "math-agent")[-1], after_sft(config, run_dir)[-1]

    run = "runs/sft/1"
    staleness = "rollout.max_staleness=0"
    data = "data.name=word-problems data.path=data"
    assert on_policy == (
        f"Try next: {program} math-agent --config {run}/config.yaml run_dir={run}-on-policy {staleness}"
    )
    assert reinforced == f"Try next: {program} gsm8k-grpo {data} model.path={run}/checkpoints/step_3"


@pytest.mark.parametrize("name", ["run", "é (1), b", "it's a=b"])
def test_next_command_quotes_any_directory(tmp_path, name):
    directory = tmp_path / name
    directory.mkdir()
    (directory / "metrics.jsonl").write_text('{"step": 1}\n')

    words = shlex.split(after_grpo(GRPOConfig(), directory)[-1].partition(" --config ")[2])

    assert words[0] == f"{directory}/config.yaml"
    config = compose.compose(GRPOConfig, overrides=["allocation=embedded:d1+fsdp:d1", *words[1:]])
    assert config.run_dir == f"{directory}-on-policy"


def test_summary_of_on_policy_run_does_not_propose_the_same_run(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    config = GRPOConfig()
    config.rollout.max_staleness = 0
    assert not any(line.startswith("Try next") for line in after_grpo(config, tmp_path))


def test_last_checkpoint_ignores_other_directories(tmp_path):
    for name in ("step_2", "step_10", "step_10_merged", "step_best"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)

    assert last_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step_10"
