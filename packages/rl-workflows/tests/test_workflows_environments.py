"""Episodes in environments: prompts, rewards, trained tokens, and failures."""

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
EXAMPLE = {"goal": 7, "prompt_id": 0}
TOKENIZER = make_chat_tokenizer("llama3")


class HotOrCold(Environment):
    """Game of guessing a number: the right guess earns 1, any other 0.1."""

    closed = 0

    async def reset(self, data):
        self.goal = data["goal"]
        return [{"role": "user", "content": "guess"}]

    async def step(self, completion):
        right = str(self.goal) in completion
        return [{"role": "user", "content": "no"}], 1.0 if right else 0.1, right

    async def close(self):
        type(self).closed += 1


def scripted(*completions):
    """Return an engine with these completions, in order, and the list of prompts that it receives."""
    remaining, prompts = list(completions), []

    def complete(request):
        prompts.append(TOKENIZER.decode(request.input_ids))
        return TOKENIZER.encode(format_completion("llama3", remaining.pop(0)), add_special_tokens=False)

    config = NullInferenceEngineConfig(seconds_per_token=0.0, vocab_size=len(TOKENIZER))
    return NullInferenceEngine(config, answer=complete), prompts


def no_reward(*args, **data):
    raise AssertionError("the workflow of an environment must not call the reward function")


def workflow(environment, max_length=None, **options):
    return EnvironmentWorkflow(TOKENIZER, GENERATION, no_reward, max_length, environment=environment, **options)


class TestConformance(WorkflowConformance):
    def make_workflow(self):
        return EnvironmentWorkflow(
            make_tiny_tokenizer(), GENERATION, no_reward, 400, environment=HotOrCold, turns=3, credit="turn"
        )

    def rows(self):
        return [EXAMPLE, {**EXAMPLE, "goal": 60}]


class HalfEmoji(HotOrCold):
    async def step(self, completion):
        return [{"role": "user", "content": "cold \ud83d"}], 0.1, False


async def test_environment_invalid_utf8_is_replaced_if_configured():
    engine, prompts = scripted("is it 3", "is it 7")
    episodes = workflow(HalfEmoji, turns=2)
    episodes.invalid_text = "replace"

    await episodes.arun_episode(engine, EXAMPLE)

    assert "cold \ufffd" in prompts[1]


async def test_environment_until_done_sums_discounted_rewards():
    engine, prompts = scripted("is it 3", "is it 7", "unused")
    HotOrCold.closed = 0

    [trajectory] = await workflow(HotOrCold, discount=0.5).arun_episode(engine, EXAMPLE)

    assert trajectory.reward == pytest.approx(0.1 + 0.5 * 1.0)
    assert trajectory.info["turns"] == 2
    assert prompts[1].startswith(prompts[0] + "is it 3<|eot_id|>")
    assert "no" in prompts[1].removeprefix(prompts[0])
    assert HotOrCold.closed == 1


async def test_environment_turn_credit_puts_rewards_on_last_tokens():
    engine, _ = scripted("is it 3", "is it 7")

    [trajectory] = await workflow(HotOrCold, credit="turn").arun_episode(engine, EXAMPLE)

    assert trajectory.reward == 0.0
    np.testing.assert_allclose(trajectory.token_rewards[trajectory.token_rewards != 0], [0.1, 1.0], rtol=1e-6)


async def test_environment_never_done_ends_at_turn_or_length_limit():
    engine, prompts = scripted(*["is it 3"] * 9)

    [trajectory] = await workflow(HotOrCold, turns=3).arun_episode(engine, EXAMPLE)
    assert (len(prompts), trajectory.reward) == (3, pytest.approx(0.3))

    [trajectory] = await workflow(HotOrCold, max_length=len(trajectory) - 10).arun_episode(engine, EXAMPLE)
    assert trajectory.info["turns"] == 2


class Fails(HotOrCold):
    """Environment that fails in the method, or in the way, that its argument names."""

    def __init__(self, failure):
        self.failure = failure

    async def reset(self, data):
        if self.failure == "reset":
            raise KeyError("injected")
        return await super().reset(data)

    async def step(self, completion):
        if self.failure == "hangs":
            await asyncio.Event().wait()
        if self.failure == "rl error":
            raise DataError("injected")
        return [], float("nan"), False


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("reset", "Fails.reset raised KeyError: 'injected'"),
        ("hangs", "Fails.step did not end within 0.2 s"),
        ("reward", "Fails.step returned reward nan"),
    ],
)
async def test_environment_failure_has_environment_boundary_and_closes(failure, message):
    engine, _ = scripted("is it 3")
    Fails.closed = 0

    with pytest.raises(TaskEnvironmentError, match=message) as caught:
        await workflow(lambda: Fails(failure), seconds=0.2).arun_episode(engine, EXAMPLE)

    assert caught.value.boundary == "environment"
    assert Fails.closed == 1


async def test_environment_rl_error_keeps_its_boundary():
    engine, _ = scripted("is it 3")

    with pytest.raises(DataError, match="injected"):
        await workflow(lambda: Fails("rl error")).arun_episode(engine, EXAMPLE)


class Lake(TextGame):
    """Game of gymnasium whose actions are words."""

    instructions = "Walk to G."

    def make(self, data):
        return gymnasium.make("FrozenLake-v1", is_slippery=False, render_mode="ansi", max_episode_steps=data["steps"])

    def action(self, completion):
        return ["left", "down", "right", "up"].index(completion.split()[-1])

    def format_observation(self, observation):
        return f"You are at {observation}."


async def test_text_game_gymnasium_runs_to_reward():
    moves = ["down", "go down", "right", "right", "down", "right"]
    engine, prompts = scripted(*moves)

    [trajectory] = await workflow(Lake).arun_episode(engine, {"steps": 20, "seed": 1, "prompt_id": 0})

    assert trajectory.reward == 1.0
    assert trajectory.info["turns"] == len(moves)
    assert "Walk to G.\n\nYou are at 0." in prompts[0]
    assert "You are at 4." in prompts[1]


async def test_text_game_truncation_ends_and_exception_raises():
    engine, prompts = scripted("left", "left", "fly")

    [trajectory] = await workflow(Lake).arun_episode(engine, {"steps": 2, "prompt_id": 0})
    assert (trajectory.reward, len(prompts)) == (0.0, 2)

    with pytest.raises(TaskEnvironmentError, match=r"Lake.step raised ValueError: 'fly' is not in list"):
        await workflow(Lake).arun_episode(engine, {"steps": 2, "prompt_id": 0})
