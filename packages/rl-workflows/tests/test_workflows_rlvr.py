"""The RLVR workflow: prompt, answer, score."""

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
from rl_workflows import RLVRWorkflow, Ticket
from rl_workflows.rollout.episode import Episodes
from rl_workflows.rollout.groups import run_group

ROW = {"messages": [{"role": "user", "content": "2 + 3?"}], "answer": "5", "prompt_id": 0}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


@pytest.fixture
def answering(tokenizer):
    """An engine that always writes the same."""
    ids = tokenizer.encode("it is 5<|im_end|>", add_special_tokens=False)
    return NullInferenceEngine(NullInferenceEngineConfig(seconds_per_token=0.0), answer=lambda request: ids)


def _workflow(tokenizer, reward, **options):
    return RLVRWorkflow(tokenizer, GenerationConfig(max_new_tokens=64, temperature=0.7), reward, **options)


class TestConformance(WorkflowConformance):
    def make_workflow(self):
        return _workflow(make_tiny_tokenizer(), lambda *given, **data: float(len(given[1])), max_length=256)

    def rows(self):
        other = {"messages": [{"role": "system", "content": "Be brief."}, *ROW["messages"]], "answer": "5"}
        return [ROW, {**other, "prompt_id": 1}]


async def test_episode_reward_sees_texts_ids_and_the_rows_other_entries(tokenizer, answering):
    seen = {}

    def reward(prompt, completions, prompt_ids, completion_ids, **data):
        seen.update(data, prompt=prompt, completions=completions, prompt_ids=prompt_ids, completion_ids=completion_ids)
        return 0.5

    [row] = await _workflow(tokenizer, reward).arun_episode(answering, {**ROW, "epoch": 3, "level": "easy"})

    assert seen["completions"] == "it is 5"
    assert seen["prompt"] == "<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n"
    assert seen["prompt_ids"] + seen["completion_ids"] == row.input_ids.tolist()
    assert (seen["answer"], seen["level"]) == ("5", "easy")
    assert not {"messages", "prompt_id", "epoch"} & seen.keys()
    assert (row.reward, row.temperature, row.truncated) == (0.5, pytest.approx(0.7), False)
    assert row.info == {"prompt": seen["prompt"], "completion": "it is 5", "answer": "5"}


async def test_episode_row_keeps_the_parts_of_its_reward(tokenizer, answering):
    workflow = _workflow(tokenizer, lambda *given, **data: CompositeReward(right=1.0, form=0.5))

    [row] = await workflow.arun_episode(answering, ROW)

    assert (row.reward, row.reward_components) == (1.5, {"right": 1.0, "form": 0.5})


async def test_episode_tools_of_the_row_are_in_the_prompt_and_the_reward(answering):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
    seen = {}

    def reward(prompt, completions, prompt_ids, completion_ids, **data):
        seen.update(data, prompt=prompt)
        return 0.5

    await _workflow(make_chat_tokenizer("llama3"), reward).arun_episode(answering, {**ROW, "tools": tools})

    assert '"name": "weather"' in seen["prompt"]
    assert seen["tools"] == tools


async def test_episode_prompt_that_the_template_drops_parts_of_names_its_row(answering):
    hidden = [*ROW["messages"], {"role": "developer", "content": "Be brief."}]

    with pytest.raises(DataError, match=r"example 0: .*Be brief"):
        await _workflow(make_chat_tokenizer("gemma3"), lambda *given: 1.0).arun_episode(
            answering, {**ROW, "prompt_id": 0, "messages": hidden}
        )


async def test_episode_async_reward_is_awaited(tokenizer, answering):
    async def reward(*given, **data):
        await asyncio.sleep(0)
        record("words", len(given[1].split()))
        return 1

    with collect() as figures:
        [row] = await _workflow(tokenizer, reward).arun_episode(answering, ROW)

    assert row.reward == 1.0
    assert figures.results() == {"words": 3.0}


@pytest.mark.parametrize(
    "value", [None, "1.0", float("nan"), float("inf"), [1.0], 1e300, CompositeReward(a=1e300, b=-1e300)]
)
async def test_episode_reward_that_is_no_finite_number_is_an_error_and_never_zero(tokenizer, answering, value):
    with pytest.raises(RewardError, match="expected a finite number"):
        await _workflow(tokenizer, lambda *given, **data: value).arun_episode(answering, ROW)


async def test_episode_reward_that_raises_is_a_reward_error_with_its_cause(tokenizer, answering):
    def broken(*given, **data):
        raise KeyError("gold")

    with pytest.raises(RewardError, match="KeyError: 'gold'") as caught:
        await _workflow(tokenizer, broken).arun_episode(answering, ROW)
    assert isinstance(caught.value.__cause__, KeyError)


async def test_episode_row_without_messages_is_a_data_error_that_names_its_keys(tokenizer, answering):
    with pytest.raises(DataError, match=r"`messages`.*\['question'\]"):
        await _workflow(tokenizer, float).arun_episode(answering, {"question": "2 + 3?"})


def test_workflow_adds_the_templates_stop_ids(tokenizer):
    generation = GenerationConfig(stop_token_ids=[9])
    workflow = RLVRWorkflow(tokenizer, generation, float)
    assert workflow.generation.stop_token_ids == [9, tokenizer.eos_token_id]
    assert generation.stop_token_ids == [9], "the caller's own is left as it was"


def test_workflow_reward_that_cannot_be_called_is_refused(tokenizer):
    with pytest.raises(ConfigError, match="expected a function, found str"):
        RLVRWorkflow(tokenizer, GenerationConfig(), "gsm8k")


async def test_group_renders_its_prompt_once(tokenizer, answering, monkeypatch):
    workflow = _workflow(tokenizer, lambda *given, **data: 1.0)
    calls = []
    render = workflow._renderer.render
    monkeypatch.setattr(workflow._renderer, "render", lambda *given: calls.append(1) or render(*given))

    group = await run_group(Episodes(workflow, answering, SystemClock(), seed=0), ROW, Ticket(0, 0), size=3, needed=3)

    assert [trajectory.episode_id for trajectory in group.trajectories] == [0, 1, 2]
    assert len(calls) == 1


async def _group(tokenizer, max_length, evaluation=None, prompt="x"):
    """What one episode asked for, and what became of it."""
    asked = []

    def answer(request):
        asked.append(request.generation)
        return [5] * request.generation.max_new_tokens

    engine = NullInferenceEngine(NullInferenceEngineConfig(seconds_per_token=0.0), answer=answer)
    workflow = _workflow(tokenizer, lambda *given, **data: 1.0, max_length=max_length)
    episodes = Episodes(workflow, engine, SystemClock(), seed=0, generation=evaluation)
    row = {"messages": [{"role": "user", "content": prompt}], "prompt_id": 0}
    return asked, await run_group(episodes, row, Ticket(0, 0), 1, needed=1)


@pytest.mark.parametrize("evaluation", [None, GenerationConfig(max_new_tokens=80, min_new_tokens=70)])
async def test_max_length_bounds_prompt_and_answer_together(tokenizer, evaluation):
    asked, group = await _group(tokenizer, 40, evaluation)

    (row,) = group.trajectories
    assert len(row.input_ids) == 40
    assert asked[0].max_new_tokens == row.loss_mask.sum() == 40 - 20  # 20 are the prompt's


async def test_max_length_leaves_answers_alone_that_fit(tokenizer):
    asked, _ = await _group(tokenizer, 84)
    assert asked[0].max_new_tokens == 64


async def test_prompt_that_leaves_no_room_for_an_answer_is_a_data_error_with_both_numbers(tokenizer):
    asked, group = await _group(tokenizer, 48, prompt="x" * 29)
    assert asked == []
    assert isinstance(group.error, DataError)
    assert "48 tokens, but a sequence may have 48" in str(group.error)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("so 7</think>it is 5<|im_end|>", "it is 5"), ("so 7", ""), ("it is 5<|im_end|>", "")],
)
async def test_episode_reward_reads_what_follows_reasoning_of_the_prompt(tokenizer, text, expected):
    ids = tokenizer.encode(text, add_special_tokens=False)
    engine = NullInferenceEngine(NullInferenceEngineConfig(seconds_per_token=0.0), answer=lambda request: ids)
    thinking = make_tiny_tokenizer()
    thinking.chat_template = thinking.chat_template.replace("assistant\n", "assistant\n<think>\n")
    seen = []

    def reward(*given, final_text, **data):
        seen.append(final_text)
        return 1.0

    await _workflow(thinking, reward).arun_episode(engine, ROW)

    assert seen == [expected]


async def test_episode_reward_without_room_for_the_final_text_is_called(tokenizer, answering):
    def reward(prompt, completions, prompt_ids, completion_ids, answer):
        return 1.0

    [row] = await _workflow(tokenizer, reward).arun_episode(answering, ROW)

    assert row.reward == 1.0
