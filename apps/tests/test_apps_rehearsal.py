"""Workflow and reward are tried once before anything starts, and a mistake in them is told with its line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rl_apps.cli.driver import main
from rl_apps.preflight.trial_episode import run_trial_episode
from rl_apps.programs import gsm8k_grpo
from rl_apps.run.app import Run
from rl_apps.settings.device_layout import layout_of
from rl_contracts.errors import ConfigError
from rl_contracts.testing.models import make_tiny_model

BIN = Path(sys.executable).parent

MINE = """
import dataclasses
import aiohttp
import numpy as np
from rl_apps.programs import gsm8k_grpo
from rl_contracts.data import ModelRequest
from rl_contracts.batch.trajectory import from_response
from rl_contracts.workflow import AgentWorkflow, Environment, RolloutWorkflow

def close(prompt, completions, prompt_ids, completion_ids, answer, **data):
    print("scored", completions)
    return 0.5

def of_another_library(completions):
    return 1.0

def raises(prompt, completions, prompt_ids, completion_ids, **data):
    return data["gold"]  # there is none

def returns_none(prompt, completions, prompt_ids, completion_ids, **data):
    pass

class Flow(RolloutWorkflow):
    def __init__(self, tokenizer, generation, reward, max_length):
        self.generation = generation

    async def rows(self, engine):
        return [from_response(await engine.agenerate(ModelRequest([1, 2], self.generation)), reward=1, temperature=1)]

    async def arun_episode(self, engine, data):
        return await self.rows(engine)

class Careless(Flow):
    async def arun_episode(self, engine, data):
        return data["missing"]  # no such key

class Single(Flow):
    async def arun_episode(self, engine, data):
        return (await self.rows(engine))[0]

class Dicts(Flow):
    async def arun_episode(self, engine, data):
        return [{"input_ids": [1]}]

class Unwritable(Flow):
    async def arun_episode(self, engine, data):
        (row,) = await self.rows(engine)
        return [dataclasses.replace(row, info={"share": np.float32(0.5)})]

class Uneven(Flow):
    async def arun_episode(self, engine, data):
        (row,) = await self.rows(engine)
        return [dataclasses.replace(row, loss_mask=row.loss_mask[2:])]

class Unmade(Flow):
    def __init__(self, tokenizer):
        pass

class Agent(AgentWorkflow):
    def __init__(self, reward):
        self.reward = reward

    async def run(self, data, *, base_url, api_key, http_client):
        headers = {"Authorization": f"Bearer {api_key}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            async with http.post(f"{base_url}/chat/completions", json={"messages": data["messages"]}) as response:
                made = await response.json()
        answer = made["choices"][0]["message"]["content"]
        return await self.reward("", answer, [], [], answer=data["answer"])

class Clumsy(Agent):
    async def run(self, data, **given):
        return await super().run(data, **given) / 0  # no number

class World(Environment):
    async def reset(self, data):
        return data["messages"]

    async def step(self, completion):
        return [], float(len(completion)), True

class Island(World):
    async def step(self, completion):
        return {}["ship"]  # none comes

def measure(run):
    raise NotImplementedError("it measures")

APP = dataclasses.replace(gsm8k_grpo.APP, measure=measure)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, hidden=32)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    file = tmp_path / "my_parts.py"
    file.write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_parts", raising=False)
    return file


def _line(text):
    return next(n for n, line in enumerate(MINE.splitlines(), 1) if text in line)


def _rehearse(model, directory, *overrides):
    config = gsm8k_grpo.APP.config([f"model.path={model}", *overrides])
    run_trial_episode(Run(config, layout_of(config.allocation, "required"), directory, "cpu"), "rl")


@pytest.mark.slow
@pytest.mark.usefixtures("mine")
def test_rehearsal_of_what_works_says_nothing_and_leaves_what_the_reward_printed(model, tmp_path):
    _rehearse(model, tmp_path, "rollout.reward=my_parts:close")
    _rehearse(model, tmp_path, "rollout.workflow=my_parts:Flow")
    _rehearse(model, tmp_path, "rollout.workflow=my_parts:Agent")
    _rehearse(model, tmp_path, "rollout.workflow=multi-turn")
    _rehearse(model, tmp_path, "rollout.workflow=my_parts:World")
    _rehearse(model, tmp_path, "rollout.reward=my_parts:close", "data.max_length=2")  # less than any prompt

    assert (tmp_path / "logs" / "reward-0.log").read_text().startswith("scored ")


@pytest.mark.parametrize(
    ("override", "message", "line"),
    [
        ("rollout.reward=my_parts:raises", "KeyError: 'gold'", "there is none"),
        ("rollout.reward=my_parts:returns_none", "expected a number as reward, found NoneType", "def returns_none"),
        ("rollout.reward=my_parts:of_another_library", "unexpected keyword argument 'answer'", "def of_another"),
        ("rollout.workflow=my_parts:Careless", "KeyError: 'missing'", "no such key"),
        ("rollout.workflow=my_parts:Clumsy", "Clumsy.run raised ZeroDivisionError", "no number"),
        ("rollout.workflow=my_parts:Island", "Island.step raised KeyError: 'ship'", "none comes"),
        ("rollout.workflow=my_parts:Unwritable", "`info` of a trajectory", "class Unwritable"),
        ("rollout.workflow=my_parts:Single", "returned one Trajectory: expected a list", "class Single"),
        (
            "rollout.workflow=my_parts:Dicts",
            "returned a list with one dict: expected Trajectory objects",
            "class Dicts",
        ),
        ("rollout.workflow=my_parts:Uneven", "arrays differ in length: .*'loss_mask': ", "class Uneven"),
        ("rollout.workflow=my_parts:Unmade", r"__init__\(\) takes 2 positional arguments but 5 were given", ""),
    ],
)
def test_rehearsal_mistake_is_one_sentence_with_the_users_own_line(mine, model, tmp_path, override, message, line):
    with pytest.raises(ConfigError, match=message) as told:
        _rehearse(model, tmp_path, override)

    assert override in str(told.value)
    assert "rollout.rehearsal=false" in str(told.value)
    assert "Traceback" not in str(told.value)
    assert "\n" not in str(told.value)
    if line:
        number = _line(line) + line.startswith("class ")  # of its first function
        assert f"({mine}:{number})" in str(told.value)


def test_rehearsal_of_gdpo_with_a_reward_without_parts_is_refused(mine, model, tmp_path):
    with pytest.raises(ConfigError, match="CompositeReward"):
        _rehearse(model, tmp_path, "rollout.reward=my_parts:close", "algorithm=gdpo")


@pytest.mark.nightly
def test_mistake_is_told_before_the_warm_up_and_the_rows_are_measured(mine, tmp_path, monkeypatch, capsys):
    def warm_up(*_):
        raise NotImplementedError("it warms up")

    monkeypatch.setattr("rl_apps.embedded.prepare.warm_up", warm_up)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))

    assert main("my_parts:APP", ["rollout.reward=my_parts:raises", f"run_dir={tmp_path / 'run'}"]) == 2

    captured = capsys.readouterr()
    assert f"({mine}:{_line('there is none')})" in captured.err
    assert captured.out.splitlines()[2:] == [
        "loading and checking the data",
        "building the embedded model",
        "running a trial episode on one example",
    ]
    assert main("my_parts:APP", ["rollout.reward=my_parts:close", f"run_dir={tmp_path / 'run'}"]) == 2
    captured = capsys.readouterr()
    assert "NotImplementedError: it measures" in captured.err
    assert captured.out.splitlines()[3:] == [  # the model is there now
        "running a trial episode on one example",
        "measuring sequence lengths",
    ]


@pytest.mark.nightly
def test_dry_run_tells_a_mistake_too_and_leaves_nothing(mine, model, tmp_path, capsys):
    given = (f"model.path={model}", f"run_dir={tmp_path / 'run'}", "--dry-run")
    assert main("gsm8k-grpo", ["rollout.reward=my_parts:raises", "model.chat_template=plain", *given]) == 2
    assert f"({mine}:{_line('there is none')})" in capsys.readouterr().err
    assert main("gsm8k-grpo", ["rollout.reward=my_parts:close", "model.chat_template=plain", *given]) == 0
    assert not (tmp_path / "run").exists()


LOSSES = """
def right(terms, *, clip_high, slope=0.1):
    return -terms.ratio.clamp(max=1 + clip_high) * terms.advantages, {"clip/high": terms.ratio > 1 + clip_high}

def misspelt(terms):
    return -terms.ratio * terms.advantage, {}  # it has an s

def summed(terms):
    return -(terms.ratio * terms.advantages).mean(), {}

def detached(terms):
    return -(terms.ratio.detach() * terms.advantages), {}
"""


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "misspelt",
            "made-up tokens: AttributeError: 'PolicyTerms' object has no attribute 'advantage' ({file}:6). docs",
        ),
        ("summed", "algorithm.loss: expected a pair"),
        ("detached", "algorithm.loss: the losses have no gradient"),
    ],
)
def test_loss_of_ones_own_is_tried_before_anything_starts(model, tmp_path, capsys, monkeypatch, name, told):
    file = tmp_path / "my_losses.py"
    file.write_text(LOSSES)
    monkeypatch.chdir(tmp_path)
    given = (f"model.path={model}", "model.chat_template=plain", "--dry-run")

    assert main("gsm8k-grpo", [f"algorithm.loss.kind=my_losses.py:{name}", *given]) == 2
    assert told.format(file=file) in capsys.readouterr().err
    assert main("gsm8k-grpo", ["algorithm.loss.kind=my_losses.py:right", *given]) == 0


@pytest.mark.slow
def test_command_with_a_mistake_in_a_reward_ends_before_servers_start(mine, model, tmp_path):
    command = [str(BIN / "gsm8k-grpo"), "rollout.reward=my_parts:raises", "run_dir=run", f"model.path={model}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    assert done.returncode == 2
    assert f"({mine}:{_line('there is none')})" in done.stderr
    assert "Traceback" not in done.stderr
    assert "starting" not in done.stdout
    assert not list((tmp_path / "run" / "logs").glob("rollout-*"))


@pytest.mark.parametrize(("wrong", "code"), [(0, 0), (1, 0), (3, 2)])
def test_gold_answers_are_scored_before_the_start(model, tmp_path, capsys, wrong, code):
    rows = [{"question": "1 + 1?", "answer": "#### 2"}] * (12 - wrong) + [{"question": "?", "answer": "two"}] * wrong
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = [f"data.path={tmp_path}", "data.name=gsm8k", "evaluation.rows=0", "data.batch_size=4"]

    assert main("gsm8k-grpo", ["--dry-run", f"model.path={model}", *words]) == code

    captured = capsys.readouterr()
    assert f"{12 - wrong} of 12 gold answers score 1" in captured.out + captured.err
    assert ("row 11 does not" in captured.out) == (wrong == 1)
