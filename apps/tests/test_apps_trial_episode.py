"""Trial episode: workflow and reward run once before anything starts, and an error names the line of the mistake."""

import json
import sys

import pytest

from rl_apps.cli.driver import main
from rl_apps.preflight.trial_episode import run_trial_episode
from rl_apps.programs import gsm8k_grpo
from rl_apps.run.app import Run
from rl_apps.settings.device_layout import layout_of
from rl_contracts.errors import ConfigError
from rl_contracts.testing.models import make_tiny_model

USER_CODE = """
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

def foreign_signature(completions):
    return 1.0

def raises(prompt, completions, prompt_ids, completion_ids, **data):
    return data["gold"]  # missing column

class Flow(RolloutWorkflow):
    def __init__(self, tokenizer, generation, reward, max_length):
        self.generation = generation

    async def trajectories(self, engine):
        return [from_response(await engine.agenerate(ModelRequest([1, 2], self.generation)), reward=1, temperature=1)]

    async def arun_episode(self, engine, data):
        return await self.trajectories(engine)

class MissingKey(Flow):
    async def arun_episode(self, engine, data):
        return data["missing"]  # no such key

class Single(Flow):
    async def arun_episode(self, engine, data):
        return (await self.trajectories(engine))[0]

class Dicts(Flow):
    async def arun_episode(self, engine, data):
        return [{"input_ids": [1]}]

class NotSerializable(Flow):
    async def arun_episode(self, engine, data):
        (trajectory,) = await self.trajectories(engine)
        return [dataclasses.replace(trajectory, info={"share": np.float32(0.5)})]

class UnequalLengths(Flow):
    async def arun_episode(self, engine, data):
        (trajectory,) = await self.trajectories(engine)
        return [dataclasses.replace(trajectory, loss_mask=trajectory.loss_mask[2:])]

class OtherConstructor(Flow):
    def __init__(self, tokenizer):
        pass

class Agent(AgentWorkflow):
    def __init__(self, reward):
        self.reward = reward

    async def run(self, data, *, base_url, api_key, http_client):
        headers = {"Authorization": f"Bearer {api_key}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            async with http.post(f"{base_url}/chat/completions", json={"messages": data["messages"]}) as response:
                body = await response.json()
        completion = body["choices"][0]["message"]["content"]
        return await self.reward("", completion, [], [], answer=data["answer"])

class FailingAgent(Agent):
    async def run(self, data, **connection):
        return await super().run(data, **connection) / 0  # division by zero

class World(Environment):
    async def reset(self, data):
        return data["messages"]

    async def step(self, completion):
        return [], float(len(completion)), True

class FailingWorld(World):
    async def step(self, completion):
        return {}["ship"]  # missing item

def measure(run):
    raise NotImplementedError("measuring started")

APP = dataclasses.replace(gsm8k_grpo.APP, measure=measure)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, hidden=32)


@pytest.fixture
def user_code(tmp_path, monkeypatch):
    file = tmp_path / "my_parts.py"
    file.write_text(USER_CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_parts", raising=False)
    return file


def _line(text):
    return next(n for n, line in enumerate(USER_CODE.splitlines(), 1) if text in line)


def _run_trial(model, directory, *overrides):
    config = gsm8k_grpo.APP.config([f"model.path={model}", *overrides])
    run_trial_episode(Run(config, layout_of(config.allocation, "required"), directory, "cpu"), "rl")


@pytest.mark.slow
@pytest.mark.usefixtures("user_code")
def test_trial_episode_of_working_code_prints_nothing(model, tmp_path):
    _run_trial(model, tmp_path, "rollout.reward=my_parts:close")
    _run_trial(model, tmp_path, "rollout.workflow=my_parts:Flow")
    _run_trial(model, tmp_path, "rollout.workflow=my_parts:Agent")
    _run_trial(model, tmp_path, "rollout.workflow=multi-turn")
    _run_trial(model, tmp_path, "rollout.workflow=my_parts:World")
    _run_trial(model, tmp_path, "rollout.reward=my_parts:close", "data.max_length=2")  # below the length of any prompt

    assert (tmp_path / "logs" / "reward-0.log").read_text().startswith("scored ")


@pytest.mark.parametrize(
    ("override", "message", "line"),
    [
        (
            "rollout.reward=my_parts:raises",
            r"KeyError: 'gold' .*\(the example has answer, .*messages",
            "missing column",
        ),
        ("rollout.reward=my_parts:foreign_signature", "unexpected keyword argument 'answer'", "def foreign_signature"),
        ("rollout.workflow=my_parts:MissingKey", "KeyError: 'missing'", "no such key"),
        ("rollout.workflow=my_parts:FailingAgent", "FailingAgent.run raised ZeroDivisionError", "division by zero"),
        ("rollout.workflow=my_parts:FailingWorld", "FailingWorld.step raised KeyError: 'ship'", "missing item"),
        ("rollout.workflow=my_parts:NotSerializable", "`info` of a trajectory", "class NotSerializable"),
        ("rollout.workflow=my_parts:Single", "returned one Trajectory: expected a list", "class Single"),
        ("rollout.workflow=my_parts:Dicts", "one dict: expected Trajectory objects", "class Dicts"),
        (
            "rollout.workflow=my_parts:UnequalLengths",
            "arrays differ in length: .*'loss_mask': ",
            "class UnequalLengths",
        ),
        (
            "rollout.workflow=my_parts:OtherConstructor",
            r"__init__\(\) takes 2 positional arguments but 5 were given",
            "",
        ),
    ],
)
def test_trial_episode_error_names_the_users_line(user_code, model, tmp_path, override, message, line):
    with pytest.raises(ConfigError, match=message) as error:
        _run_trial(model, tmp_path, override)

    assert override in str(error.value)
    assert "rollout.trial_episode=false" in str(error.value)
    assert "Traceback" not in str(error.value)
    assert "\n" not in str(error.value)
    if line:
        number = _line(line) + line.startswith("class ")  # for a class, the error names the first method
        assert f"({user_code}:{number})" in str(error.value)


def test_trial_episode_of_gdpo_needs_reward_components(user_code, model, tmp_path):
    with pytest.raises(ConfigError, match="CompositeReward"):
        _run_trial(model, tmp_path, "rollout.reward=my_parts:close", "algorithm=gdpo")


@pytest.mark.nightly
def test_trial_episode_runs_before_warm_up_and_measuring(user_code, tmp_path, monkeypatch, capsys):
    def warm_up(*_):
        raise NotImplementedError("warm-up started")

    monkeypatch.setattr("rl_apps.embedded.prepare.warm_up", warm_up)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))

    assert main("my_parts:APP", ["rollout.reward=my_parts:raises", f"run_dir={tmp_path / 'run'}"]) == 2

    captured = capsys.readouterr()
    assert f"({user_code}:{_line('missing column')})" in captured.err
    assert captured.out.splitlines()[2:] == [
        "loading and checking the data",
        "building the embedded model",
        "running a trial episode on one example",
    ]
    assert main("my_parts:APP", ["rollout.reward=my_parts:close", f"run_dir={tmp_path / 'run'}"]) == 2
    captured = capsys.readouterr()
    assert "NotImplementedError: measuring started" in captured.err
    assert captured.out.splitlines()[3:] == [  # the model was built by the first command
        "running a trial episode on one example",
        "scoring the gold answers",
        "measuring sequence lengths",
    ]


@pytest.mark.nightly
def test_dry_run_runs_the_trial_episode_and_leaves_no_files(user_code, model, tmp_path, capsys):
    arguments = (f"model.path={model}", f"run_dir={tmp_path / 'run'}", "--dry-run")
    assert main("gsm8k-grpo", ["rollout.reward=my_parts:raises", "model.chat_template=plain", *arguments]) == 2
    assert f"({user_code}:{_line('missing column')})" in capsys.readouterr().err
    assert main("gsm8k-grpo", ["rollout.reward=my_parts:close", "model.chat_template=plain", *arguments]) == 0
    assert not (tmp_path / "run").exists()


LOSSES = """
def right(terms, *, clip_high, slope=0.1):
    return -terms.ratio.clamp(max=1 + clip_high) * terms.advantages, {"clip/high": terms.ratio > 1 + clip_high}

def misspelt(terms):
    return -terms.ratio * terms.advantage, {}  # misspelled: advantages

def summed(terms):
    return -(terms.ratio * terms.advantages).mean(), {}

def detached(terms):
    return -(terms.ratio.detach() * terms.advantages), {}
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "misspelt",
            "synthetic tokens: AttributeError: 'PolicyTerms' object has no attribute 'advantage' ({file}:6). docs",
        ),
        ("summed", "algorithm.loss: expected a pair"),
        ("detached", "algorithm.loss: the losses have no gradient"),
        ("right", ""),
    ],
)
def test_custom_loss_is_called_before_start(model, tmp_path, capsys, monkeypatch, name, message):
    file = tmp_path / "my_losses.py"
    file.write_text(LOSSES)
    monkeypatch.chdir(tmp_path)
    arguments = (f"model.path={model}", "model.chat_template=plain", "--dry-run")

    assert main("gsm8k-grpo", [f"algorithm.loss.kind=my_losses.py:{name}", *arguments]) == (2 if message else 0)
    assert message.format(file=file) in capsys.readouterr().err


@pytest.mark.parametrize(("wrong", "code"), [(0, 0), (1, 0), (3, 2)])
def test_gold_answers_are_scored_before_start(model, tmp_path, capsys, wrong, code):
    rows = [{"question": "1 + 1?", "answer": "#### 2"}] * (12 - wrong) + [{"question": "?", "answer": "two"}] * wrong
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arguments = [f"data.path={tmp_path}", "data.name=gsm8k", "evaluation.examples=0", "data.batch_size=4"]

    assert main("gsm8k-grpo", ["--dry-run", f"model.path={model}", *arguments]) == code

    captured = capsys.readouterr()
    assert f"{12 - wrong} of 12 gold answers score 1" in captured.out + captured.err
    assert ("example 11 does not" in captured.out) == (wrong == 1)
