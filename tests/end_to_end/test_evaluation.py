"""`rl evaluate` and evaluation sets with real servers, compared with greedy decoding by transformers."""

import json
import os
import re
import subprocess
import sys
from math import comb
from pathlib import Path
from statistics import fmean

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_contracts.chat.rendering import ChatRenderer
from rl_contracts.runtime.json_lines import json_lines
from rl_contracts.testing.models import make_tiny_model

BIN = Path(sys.executable).parent
NEW_TOKENS = 16
NEAR = 1e-3
"""Difference of the two largest logits below which either token is correct."""
REWARD = """
def parity(prompt, completions, prompt_ids, completion_ids, **data):
    return float(sum(completion_ids) % 2)

parity.extract_answer = lambda text: str(len(text) % 3)
"""
QUESTIONS = [
    {"messages": f"What is {n} plus {n}?", "answer": str(2 * n), "size": "small" if n < 4 else "large"}
    for n in range(9)
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(700)]


def _rl(directory, *arguments):
    done = subprocess.run(
        [BIN / "rl", *map(str, arguments)], capture_output=True, text=True, timeout=600, cwd=directory
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Directory with a model, questions and a reward."""
    directory = tmp_path_factory.mktemp("evaluation")
    make_tiny_model(directory / "model", "llama", layers=2, hidden=64)
    (directory / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    (directory / "rewards.py").write_text(REWARD)
    return directory


@pytest.fixture(scope="module")
def evaluated(directory):
    """Result file, page and output of an evaluation on two sets."""
    output = _rl(
        directory,
        *("evaluate", "model", "data.name=chat", "data.path=questions.jsonl", "rollout.reward=rewards.py:parity"),
        *(
            f"evaluation.max_new_tokens={NEW_TOKENS}",
            "evaluation.sets.several.n=6",
            "evaluation.sets.several.k=[1,2,6]",
        ),
        *("evaluation.sets.several.temperature=1", "--by", "size", "--json", "out.json", "--page", "page.html"),
        "run_dir=out",
    )
    return json.loads((directory / "out.json").read_text())["models"][0], (directory / "page.html").read_text(), output


def _reference(model, prompt, stop_ids):
    """Return greedy tokens, and the position from which the choice of a token is uncertain."""
    ids, uncertain = list(prompt), None
    for position in range(NEW_TOKENS):
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        first, second = logits.topk(2).values.tolist()
        if uncertain is None and first - second < NEAR:
            uncertain = position
        ids.append(int(logits.argmax()))
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt) :], NEW_TOKENS if uncertain is None else uncertain


def _certain_tokens(directory, model):
    """Check completions against greedy decoding by transformers, and return the number of tokens compared."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(model))
    records = {r["prompt_id"]: r for r in json_lines(directory / "rollouts" / "eval_step_0-0.jsonl")}
    assert len(records) == len(QUESTIONS)
    certain = 0
    for number, question in enumerate(QUESTIONS):
        prompt = renderer.render([{"role": "user", "content": question["messages"]}])
        expected, sure = _reference(reference, prompt, renderer.stop_ids)
        assert records[number]["token_ids"][:sure] == expected[:sure]
        certain += min(sure, len(expected))
    return certain


def test_evaluate_greedy_completions_match_transformers(directory, evaluated):
    assert _certain_tokens(directory / "out", directory / "model") > len(QUESTIONS) * NEW_TOKENS / 2
    records = json_lines(directory / "out" / "rollouts" / "eval_step_0-0.jsonl")
    rewards = [float(sum(record["token_ids"]) % 2) for record in records]
    scores = evaluated[0]["sets"]["held-out"]["scores"]
    assert (scores["accuracy"], scores["examples"], scores["failed"]) == (pytest.approx(fmean(rewards)), 9.0, 0.0)


@pytest.mark.nightly
def test_evaluate_pretrained_model_matches_transformers(directory, request):
    model = request.getfixturevalue("smollm2")
    data = ("data.name=chat", "data.path=questions.jsonl", "rollout.reward=math", "rollout.server.dtype=float32")
    _rl(directory, "evaluate", model, *data, f"evaluation.max_new_tokens={NEW_TOKENS}", "run_dir=pretrained")
    assert _certain_tokens(directory / "pretrained", model) > len(QUESTIONS) * 4


def test_evaluate_several_completions_equal_formulas(directory, evaluated):
    result = evaluated[0]["sets"]["several"]
    by_example = {}
    for record in json_lines(directory / "out" / "rollouts" / "eval_several_step_0-0.jsonl"):
        by_example.setdefault(record["prompt_id"], []).append(record["reward"])
    assert {len(rewards) for rewards in by_example.values()} == {6}
    for k in (1, 2, 6):
        expected = fmean(1 - comb(6 - int(sum(rewards)), k) / comb(6, k) for rewards in by_example.values())
        assert result["scores"][f"pass@{k}"] == pytest.approx(expected)
    assert 0 <= result["scores"]["maj@6"] <= 1
    assert "maj@1" not in result["scores"]
    assert (result["n"], result["sampling"]["temperature"]) == (6, 1.0)
    assert result["sampling"]["max_new_tokens"] == NEW_TOKENS
    sizes = result["by"]["size"]
    assert {size: scores["examples"] for size, scores in sizes.items()} == {"small": 4.0, "large": 5.0}
    mean = sum(scores["accuracy"] * scores["examples"] for scores in sizes.values()) / len(QUESTIONS)
    assert mean == pytest.approx(result["scores"]["accuracy"])


def test_evaluate_prints_tables_and_writes_page(evaluated):
    _, page, output = evaluated
    assert re.search(r"^model +set +accuracy .*pass@6", output, re.MULTILINE)
    assert re.search(r"^model +several +small ", output, re.MULTILINE)
    data = json.loads(page.partition('id="data">')[2].partition("</script")[0])
    completions = data["runs"][0]["completions"]
    assert {completion.get("set") for completion in completions} == {None, "several"}
    assert all(completion["evaluation"] for completion in completions)


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_evaluate_runs_reproduces_last_evaluation_of_training(directory):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    settings = ("model.path=model", "data.name=chat", "data.path=split", "rollout.reward=rewards.py:parity")
    (directory / "split").mkdir()
    for split in ("train", "test"):
        (directory / "split" / f"{split}.jsonl").write_text((directory / "questions.jsonl").read_text())
    small = ("total_steps=2", "data.batch_size=4", "rollout.group_size=2", "rollout.generation.max_new_tokens=8")
    best = ("evaluation.every=1", "checkpoint.every=1", "checkpoint.keep_last=2", "checkpoint.keep_best=1")
    sets = ("evaluation.sets.again.max_new_tokens=5", "checkpoint.best_metric=eval/again/accuracy")
    command = [BIN / "rl", "grpo", *settings, *small, *best, *sets, "run_dir=run", "recipe=embedded"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=directory, env=environment)
    assert done.returncode == 0, done.stderr + done.stdout

    _rl(directory, "evaluate", "run", "run/checkpoints/step_1", "--json", "runs.json", "run_dir=both")

    best_model, first_model = json.loads((directory / "runs.json").read_text())["models"]
    records = [record for record in json_lines(directory / "run" / "metrics.jsonl") if record["step"]]
    ratings = {record["step"]: record["eval/again/accuracy"] for record in records}
    step = max(ratings, key=lambda step: (ratings[step], step))
    assert best_model["model"].endswith(f"checkpoints/step_{step}")
    for model, at in ((best_model, step), (first_model, 1)):
        record = next(record for record in records if record["step"] == at)
        assert model["sets"]["held-out"]["scores"]["accuracy"] == pytest.approx(record["eval/accuracy"])
        assert model["sets"]["again"]["scores"]["accuracy"] == pytest.approx(record["eval/again/accuracy"])
