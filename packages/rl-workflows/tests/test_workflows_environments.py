"""Episodes in environments: what is said, what is learned from, and what becomes of those that fail."""

import asyncio

import gymnasium
import numpy as np
import pytest

from rl_contracts.config import GenerationConfig
from rl_contracts.conformance.workflow import WorkflowConformance
from rl_contracts.errors import DataError, TaskEnvironmentError
from rl_contracts.testing import NullInferenceEngine, NullInferenceEngineConfig, make_tiny_tokenizer
from rl_contracts.testing.chat_formats import format_completion, make_chat_tokenizer
from rl_contracts.workflow import Environment
from rl_workflows import EnvironmentWorkflow, TextGame

GENERATION = GenerationConfig(max_new_tokens=64, temperature=0.7)
ROW = {"goal": 7, "prompt_id": 0}
TOKENIZER = make_chat_tokenizer("llama3")


class HotOrCold(Environment):
    """Guess a number; each guess earns 0.1, the right one 1."""

    closed = 0

    async def reset(self, data):
        self.goal = data["goal"]
        return [{"role": "user", "content": "guess"}]

    async def step(self, completion):
        right = str(self.goal) in completion
        return [{"role": "user", "content": "no"}], 1.0 if right else 0.1, right

    async def close(self):
        type(self).closed += 1


def scripted(*answers):
    left, asked = list(answers), []

    def answer(request):
        asked.append(TOKENIZER.decode(request.input_ids))
        return TOKENIZER.encode(format_completion("llama3", left.pop(0)), add_special_tokens=False)

    config = NullInferenceEngineConfig(seconds_per_token=0.0, vocab_size=len(TOKENIZER))
    return NullInferenceEngine(config, answer=answer), asked


def no_reward(*given, **data):
    raise AssertionError("an environment has its own rewards")


def workflow(environment, max_length=None, **more):
    return EnvironmentWorkflow(TOKENIZER, GENERATION, no_reward, max_length, environment=environment, **more)


class TestConformance(WorkflowConformance):
    def make_workflow(self):
        return EnvironmentWorkflow(
            make_tiny_tokenizer(), GENERATION, no_reward, 400, environment=HotOrCold, turns=3, credit="turn"
        )

    def rows(self):
        return [ROW, {**ROW, "goal": 60}]


class HalfEmoji(HotOrCold):
    async def step(self, completion):
        return [{"role": "user", "content": "cold \ud83d"}], 0.1, False


@pytest.mark.parametrize("handling", ["reject", "replace"])
async def test_environment_text_that_is_not_utf8_is_rejected_or_replaced(handling):
    engine, asked = scripted("is it 3", "is it 7")
    episodes = workflow(HalfEmoji, turns=2)
    episodes.invalid_text = handling

    if handling == "reject":
        with pytest.raises(DataError, match="UTF-8"):
            await episodes.arun_episode(engine, ROW)
    else:
        await episodes.arun_episode(engine, ROW)
        assert "cold \ufffd" in asked[1]


async def test_environment_talks_until_it_is_done_and_its_rewards_are_added():
    engine, asked = scripted("is it 3", "is it 7", "never asked")
    HotOrCold.closed = 0

    [row] = await workflow(HotOrCold, discount=0.5).arun_episode(engine, ROW)

    assert row.reward == pytest.approx(0.1 + 0.5 * 1.0)
    assert row.info["turns"] == 2
    assert asked[1].startswith(asked[0] + "is it 3<|eot_id|>")
    assert "no" in asked[1].removeprefix(asked[0])
    assert HotOrCold.closed == 1


async def test_environment_rewards_of_turns_stand_on_their_last_tokens():
    engine, _ = scripted("is it 3", "is it 7")

    [row] = await workflow(HotOrCold, credit="turn").arun_episode(engine, ROW)

    assert row.reward == 0.0
    np.testing.assert_allclose(row.token_rewards[row.token_rewards != 0], [0.1, 1.0], rtol=1e-6)


async def test_environment_that_is_never_done_ends_after_its_turns_or_at_the_end_of_the_context():
    engine, asked = scripted(*["is it 3"] * 9)

    [row] = await workflow(HotOrCold, turns=3).arun_episode(engine, ROW)
    assert (len(asked), row.reward) == (3, pytest.approx(0.3))

    [row] = await workflow(HotOrCold, max_length=len(row) - 10).arun_episode(engine, ROW)
    assert row.info["turns"] == 2


class Fails(HotOrCold):
    def __init__(self, how):
        self.how = how

    async def reset(self, data):
        if self.how == "reset":
            raise KeyError("planted")
        return await super().reset(data)

    async def step(self, completion):
        if self.how == "hangs":
            await asyncio.Event().wait()
        if self.how == "ours":
            raise DataError("planted")
        if self.how == "step":
            raise KeyError("planted")
        return [], float("nan"), False


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("reset", "Fails.reset raised KeyError: 'planted'"),
        ("step", "Fails.step raised KeyError: 'planted'"),
        ("hangs", "Fails.step did not end within 0.2 s"),
        ("reward", "Fails.step returned reward nan"),
    ],
)
async def test_environment_that_fails_is_counted_under_its_boundary_and_closed(how, message):
    engine, _ = scripted("is it 3")
    Fails.closed = 0

    with pytest.raises(TaskEnvironmentError, match=message) as found:
        await workflow(lambda: Fails(how), seconds=0.2).arun_episode(engine, ROW)

    assert found.value.boundary == "environment"
    assert Fails.closed == 1


async def test_environment_error_of_ours_keeps_its_boundary():
    engine, _ = scripted("is it 3")

    with pytest.raises(DataError, match="planted"):
        await workflow(lambda: Fails("ours")).arun_episode(engine, ROW)


class Lake(TextGame):
    """A real game of the package, played with words."""

    instructions = "Walk to G."

    def make(self, data):
        return gymnasium.make("FrozenLake-v1", is_slippery=False, render_mode="ansi", max_episode_steps=data["steps"])

    def action(self, completion):
        return ["left", "down", "right", "up"].index(completion.split()[-1])

    def format_observation(self, observation):
        return f"You are at {observation}."


async def test_game_of_gymnasium_is_played_to_its_reward():
    way = ["down", "go down", "right", "right", "down", "right"]
    engine, asked = scripted(*way)

    [row] = await workflow(Lake).arun_episode(engine, {"steps": 20, "seed": 1, "prompt_id": 0})

    assert row.reward == 1.0
    assert row.info["turns"] == len(way)
    assert "Walk to G.\n\nYou are at 0." in asked[0]
    assert "You are at 4." in asked[1]


async def test_game_of_gymnasium_that_is_truncated_ends_and_one_that_fails_is_an_error():
    engine, asked = scripted("left", "left", "fly")

    [row] = await workflow(Lake).arun_episode(engine, {"steps": 2, "prompt_id": 0})
    assert (row.reward, len(asked)) == (0.0, 2)

    with pytest.raises(TaskEnvironmentError, match=r"Lake.step raised ValueError: 'fly' is not in list"):
        await workflow(Lake).arun_episode(engine, {"steps": 2, "prompt_id": 0})
