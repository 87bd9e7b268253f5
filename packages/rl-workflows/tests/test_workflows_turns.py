"""Workflows with several turns: prompts, feedback, tool calls and rewards."""

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
from rl_contracts.testing.image_files import unusual_image_files
from rl_workflows.agents.tools import FunctionTool, PythonTool
from rl_workflows.workflows.multi_turn import MultiTurnWorkflow, ToolWorkflow

EXAMPLE = {"messages": [{"role": "user", "content": "what is 2 + 3?"}], "answer": "5", "prompt_id": 0}
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


def scripted(name, *completions):
    """Return an engine with these completions, in order, its tokenizer, and the list of prompts that it receives."""
    tokenizer, remaining, prompts = make_chat_tokenizer(name), list(completions), []

    def complete(request):
        prompts.append(tokenizer.decode(request.input_ids))
        completion = remaining.pop(0)
        return tokenizer.encode(
            completion if isinstance(completion, str) else format_completion(name, **completion),
            add_special_tokens=False,
        )

    engine = NullInferenceEngine(
        NullInferenceEngineConfig(seconds_per_token=0.0, vocab_size=len(tokenizer)), answer=complete
    )
    return engine, tokenizer, prompts


class TestMultiTurnConformance(WorkflowConformance):
    def make_workflow(self):
        return MultiTurnWorkflow(make_tiny_tokenizer(), GENERATION, lambda *args, **data: 0.5, 400, turns=3)

    def rows(self):
        return [EXAMPLE, {**EXAMPLE, "prompt_id": 1}]


class TestToolConformance(WorkflowConformance):
    def make_workflow(self):
        return ToolWorkflow(make_chat_tokenizer("llama3"), GENERATION, lambda *args, **data: 0.5, 400, tools=[add])

    def rows(self):
        return [EXAMPLE, {**EXAMPLE, "prompt_id": 1}]


async def test_multi_turn_wrong_answer_gets_feedback_and_last_reward_counts():
    engine, tokenizer, prompts = scripted("llama3", {"content": "it is 4"}, {"content": "it is 5"}, {"content": "no"})
    workflow = MultiTurnWorkflow(tokenizer, GENERATION, right, turns=3, feedback="what? no", discount=0.5)

    with collect() as metrics:
        [trajectory] = await workflow.arun_episode(engine, dict(EXAMPLE))

    assert trajectory.reward == 0.5
    assert trajectory.info["turns"] == 2
    assert "what? no" in prompts[1]
    assert prompts[1].startswith(prompts[0] + "it is 4<|eot_id|>")
    assert trajectory.info["completion"].startswith("it is 4<|eot_id|>")
    assert metrics.results()["conversation/turns"] == 2


async def test_multi_turn_discount_scales_reward_components():
    engine, tokenizer, _ = scripted("llama3", "it is 4", "it is 5")
    reward = lambda *args, **data: CompositeReward(right=right(*args, answer=data["answer"]), form=0.0)  # noqa: E731

    [trajectory] = await MultiTurnWorkflow(tokenizer, GENERATION, reward, discount=0.5).arun_episode(
        engine, dict(EXAMPLE)
    )

    assert (trajectory.reward, trajectory.reward_components) == (0.5, {"right": 0.5, "form": 0.0})


async def test_multi_turn_tools_of_example_are_in_every_prompt():
    engine, tokenizer, prompts = scripted("llama3", "it is 6", "it is 5")
    workflow = MultiTurnWorkflow(tokenizer, GENERATION, lambda *args, **data: right(*args, answer=data["answer"]))
    schema = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}

    await workflow.arun_episode(engine, {**EXAMPLE, "tools": [schema]})

    assert ['"name": "add"' in prompt for prompt in prompts] == [True, True]


async def test_tools_of_example_unknown_to_workflow_raise():
    engine, tokenizer, _ = scripted("llama3", "it is 5")
    schema = {"type": "function", "function": {"name": "sub", "parameters": {"type": "object", "properties": {}}}}

    with pytest.raises(DataError, match="tools"):
        await ToolWorkflow(tokenizer, GENERATION, right, tools=[add]).arun_episode(
            engine, {**EXAMPLE, "tools": [schema]}
        )


async def test_multi_turn_without_room_for_completion_ends():
    engine, tokenizer, prompts = scripted("llama3", {"content": "it is 4"}, {"content": "it is 5"})
    workflow = MultiTurnWorkflow(tokenizer, GENERATION, right, max_length=100, turns=3, feedback="no " * 100)

    [trajectory] = await workflow.arun_episode(engine, dict(EXAMPLE))

    assert (trajectory.reward, len(prompts)) == (0.0, 1)


@pytest.mark.slow
async def test_tools_are_called_and_results_are_in_next_prompt():
    calls = [{"name": "add", "arguments": {"a": 2, "b": 3}}, {"name": "divide", "arguments": {"a": 1, "b": 0}}]
    failing_calls = [
        {"name": "slow", "arguments": {}},
        {"name": "sub", "arguments": {}},
        {"name": "add", "arguments": {"c": 1}},
    ]
    engine, tokenizer, prompts = scripted("gemma3", {"calls": calls}, {"calls": failing_calls}, {"content": "it is 5"})
    workflow = ToolWorkflow(tokenizer, GENERATION, right, tools=[add, divide, slow], tool_seconds=2)
    workflow.generation.max_new_tokens = 512

    [trajectory] = await workflow.arun_episode(engine, dict(EXAMPLE))

    assert trajectory.reward == 1.0
    assert trajectory.info["turns"] == 3
    assert "<tool_response>5</tool_response>" in prompts[1]
    assert "error: ZeroDivisionError: division by zero" in prompts[1]
    assert "error: slow took longer than 2 s." in prompts[2]
    assert "there is no tool 'sub'; the tools are add, divide, slow." in prompts[2]
    assert "error: TypeError" in prompts[2]
    assert '"description": "Adds two numbers."' in prompts[0]


async def test_tools_by_name_are_loaded():
    calls = {"calls": [{"name": "calculator", "arguments": {"expression": "(2 + 3) * 4 / 2"}}]}
    engine, tokenizer, prompts = scripted("llama3", calls, {"content": "it is 5"})

    await ToolWorkflow(tokenizer, GENERATION, right, tools=["calculator"]).arun_episode(engine, dict(EXAMPLE))

    assert '"name": "calculator"' in prompts[0]
    assert '"10"<|eot_id|>' in prompts[1]
    with pytest.raises(ConfigError, match=r"rl.tools: unknown name 'calculater'; did you mean 'calculator'"):
        ToolWorkflow(tokenizer, GENERATION, right, tools=["calculater"])


@pytest.mark.slow
async def test_tools_python_program_runs_in_sandbox():
    programs = ["print(2 + 3)", "open('/etc/passwd')", "import time; time.sleep(60)", "pass"]
    calls = {"calls": [{"name": "python", "arguments": {"code": code}} for code in programs]}
    engine, tokenizer, prompts = scripted("gemma3", calls, {"content": "it is 5"})
    generation = GenerationConfig(max_new_tokens=512)
    python_tool = PythonTool(Sandbox(SandboxLimits(seconds=5)))

    await ToolWorkflow(tokenizer, generation, right, tools=[python_tool]).arun_episode(engine, dict(EXAMPLE))

    assert "<tool_response>5</tool_response>" in prompts[1]
    assert "PermissionError: [Errno 13] Permission denied: '/etc/passwd'" in prompts[1]
    assert "error: it did not end within 5 s." in prompts[1]
    assert "(it printed nothing)" in prompts[1]


def test_tools_python_without_kernel_support_raises(monkeypatch):
    monkeypatch.setattr(confine, "missing_kernel_features", lambda: ["Landlock"])

    with pytest.raises(ConfigError, match="the sandbox cannot confine code here"):
        ToolWorkflow(make_chat_tokenizer("llama3"), GENERATION, right, tools=["python"])


async def test_tools_rl_error_fails_episode():
    def lost() -> str:
        """Fail with an error of the project."""
        raise LaunchError("injected")

    engine, tokenizer, _ = scripted("llama3", {"calls": [{"name": "lost", "arguments": {}}]})

    with pytest.raises(LaunchError, match="injected"):
        await ToolWorkflow(tokenizer, GENERATION, right, tools=[lost]).arun_episode(engine, dict(EXAMPLE))


@pytest.mark.parametrize("handling", ["reject", "replace"])
async def test_tools_invalid_utf8_is_rejected_or_replaced(handling):
    def smile() -> str:
        """Return text that is not valid UTF-8."""
        return "half an emoji: \ud83d"

    engine, tokenizer, prompts = scripted("llama3", {"calls": [{"name": "smile", "arguments": {}}]}, "it is 5")
    workflow = ToolWorkflow(tokenizer, GENERATION, right, tools=[smile])
    workflow.invalid_text = handling

    if handling == "reject":
        with pytest.raises(DataError, match="UTF-8"):
            await workflow.arun_episode(engine, dict(EXAMPLE))
    else:
        await workflow.arun_episode(engine, dict(EXAMPLE))
        assert "half an emoji: \ufffd" in prompts[1]


async def test_tools_image_for_model_of_text_becomes_a_mark():
    def look() -> list:
        """Return a picture."""
        return [{"type": "text", "text": "screen: "}, {"type": "image", "image": unusual_image_files()["plain"]}]

    engine, tokenizer, prompts = scripted("llama3", {"calls": [{"name": "look", "arguments": {}}]}, "it is 5")

    await ToolWorkflow(tokenizer, GENERATION, right, tools=[look]).arun_episode(engine, dict(EXAMPLE))

    assert "screen: [image]" in prompts[1]


async def test_tools_only_calls_end_after_maximum_turns():
    calls = {"calls": [{"name": "add", "arguments": {"a": 2, "b": 3}}]}
    engine, tokenizer, prompts = scripted("mistral", *[calls] * 3)

    [trajectory] = await ToolWorkflow(tokenizer, GENERATION, right, tools=[add], turns=3).arun_episode(
        engine, dict(EXAMPLE)
    )

    assert len(prompts) == 3
    assert trajectory.reward == 0.0


def test_tools_missing_repeated_untyped_or_unsupported_raise():
    def untyped(a):
        """Has an argument without description and annotation."""

    with pytest.raises(ConfigError, match=r"workflow.tools: expected at least one tool"):
        ToolWorkflow(make_chat_tokenizer("llama3"), GENERATION, right)
    with pytest.raises(ConfigError, match=r"workflow.tools.*'add'"):
        ToolWorkflow(make_chat_tokenizer("llama3"), GENERATION, right, tools=[add, add])
    with pytest.raises(ConfigError, match="untyped"):
        ToolWorkflow(make_chat_tokenizer("llama3"), GENERATION, right, tools=[untyped])
    with pytest.raises(ConfigError, match=r"workflow.tools: the chat template"):
        ToolWorkflow(make_tiny_tokenizer(), GENERATION, right, tools=[add])
    with pytest.raises(ConfigError, match=r"workflow.discount"):
        MultiTurnWorkflow(make_tiny_tokenizer(), GENERATION, right, discount=0)


async def test_multi_turn_example_without_messages_raises():
    engine, tokenizer, _ = scripted("llama3")

    with pytest.raises(DataError, match="messages"):
        await MultiTurnWorkflow(tokenizer, GENERATION, right).arun_episode(engine, {"answer": "5"})


async def test_tools_that_hang_do_not_block_others() -> None:
    released = threading.Event()

    def hangs() -> None:
        """Wait for the event."""
        released.wait(60)

    hanging_calls = [asyncio.create_task(FunctionTool(hangs).call()) for _ in range(64)]
    try:
        await asyncio.sleep(0)
        assert await asyncio.wait_for(FunctionTool(add).call(a=1, b=2), 30) == 3
    finally:
        released.set()
        await asyncio.gather(*hanging_calls)
