"""Adapters, called with the arguments that TRL 1.16, verifiers 0.4 and verifiers 0.3 pass."""

import asyncio
import inspect
from types import SimpleNamespace

import pytest

from rl_contracts.conformance import reward
from rl_contracts.errors import RewardError
from rl_contracts.reward import components_of
from rl_rewards import WeightedReward, gsm8k_reward_fn
from rl_rewards.adapters import for_trl, for_verifiers, from_trl, from_verifiers


async def contains_fn(prompt, completions, prompt_ids, completion_ids, answer=None, **_):
    return float(str(answer) in completions)


def recorded_fn(prompt, completions, prompt_ids, completion_ids, **data):
    recorded_fn.calls.append((prompt, completions, completion_ids, data))
    return 0.5


def user(text):
    return [{"role": "user", "content": text}]


def assistant(text):
    return [{"role": "assistant", "content": text}]


TRAINER = {"trainer_state": SimpleNamespace(global_step=3), "log_extra": print, "log_metric": print}
"""Arguments of TRL's trainers that are no columns."""


@pytest.mark.parametrize("kind", [str, list])
def test_for_trl_scores_each_completion_with_its_columns(kind):
    prompts, completions = ["2 + 3", "2 + 4"], ["#### 5", "#### 5"]
    if kind is list:
        prompts, completions = list(map(user, prompts)), list(map(assistant, completions))

    rewards = for_trl(gsm8k_reward_fn)(
        prompts=prompts, completions=completions, completion_ids=[[7], [7]], answer=["5", "6"], **TRAINER
    )

    assert rewards == [1.0, 0.0]


def test_for_trl_passes_texts_ids_and_columns_only():
    recorded_fn.calls = []
    question = [{"type": "image"}, {"type": "text", "text": "count"}]
    conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
    turns = [*assistant("calling"), {"role": "tool", "content": "4"}, *assistant("it is 4")]

    function = for_trl(recorded_fn)

    assert function(prompts=[conversation], completions=[turns], completion_ids=[[7, 8]], answer=["4"], **TRAINER) == [
        0.5
    ]
    assert recorded_fn.calls == [("Be brief.\n\ncount", "it is 4", [7, 8], {"answer": "4"})]
    assert function.__name__ == "recorded_fn"


async def test_for_trl_of_an_async_reward_is_an_async_function():
    function = for_trl(contains_fn)

    assert inspect.iscoroutinefunction(function)
    assert await function(prompts=["a", "b"], completions=["5", "6"], answer=["5", "5"], **TRAINER) == [1.0, 0.0]


def test_for_trl_of_an_example_without_gold_answer_raises():
    with pytest.raises(RewardError):
        for_trl(gsm8k_reward_fn)(prompts=["a"], completions=["5"], completion_ids=[[1]], **TRAINER)


def trl_equals_answer(completions, answer, **kwargs):
    """Reward as in the documentation of TRL, for plain texts."""
    if not answer[0]:
        raise RewardError("no answer")
    return [float(completion == gold) for completion, gold in zip(completions, answer, strict=True)]


async def trl_prompt_length(prompts, completions, completion_ids, **kwargs):
    return [float(len(prompts[0][0]["content"]) + len(completion_ids[0])) for _ in completions]


equals_answer_fn = from_trl(trl_equals_answer, conversational=False)


class TestFromTRL(reward.RewardConformance):
    target = f"{__name__}:equals_answer_fn"
    right = [("5", {"answer": "5"})]  # noqa: RUF012
    wrong = [("6", {"answer": "5"})]  # noqa: RUF012


async def test_from_trl_of_an_async_function_returns_an_awaitable():
    assert await from_trl(trl_prompt_length)("four", "5", [1], [2, 3]) == 6.0


def test_from_trl_without_a_reward_for_the_example_raises():
    with pytest.raises(RewardError):
        from_trl(lambda completions, **_: [None])("", "5", [], [])


class Data:
    """Task data of verifiers 0.4: iterates over its fields, as a pydantic model does."""

    prompt_text = "2 + 3"

    def __init__(self, **fields):
        self.fields = {"idx": 0, "prompt": "2 + 3", "system_prompt": None, **fields}

    def __iter__(self):
        return iter(self.fields.items())


async def test_for_verifiers_reads_trace_as_method_and_as_function():
    data = Data(answer="5")
    trace = SimpleNamespace(task=SimpleNamespace(data=data), last_reply="#### 5")

    class Task:
        right = for_verifiers(gsm8k_reward_fn)

    assert await Task().right(trace=trace) == 1.0
    assert await for_verifiers(gsm8k_reward_fn)(task=data, trace=trace) == 1.0
    assert Task.right.__name__ == "gsm8k_reward_fn"


@pytest.mark.parametrize("function", [gsm8k_reward_fn, contains_fn])
async def test_for_verifiers_reads_the_arguments_of_a_rubric(function):
    state = {"prompt": user("2 + 3"), "completion": assistant("#### 5"), "answer": "5"}
    row = {**state, "info": {}, "parser": object(), "task": None, "state": state}

    assert await for_verifiers(function)(**row) == 1.0
    assert await for_verifiers(function)(**row | {"completion": assistant("#### 6")}) == 0.0


class Sums:
    """Task of verifiers 0.4."""

    async def right(self, trace):
        return float(trace.last_reply == str(self.data.answer))


async def plugged(task, trace):
    return {"right": float(trace.last_reply == task.answer), "brief": float(len(trace.messages) == 2)}


def rubric_function(completion, answer, **kwargs):
    return float(completion[-1]["content"] == answer) + float(kwargs["state"]["level"])


@pytest.mark.parametrize(("function", "expected"), [(Sums.right, 1.0), (plugged, 2.0), (rubric_function, 4.0)])
async def test_from_verifiers_passes_the_arguments_that_a_reward_names(function, expected):
    value = from_verifiers(function)("2 + 3", "<think>2 + 3</think>5", [], [], answer="5", level=3, final_text="5")

    assert (await value if inspect.isawaitable(value) else value) == expected


def test_from_verifiers_of_keyed_scores_is_a_composite_reward():
    value = asyncio.run(from_verifiers(plugged)("2 + 3", "6", [], [], answer="5"))

    assert components_of(value) == {"right": 0.0, "brief": 1.0}


def test_adapted_reward_is_a_component_of_a_weighted_reward():
    both = WeightedReward([(gsm8k_reward_fn, 1.0), (from_verifiers(rubric_function), 0.5)])

    assert components_of(both("", "5", [], [], answer="5", level=1)) == {"gsm8k_reward_fn": 1.0, "rubric_function": 1.0}
