"""`rl evaluate`: which model and settings it uses, mistakes before anything starts, and its tables."""

import json
import sys
from pathlib import Path

import pytest
import yaml

from rl_apps.cli import evaluate, main
from rl_apps.programs.gsm8k_grpo import APP as GRPO
from rl_apps.programs.gsm8k_sft import APP as SFT
from rl_apps.settings.compose import to_yaml
from rl_contracts.errors import ConfigError, ModelError
from rl_contracts.runtime.run_files import STAGE_FILE
from rl_contracts.testing.models import make_tiny_model

QUESTIONS = [{"messages": f"{n} + 1?", "answer": str(n + 1), "level": n % 2} for n in range(4)]
REWARD = "def f(prompt, completions, prompt_ids, completion_ids, *, answer, **data):\n    return 1.0\n"
CHAT = ("data.name=chat", "data.path=questions.jsonl", "rollout.reward=good.py:f")


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """Working directory with a model, questions and a reward, in which no process can start."""

    def fail_on_start(*_, **__):
        raise AssertionError("the command started processes")

    monkeypatch.setattr(evaluate, "Launcher", fail_on_start)
    monkeypatch.chdir(tmp_path)
    make_tiny_model(tmp_path / "model", "llama", layers=1, hidden=32)
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    (tmp_path / "good.py").write_text(REWARD)
    return tmp_path


def _make_run(directory, app, *overrides, steps=(2, 10)):
    (directory / "run" / "checkpoints").mkdir(parents=True)
    for step in steps:
        (directory / "run" / "checkpoints" / f"step_{step}").mkdir()
    (directory / "run" / "config.yaml").write_text(to_yaml(app.config(overrides)))
    return directory / "run"


@pytest.mark.parametrize(("mode", "expected"), [("max", 4), ("min", 10)])
def test_find_model_of_run_with_ranked_checkpoints_is_the_best(tmp_path, mode, expected):
    ranking = ("checkpoint.keep_last=1", "checkpoint.keep_best=2", "checkpoint.best_metric=eval/math/pass@8")
    run = _make_run(tmp_path, GRPO, *ranking, f"checkpoint.best_mode={mode}", steps=(2, 4, 10))
    ratings = {1: 0.9, 2: 0.5, 4: 0.5, 10: 0.1}
    records = [{"step": step, "eval/math/pass@8": value} for step, value in ratings.items()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert evaluate.find_model(str(run)) == evaluate.Model(str(run / "checkpoints" / f"step_{expected}"), run)


def test_find_model_of_run_or_checkpoint_knows_its_settings(tmp_path):
    run = _make_run(tmp_path, GRPO)
    newest, first = run / "checkpoints" / "step_10", run / "checkpoints" / "step_2"
    assert evaluate.find_model(str(run)) == evaluate.Model(str(newest), run)
    assert evaluate.find_model(str(first)) == evaluate.Model(str(first), run)
    assert evaluate.find_model("organization/model") == evaluate.Model("organization/model")


def test_find_model_of_run_without_checkpoint_raises(tmp_path):
    with pytest.raises(ModelError, match="expected a run with a checkpoint"):
        evaluate.find_model(str(_make_run(tmp_path, GRPO, steps=())))


def test_evaluation_inherits_data_sampling_and_servers_of_run(tmp_path):
    settings = ("data.name=gsm8k", "data.columns.question=problem", "rollout.generation.max_new_tokens=99", "seed=7")
    sets = ("evaluation.sets.math.n=4", "model.chat_template=plain", "rollout.server.max_sequences=3")
    run = _make_run(tmp_path, GRPO, *settings, *sets, "allocation=embedded:d2+fsdp:d1", "rollout.port=4711")
    model = evaluate.find_model(str(run))

    config = evaluate.compose_config(model, ["evaluation.n=2", "evaluation.temperature=1"], ["level"])

    assert (config.data.name, config.data.columns, config.seed) == ("gsm8k", {"question": "problem"}, 7)
    assert (config.generation.max_new_tokens, config.evaluation.n, config.evaluation.of("math").n) == (99, 2, 4)
    assert (config.allocation, config.rollout.server.max_sequences, config.rollout.port) == ("embedded:d2", 3, 0)
    assert config.total_steps == 0  # the report shows no training
    assert (config.model.path, config.model.chat_template, config.by) == (model.path, "", ["level"])


def test_evaluation_of_run_with_other_servers_drops_their_settings(tmp_path):
    run = _make_run(tmp_path, GRPO, "rollout.server.max_sequences=3")
    config = evaluate.compose_config(evaluate.find_model(str(run)), ["allocation=vllm:d1"], [])
    assert config.allocation == "vllm:d1"


def test_evaluation_of_run_without_servers_has_an_embedded_one(tmp_path):
    run = _make_run(tmp_path, SFT, "allocation=fsdp:d1")
    assert evaluate.compose_config(evaluate.find_model(str(run)), [], []).allocation == "embedded:d1"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model"], "data.name: expected the data to evaluate model on, such as data.name=gsm8k"),
        (["model", "evaluation.sets.a.n=2"], "evaluation.sets.a.data.name: expected the data to evaluate model on"),
        ([*CHAT], "rl evaluate: expected a run, a checkpoint, a model directory or a hub id"),
        (["model", *CHAT, "--by", "subject"], "--by: expected a column of the data (answer, level), found 'subject'"),
        (["model", *CHAT, "rollout.reward=nope"], "unknown name 'nope'"),
        (["model", *CHAT, "data.path=nope.jsonl"], "nope.jsonl: expected a directory"),
        (["model", *CHAT, "evaluation.sets.a.data.path=nope"], "evaluation.sets.a: nope: expected a directory"),
        (["model", *CHAT, "allocation=embedded:d1+fsdp:d1"], "allocation: expected servers of one kind and no trainer"),
        (["model", *CHAT, "evaluation.n=2", "evaluation.k=[4]"], "evaluation.k: expected 1 to evaluation.n=2"),
        (["model", *CHAT, "launcher=slurm"], "launcher.kind: expected a launcher that starts processes"),
        (["model", "nowhere", *CHAT], "model.path=nowhere: expected a directory"),
        (["model", *CHAT, "run_dir=old"], "run_dir: expected a directory without an earlier run or evaluation"),
        (["model", *CHAT, "data.max_length=5"], "have more than 5 tokens"),
    ],
)
def test_evaluate_mistake_ends_before_a_process_starts(directory, capsys, words, message):
    (directory / "old").mkdir()
    (directory / "old" / "config.yaml").write_text(yaml.safe_dump({}))
    assert main.main(["evaluate", *words]) == 2
    assert message in capsys.readouterr().err
    assert not Path("runs/evaluate").exists() or not [*Path("runs/evaluate").iterdir()]


def test_evaluate_reward_finds_module_in_current_directory(directory, monkeypatch):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    (directory / "rewards_here.py").write_text(REWARD)
    assert main.main(["evaluate", "model", *CHAT, "rollout.reward=rewards_here:f", "--dry-run"]) == 0


def test_evaluate_reward_that_fails_is_reported_by_the_trial_episode(directory, capsys):
    (directory / "bad.py").write_text(REWARD.replace("1.0", "1 / 0"))
    assert main.main(["evaluate", "model", *CHAT, "rollout.reward=bad.py:f"]) == 2
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_evaluate_dry_run_names_the_sets(directory, capsys):
    sets = ("evaluation.sets.eight.n=8", "evaluation.sets.none.examples=0")
    assert main.main(["evaluate", "model", *CHAT, *sets, "--dry-run"]) == 0
    assert "would evaluate model on held-out, eight: " in capsys.readouterr().out


def test_evaluate_progress_counts_the_examples_of_a_set(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "MESSAGE_SECONDS", 0.0)
    progress = evaluate._Progress(tmp_path)
    progress([])
    (tmp_path / STAGE_FILE).write_text(json.dumps({"stage": "evaluating eight", "since": 0.0, "progress": [3, 9]}))
    progress([])
    assert capsys.readouterr().out.splitlines() == [
        "0 s, preparing the evaluation",
        "0 s, evaluating eight, 3 of 9 examples",
    ]


def test_evaluate_by_command_line_accepts_settings_after_options():
    arguments = main._parse(["evaluate", "one", "--by", "level", "two", "data.name=gsm8k"])
    assert (arguments.words, arguments.by) == (["one", "two", "data.name=gsm8k"], ["level"])
    with pytest.raises(ConfigError, match="unknown arguments: --bye"):
        main._parse(["evaluate", "one", "--bye"])


def test_table_has_a_row_per_model_and_set_and_all_columns():
    scores = {"accuracy": 0.5, "standard_error": 0.25, "length": 7.0, "truncated": 0.0, "examples": 2.0, "failed": 1.0}
    greedy = {"scores": scores | {"reward": 0.5}, "seconds": 1.25, "tokens": 14, "by": {}}
    sampled = greedy | {"scores": scores | {"reward": 0.5, "pass@4": 1.0}, "by": {"level": {"1": scores}}}
    graded = greedy | {"scores": {k: v for k, v in scores.items() if k != "accuracy"} | {"reward": 3.0}}
    results = [{"model": "m", "sets": {"a": greedy, "b": sampled, "c": graded}}]
    header, *rows = evaluate.table(results).splitlines()
    assert " ".join(header.split()) == (
        "model set accuracy pass@4 reward length truncated examples failed seconds tokens"
    )
    assert rows[0].split() == ["m", "a", "0.500", "±", "0.250", "7.0", "0.000", "2", "1", "1.2", "14"]
    assert rows[1].split() == ["m", "b", "0.500", "±", "0.250", "1.000", "7.0", "0.000", "2", "1", "1.2", "14"]
    assert rows[2].split() == ["m", "c", "3.000", "±", "0.250", "7.0", "0.000", "2", "1", "1.2", "14"]
    (by,) = evaluate.tables_by(results)
    assert by.splitlines()[1].split()[:4] == ["m", "b", "1", "0.500"]
