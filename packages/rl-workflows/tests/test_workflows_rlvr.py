"""RLVR workflow: prompt, completion and reward."""

import asyncio

import pytest

from rl_contracts.config import GenerationConfig
from rl_contracts.conformance.workflow import WorkflowConformance
from rl_contracts.errors import ConfigError, DataError, RewardError
from rl_contracts.reward import CompositeReward
from rl_contracts.runtime.clock import SystemClock
from rl_contracts.runtime.metrics import collect, record
from rl_contracts.testing import NullInferenceEngine, NullInferenceEngineConfig
from rl_contracts.testing.chat_formats import make_chat_tokenizer
from rl_contracts.testing.models import make_tiny_tokenizer
from rl_workflows import RLVRWorkflow, Ticket, VisionRLVRWorkflow
from rl_workflows.rollout.episode import Episodes
from rl_workflows.rollout.groups import run_group

EXAMPLE = {"messages": [{"role": "user", "content": "2 + 3?"}], "answer": "5", "prompt_id": 0}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


@pytest.fixture
def engine(tokenizer):
    """Return an engine that always generates the same completion."""
    ids = tokenizer.encode("it is 5<|im_end|>", add_special_tokens=False)
    return NullInferenceEngine(NullInferenceEngineConfig(seconds_per_token=0.0), answer=lambda request: ids)


def _workflow(tokenizer, reward, **options):
    return RLVRWorkflow(tokenizer, GenerationConfig(max_new_tokens=64, temperature=0.7), reward, **options)


class TestConformance(WorkflowConformance):
    def make_workflow(self):
        return _workflow(make_tiny_tokenizer(), lambda *args, **data: float(len(args[1])), max_length=256)

    def rows(self):
        with_system = {"messages": [{"role": "system", "content": "Be brief."}, *EXAMPLE["messages"]], "answer": "5"}
        return [EXAMPLE, {**with_system, "prompt_id": 1}]


async def test_episode_reward_gets_texts_ids_and_other_fields(tokenizer, engine):
    received = {}

    def reward(prompt, completions, prompt_ids, completion_ids, **data):
        received.update(
            data, prompt=prompt, completions=completions, prompt_ids=prompt_ids, completion_ids=completion_ids
        )
        return 0.5

    [trajectory] = await _workflow(tokenizer, reward).arun_episode(engine, {**EXAMPLE, "epoch": 3, "level": "easy"})

    assert received["completions"] == "it is 5"
    assert received["prompt"] == "<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n"
    assert received["prompt_ids"] + received["completion_ids"] == trajectory.input_ids.tolist()
    assert (received["answer"], received["level"]) == ("5", "easy")
    assert not {"messages", "prompt_id", "epoch"} & received.keys()
    assert (trajectory.reward, trajectory.temperature, trajectory.truncated) == (0.5, pytest.approx(0.7), False)
    assert trajectory.info == {"prompt": received["prompt"], "completion": "it is 5", "answer": "5"}


async def test_episode_trajectory_keeps_reward_components(tokenizer, engine):
    workflow = _workflow(tokenizer, lambda *args, **data: CompositeReward(right=1.0, form=0.5))

    [trajectory] = await workflow.arun_episode(engine, EXAMPLE)

    assert (trajectory.reward, trajectory.reward_components) == (1.5, {"right": 1.0, "form": 0.5})


async def test_episode_tools_of_example_reach_prompt_and_reward(engine):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
    received = {}

    def reward(prompt, completions, prompt_ids, completion_ids, **data):
        received.update(data, prompt=prompt)
        return 0.5

    await _workflow(make_chat_tokenizer("llama3"), reward).arun_episode(engine, {**EXAMPLE, "tools": tools})

    assert '"name": "weather"' in received["prompt"]
    assert received["tools"] == tools


async def test_episode_incompletely_rendered_prompt_raises_with_its_id(engine):
    messages = [*EXAMPLE["messages"], {"role": "developer", "content": "Be brief."}]

    with pytest.raises(DataError, match=r"example 0: .*Be brief"):
        await _workflow(make_chat_tokenizer("gemma3"), lambda *args: 1.0).arun_episode(
            engine, {**EXAMPLE, "prompt_id": 0, "messages": messages}
        )


async def test_episode_async_reward_is_awaited(tokenizer, engine):
    async def reward(*args, **data):
        await asyncio.sleep(0)
        record("words", len(args[1].split()))
        return 1

    with collect() as metrics:
        [trajectory] = await _workflow(tokenizer, reward).arun_episode(engine, EXAMPLE)

    assert trajectory.reward == 1.0
    assert metrics.results() == {"words": 3.0}


@pytest.mark.parametrize("value", [None, float("nan"), CompositeReward(a=1e300, b=-1e300)])
async def test_episode_reward_that_is_not_finite_number_raises(tokenizer, engine, value):
    with pytest.raises(RewardError, match="expected a finite number"):
        await _workflow(tokenizer, lambda *args, **data: value).arun_episode(engine, EXAMPLE)


async def test_episode_reward_exception_is_cause_of_reward_error(tokenizer, engine):
    def broken(*args, **data):
        raise KeyError("gold")

    with pytest.raises(RewardError, match="KeyError: 'gold'") as caught:
        await _workflow(tokenizer, broken).arun_episode(engine, EXAMPLE)
    assert isinstance(caught.value.__cause__, KeyError)


async def test_episode_example_without_messages_raises_with_its_keys(tokenizer, engine):
    with pytest.raises(DataError, match=r"`messages`.*\['question'\]"):
        await _workflow(tokenizer, float).arun_episode(engine, {"question": "2 + 3?"})


def test_workflow_adds_stop_ids_of_template(tokenizer):
    generation = GenerationConfig(stop_token_ids=[9])
    workflow = RLVRWorkflow(tokenizer, generation, float)
    assert workflow.generation.stop_token_ids == [9, tokenizer.eos_token_id]
    assert generation.stop_token_ids == [9], "the generation settings of the caller must not change"


def test_workflow_reward_that_is_not_callable_raises(tokenizer):
    with pytest.raises(ConfigError, match="expected a function, found str"):
        RLVRWorkflow(tokenizer, GenerationConfig(), "gsm8k")


async def test_group_renders_prompt_once(tokenizer, engine, monkeypatch):
    workflow = _workflow(tokenizer, lambda *args, **data: 1.0)
    renders = []
    render = workflow._renderer.render
    monkeypatch.setattr(workflow._renderer, "render", lambda *args: renders.append(1) or render(*args))

    group = await run_group(Episodes(workflow, engine, SystemClock(), seed=0), EXAMPLE, Ticket(0, 0), size=3, needed=3)

    assert [trajectory.episode_id for trajectory in group.trajectories] == [0, 1, 2]
    assert len(renders) == 1


async def _group(tokenizer, max_length, evaluation=None, prompt="x"):
    """Run a group of one episode; return its generation settings and the group."""
    settings = []

    def complete(request):
        settings.append(request.generation)
        return [5] * request.generation.max_new_tokens

    engine = NullInferenceEngine(NullInferenceEngineConfig(seconds_per_token=0.0), answer=complete)
    workflow = _workflow(tokenizer, lambda *args, **data: 1.0, max_length=max_length)
    episodes = Episodes(workflow, engine, SystemClock(), seed=0, generation=evaluation)
    example = {"messages": [{"role": "user", "content": prompt}], "prompt_id": 0}
    return settings, await run_group(episodes, example, Ticket(0, 0), 1, needed=1)


@pytest.mark.parametrize(
    ("max_length", "evaluation", "expected"),
    [(40, None, 20), (40, GenerationConfig(max_new_tokens=80, min_new_tokens=70), 20), (84, None, 64)],
)
async def test_max_length_bounds_prompt_and_completion_together(tokenizer, max_length, evaluation, expected):
    settings, group = await _group(tokenizer, max_length, evaluation)

    (trajectory,) = group.trajectories
    assert len(trajectory.input_ids) == 20 + expected  # the prompt has 20 tokens
    assert settings[0].max_new_tokens == trajectory.loss_mask.sum() == expected


async def test_max_length_without_room_for_completion_raises_data_error(tokenizer):
    settings, group = await _group(tokenizer, 48, prompt="x" * 29)
    assert settings == []
    assert isinstance(group.error, DataError)
    assert "48 tokens, but prompt and completion together may have at most 48" in str(group.error)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("so 7</think>it is 5<|im_end|>", "it is 5"), ("so 7", "")],
)
async def test_episode_final_text_follows_reasoning_opened_in_prompt(tokenizer, text, expected):
    ids = tokenizer.encode(text, add_special_tokens=False)
    engine = NullInferenceEngine(NullInferenceEngineConfig(seconds_per_token=0.0), answer=lambda request: ids)
    thinking = make_tiny_tokenizer()
    thinking.chat_template = thinking.chat_template.replace("assistant\n", "assistant\n<think>\n")
    received = []

    def reward(*args, final_text, **data):
        received.append(final_text)
        return 1.0

    await _workflow(thinking, reward).arun_episode(engine, EXAMPLE)

    assert received == [expected]


def test_vision_rlvr_workflow_is_the_rlvr_workflow() -> None:
    assert VisionRLVRWorkflow is RLVRWorkflow
