"""Workflows of several turns: what is asked, what is told, and what is learned from."""

import asyncio
import threading

import pytest

from rl_contracts.config import GenerationConfig
from rl_contracts.conformance.workflow import WorkflowConformance
from rl_contracts.errors import ConfigError, DataError, LaunchError
from rl_contracts.reward import CompositeReward
from rl_contracts.runtime.metrics import collect
from rl_contracts.sandbox import confine
from rl_contracts.sandbox.sandbox import Sandbox, SandboxLimits
from rl_contracts.testing import NullInferenceEngine, NullInferenceEngineConfig, make_tiny_tokenizer
from rl_contracts.testing.chat_formats import format_completion, make_chat_tokenizer
from rl_workflows.agents.tools import FunctionTool, PythonTool
from rl_workflows.workflows.multi_turn import MultiTurnWorkflow, ToolWorkflow

ROW = {"messages": [{"role": "user", "content": "what is 2 + 3?"}], "answer": "5", "prompt_id": 0}
GENERATION = GenerationConfig(max_new_tokens=64, temperature=0.7)


def right(prompt, completions, prompt_ids, completion_ids, *, answer):
    return float(answer in completions)


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def divide(a: int, b: int) -> float:
    """Divides two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a / b


async def slow() -> str:
    """Takes long."""
    import asyncio

    await asyncio.Event().wait()
    return "never"


def scripted(name, *answers):
    """An engine that gives these answers, one after the other, and remembers what it was asked."""
    tokenizer, left, asked = make_chat_tokenizer(name), list(answers), []

    def answer(request):
        asked.append(tokenizer.decode(request.input_ids))
        said = left.pop(0)
        return tokenizer.encode(
            said if isinstance(said, str) else format_completion(name, **said), add_special_tokens=False
        )

    engine = NullInferenceEngine(
        NullInferenceEngineConfig(seconds_per_token=0.0, vocab_size=len(tokenizer)), answer=answer
    )
    return engine, tokenizer, asked


class TestMultiTurnConformance(WorkflowConformance):
    def make_workflow(self):
        return MultiTurnWorkflow(make_tiny_tokenizer(), GENERATION, lambda *given, **data: 0.5, 400, turns=3)

    def rows(self):
        return [ROW, {**ROW, "prompt_id": 1}]


class TestToolConformance(WorkflowConformance):
    def make_workflow(self):
        return ToolWorkflow(make_chat_tokenizer("llama3"), GENERATION, lambda *given, **data: 0.5, 400, tools=[add])

    def rows(self):
        return [ROW, {**ROW, "prompt_id": 1}]


async def test_multi_turn_wrong_answer_gets_feedback_and_the_last_reward_counts():
    engine, tokenizer, asked = scripted("llama3", {"content": "it is 4"}, {"content": "it is 5"}, {"content": "no"})
    workflow = MultiTurnWorkflow(tokenizer, GENERATION, right, turns=3, feedback="what? no", discount=0.5)

    with collect() as figures:
        [row] = await workflow.arun_episode(engine, dict(ROW))

    assert row.reward == 0.5
    assert row.info["turns"] == 2
    assert "what? no" in asked[1]
    assert asked[1].startswith(asked[0] + "it is 4<|eot_id|>")
    assert row.info["completion"].startswith("it is 4<|eot_id|>")
    assert figures.results()["conversation/turns"] == 2


async def test_multi_turn_discount_scales_the_parts_of_the_reward():
    engine, tokenizer, _ = scripted("llama3", "it is 4", "it is 5")
    reward = lambda *given, **data: CompositeReward(right=right(*given, answer=data["answer"]), form=0.0)  # noqa: E731

    [row] = await MultiTurnWorkflow(tokenizer, GENERATION, reward, discount=0.5).arun_episode(engine, dict(ROW))

    assert (row.reward, row.reward_components) == (0.5, {"right": 0.5, "form": 0.0})


async def test_multi_turn_tools_of_the_row_are_in_every_prompt():
    engine, tokenizer, asked = scripted("llama3", "it is 6", "it is 5")
    workflow = MultiTurnWorkflow(tokenizer, GENERATION, lambda *given, **data: right(*given, answer=data["answer"]))
    schema = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}

    await workflow.arun_episode(engine, {**ROW, "tools": [schema]})

    assert ['"name": "add"' in prompt for prompt in asked] == [True, True]


async def test_tools_of_a_row_that_the_workflow_lacks_are_rejected():
    engine, tokenizer, _ = scripted("llama3", "it is 5")
    schema = {"type": "function", "function": {"name": "sub", "parameters": {"type": "object", "properties": {}}}}

    with pytest.raises(DataError, match="tools"):
        await ToolWorkflow(tokenizer, GENERATION, right, tools=[add]).arun_episode(engine, {**ROW, "tools": [schema]})


async def test_multi_turn_right_answer_ends_the_conversation():
    engine, tokenizer, asked = scripted("llama3", {"content": "it is 5"})

    [row] = await MultiTurnWorkflow(tokenizer, GENERATION, right, turns=3, discount=0.5).arun_episode(engine, ROW)

    assert (row.reward, len(asked)) == (1.0, 1)


async def test_multi_turn_conversation_without_room_ends_with_what_it_has():
    engine, tokenizer, asked = scripted("llama3", {"content": "it is 4"}, {"content": "it is 5"})
    workflow = MultiTurnWorkflow(tokenizer, GENERATION, right, max_length=100, turns=3, feedback="no " * 100)

    [row] = await workflow.arun_episode(engine, dict(ROW))

    assert (row.reward, len(asked)) == (0.0, 1)


@pytest.mark.slow
async def test_tools_are_called_and_the_model_is_told_what_they_return():
    calls = [{"name": "add", "arguments": {"a": 2, "b": 3}}, {"name": "divide", "arguments": {"a": 1, "b": 0}}]
    others = [
        {"name": "slow", "arguments": {}},
        {"name": "sub", "arguments": {}},
        {"name": "add", "arguments": {"c": 1}},
    ]
    engine, tokenizer, asked = scripted("gemma3", {"calls": calls}, {"calls": others}, {"content": "it is 5"})
    workflow = ToolWorkflow(tokenizer, GENERATION, right, tools=[add, divide, slow], tool_seconds=2)
    workflow.generation.max_new_tokens = 512

    [row] = await workflow.arun_episode(engine, dict(ROW))

    assert row.reward == 1.0
    assert row.info["turns"] == 3
    assert "<tool_response>5</tool_response>" in asked[1]
    assert "error: ZeroDivisionError: division by zero" in asked[1]
    assert "error: slow took longer than 2 s." in asked[2]
    assert "there is no tool 'sub'; the tools are add, divide, slow." in asked[2]
    assert "error: TypeError" in asked[2]
    assert '"description": "Adds two numbers."' in asked[0]


async def test_tools_are_found_by_name():
    calls = {"calls": [{"name": "calculator", "arguments": {"expression": "(2 + 3) * 4 / 2"}}]}
    engine, tokenizer, asked = scripted("llama3", calls, {"content": "it is 5"})

    await ToolWorkflow(tokenizer, GENERATION, right, tools=["calculator"]).arun_episode(engine, dict(ROW))

    assert '"name": "calculator"' in asked[0]
    assert '"10"<|eot_id|>' in asked[1]
    with pytest.raises(ConfigError, match=r"rl.tools: unknown name 'calculater'; did you mean 'calculator'"):
        ToolWorkflow(tokenizer, GENERATION, right, tools=["calculater"])


@pytest.mark.slow
async def test_tools_python_program_runs_in_the_sandbox():
    programs = ["print(2 + 3)", "open('/etc/passwd')", "import time; time.sleep(60)", "pass"]
    calls = {"calls": [{"name": "python", "arguments": {"code": code}} for code in programs]}
    engine, tokenizer, asked = scripted("gemma3", calls, {"content": "it is 5"})
    generation = GenerationConfig(max_new_tokens=512)
    python = PythonTool(Sandbox(SandboxLimits(seconds=5)))

    await ToolWorkflow(tokenizer, generation, right, tools=[python]).arun_episode(engine, dict(ROW))

    assert "<tool_response>5</tool_response>" in asked[1]
    assert "PermissionError: [Errno 13] Permission denied: '/etc/passwd'" in asked[1]
    assert "error: it did not end within 5 s." in asked[1]
    assert "(it printed nothing)" in asked[1]


def test_tools_python_where_nothing_confines_it_is_refused_at_start(monkeypatch):
    monkeypatch.setattr(confine, "missing_kernel_features", lambda: ["Landlock"])

    with pytest.raises(ConfigError, match="the sandbox cannot confine code here"):
        ToolWorkflow(make_chat_tokenizer("llama3"), GENERATION, right, tools=["python"])


async def test_tools_error_of_ours_fails_the_episode():
    def lost() -> str:
        """Is lost."""
        raise LaunchError("planted")

    engine, tokenizer, _ = scripted("llama3", {"calls": [{"name": "lost", "arguments": {}}]})

    with pytest.raises(LaunchError, match="planted"):
        await ToolWorkflow(tokenizer, GENERATION, right, tools=[lost]).arun_episode(engine, dict(ROW))


@pytest.mark.parametrize("handling", ["reject", "replace"])
async def test_tool_text_that_is_not_utf8_is_rejected_or_replaced(handling):
    def smile() -> str:
        """Smiles."""
        return "half an emoji: \ud83d"

    engine, tokenizer, asked = scripted("llama3", {"calls": [{"name": "smile", "arguments": {}}]}, "it is 5")
    workflow = ToolWorkflow(tokenizer, GENERATION, right, tools=[smile])
    workflow.invalid_text = handling

    if handling == "reject":
        with pytest.raises(DataError, match="UTF-8"):
            await workflow.arun_episode(engine, dict(ROW))
    else:
        await workflow.arun_episode(engine, dict(ROW))
        assert "half an emoji: \ufffd" in asked[1]


def test_tools_of_one_name_are_refused():
    with pytest.raises(ConfigError, match=r"workflow.tools.*'add'"):
        ToolWorkflow(make_chat_tokenizer("llama3"), GENERATION, right, tools=[add, add])


async def test_tools_model_that_never_answers_ends_after_its_turns():
    calls = {"calls": [{"name": "add", "arguments": {"a": 2, "b": 3}}]}
    engine, tokenizer, asked = scripted("mistral", *[calls] * 3)

    [row] = await ToolWorkflow(tokenizer, GENERATION, right, tools=[add], turns=3).arun_episode(engine, dict(ROW))

    assert len(asked) == 3
    assert row.reward == 0.0


def test_tools_that_the_model_cannot_be_shown_or_call_are_refused():
    def untyped(a):
        """Says nothing of a."""

    with pytest.raises(ConfigError, match=r"workflow.tools: expected at least one tool"):
        ToolWorkflow(make_chat_tokenizer("llama3"), GENERATION, right)
    with pytest.raises(ConfigError, match="untyped"):
        ToolWorkflow(make_chat_tokenizer("llama3"), GENERATION, right, tools=[untyped])
    with pytest.raises(ConfigError, match=r"workflow.tools: the chat template"):
        ToolWorkflow(make_tiny_tokenizer(), GENERATION, right, tools=[add])
    with pytest.raises(ConfigError, match=r"workflow.discount"):
        MultiTurnWorkflow(make_tiny_tokenizer(), GENERATION, right, discount=0)


async def test_multi_turn_row_without_messages_is_refused():
    engine, tokenizer, _ = scripted("llama3")

    with pytest.raises(DataError, match="messages"):
        await MultiTurnWorkflow(tokenizer, GENERATION, right).arun_episode(engine, {"answer": "5"})


async def test_tools_that_hang_keep_no_other_from_its_answer() -> None:
    ends = threading.Event()

    def hangs() -> None:
        """Waits."""
        ends.wait(60)

    hung = [asyncio.create_task(FunctionTool(hangs).call()) for _ in range(64)]
    try:
        await asyncio.sleep(0)
        assert await asyncio.wait_for(FunctionTool(add).call(a=1, b=2), 30) == 3
    finally:
        ends.set()
        await asyncio.gather(*hung)
