"""Workflows with several turns in one conversation: feedback after each completion, and tool calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rl_contracts.chat.image_messages import has_images, image_source, is_image_part, with_read_images
from rl_contracts.chat.rendering import replace_invalid_text
from rl_contracts.config import require
from rl_contracts.data import ModelRequest
from rl_contracts.errors import ConfigError, DataError, RLError
from rl_contracts.runtime.metrics import record
from rl_workflows.agents.conversation import Conversation, Turn, text_with_image_marks
from rl_workflows.agents.message_parsing import MessageParser
from rl_workflows.agents.tools import Tool, load_tools
from rl_workflows.rollout.episode import stage
from rl_workflows.workflows.rlvr import RLVRWorkflow

if TYPE_CHECKING:
    from rl_contracts.batch.trajectory import Trajectory
    from rl_contracts.config import GenerationConfig
    from rl_contracts.inference import InferenceEngine

FEEDBACK = "Your answer is not right. Find the mistake, and answer again."


class MultiTurnWorkflow(RLVRWorkflow):
    """Workflow that scores each completion and, while the reward is too low, sends feedback and samples another.

    The episode gets the reward of the last completion, times `discount` for each earlier turn. All completions
    form one sequence, or several if the chat template rewrites earlier turns.

    Args:
        tokenizer, generation, reward, max_length, template_options: see `RLVRWorkflow`. The conversation ends if
            `max_length` leaves no room for another completion.
        turns: maximum number of completions.
        feedback: text of the user message after a completion whose reward is below `enough`.
        enough: reward at which the conversation ends.
        discount: factor per turn, in (0, 1].
        form: format of the model's tool calls; see `rl_workflows.agents.message_parsing.MessageParser`.
    """

    def __init__(
        self,
        tokenizer: Any,
        generation: GenerationConfig,
        reward: Callable[..., float | Awaitable[float]],
        max_length: int | None = None,
        template_options: Mapping[str, Any] | None = None,
        *,
        turns: int = 2,
        feedback: str = FEEDBACK,
        enough: float = 1.0,
        discount: float = 1.0,
        form: str = "auto",
    ) -> None:
        super().__init__(tokenizer, generation, reward, max_length, template_options)
        require(turns >= 1, "workflow.turns", "at least 1", turns)
        require(0 < discount <= 1, "workflow.discount", "in (0, 1]", discount)
        self._turns, self._feedback, self._enough, self._discount = turns, feedback, enough, discount
        self._parser = MessageParser(self._tokenizer, form, self._renderer.stop_ids)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Trajectory]:
        """Run one conversation. Never returns None."""
        conversation, messages = Conversation(self._renderer), await self._messages(data, data.get("tools"))
        reward = 0.0
        while len(conversation.turns) < self._turns:
            turn = await self._sample_turn(engine, conversation, messages, data.get("tools"))
            if turn is None:
                break
            reward = await self._score_conversation(messages, turn, data)
            messages += [turn.message, {"role": "user", "content": self._feedback}]
            if reward >= self._enough:
                break
        record("conversation/turns", len(conversation.turns))
        return self._trajectories(conversation, reward * self._discount ** (len(conversation.turns) - 1), data)

    async def _messages(self, data: dict[str, Any], tools: Sequence[Any] | None) -> list[Any]:
        if not data.get("messages"):
            raise DataError(f"example: expected `messages`, a list of chat messages, found the keys {sorted(data)}.")
        messages = data["messages"]
        self._require_rendered(messages, tools, data)
        return await asyncio.to_thread(with_read_images, messages) if has_images(messages) else list(messages)

    def _with_valid_text(self, messages: list[Any]) -> list[Any]:
        """Return messages of tools or an environment, with invalid UTF-8 replaced if `invalid_text` is `replace`."""
        return replace_invalid_text(messages) if self.invalid_text == "replace" else messages

    async def _sample_turn(
        self, engine: InferenceEngine, conversation: Conversation, messages: Sequence[Any], tools: Any = None
    ) -> Turn | None:
        """Sample the next completion. After the first one, return None if `max_length` leaves no room for another."""
        build = partial(conversation.prompt, messages, tools)
        # in a thread, because the processor needs milliseconds per image
        prompt = await asyncio.to_thread(build) if has_images(messages) else build()
        if conversation.turns and self.max_length is not None and len(prompt.ids) >= self.max_length:
            return None
        response = await engine.agenerate(ModelRequest(prompt.ids, self.generation, images=prompt.images))
        opening = self._renderer.generation_prompt
        message = self._parser.message(prompt.ids, opening, response.output_ids, tools, self.generation.stop)
        return conversation.add(prompt, response, message, self.generation.temperature)

    async def _score_conversation(self, messages: Sequence[Any], last: Turn, data: dict[str, Any]) -> float:
        """Return the reward of a turn, whose prompt is the whole conversation before its completion."""
        earlier = last.parent.path() if last.parent else []
        ids = [token for turn in earlier for segment in (turn.prompt, turn.output) for token in segment.tolist()]
        ids += last.prompt.tolist()
        with stage("reward"):
            content, output = last.message["content"], last.output.tolist()
            return await self._score(self._renderer.decode(ids), content, ids, output, data)

    def _trajectories(
        self, conversation: Conversation, reward: float, data: dict[str, Any], **options: Any
    ) -> list[Trajectory]:
        trajectories = conversation.trajectories(reward, **options)
        for trajectory in trajectories:
            first = int((trajectory.versions >= 0).argmax())
            segments = {"prompt": trajectory.input_ids[:first], "completion": trajectory.input_ids[first:]}
            trajectory.info |= {name: self._renderer.decode(ids.tolist()) for name, ids in segments.items()}
            trajectory.info["answer"] = data.get("answer")
        return trajectories


class ToolWorkflow(MultiTurnWorkflow):
    """Workflow in which the model calls tools until it writes a completion without a call, or `turns` is reached.

    The result or error of each call is added to the conversation. A result may be a list of content parts with images
    (see `rl_contracts.chat.image_messages`); a model that reads no images gets the text `[image]` for each. The episode
    gets the reward of the last completion.

    Args:
        tokenizer, generation, reward, max_length, template_options, form: see `MultiTurnWorkflow`.
        tools: typed Python functions, plain or async; `rl_workflows.agents.tools.Tool`s; or names (`calculator`,
            `python`).
        tool_seconds: time limit of a call; after it the model gets an error message as the result.
        turns: maximum number of completions.

    Raises:
        ConfigError: no tools, a tool without docstring or annotations, a chat template that does not list tools, or an
            unknown format of tool calls.
    """

    def __init__(
        self,
        tokenizer: Any,
        generation: GenerationConfig,
        reward: Callable[..., float | Awaitable[float]],
        max_length: int | None = None,
        template_options: Mapping[str, Any] | None = None,
        *,
        tools: Sequence[Tool | Callable[..., Any] | str] = (),
        tool_seconds: float = 10.0,
        turns: int = 8,
        form: str = "auto",
    ) -> None:
        super().__init__(tokenizer, generation, reward, max_length, template_options, turns=turns, form=form)
        self._tools = load_tools(tools)
        self._schemas = [tool.schema for tool in self._tools.values()]
        require(len(self._schemas) > 0, "workflow.tools", "at least one tool", list(tools))
        if not (self._parser.reads_tools and self._renderer.renders_tools(self._schemas)):
            raise ConfigError(
                "workflow.tools: the chat template does not list tools, or its format of tool calls is unknown; use an "
                "instruction-tuned model that supports tool calls, or set the argument `form`."
            )
        self._tool_seconds = tool_seconds

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Trajectory]:
        """Run one conversation. Never returns None."""
        conversation, messages = Conversation(self._renderer), await self._messages(data, self._schemas)
        if data.get("tools") not in (None, [], self._schemas):
            raise DataError(
                f"example: expected no `tools` besides the workflow's {', '.join(self._tools)}, found other tools; add "
                "them to workflow.tools, or ignore the column with data.columns.unused_tools=tools."
            )
        last: Turn | None = None
        while len(conversation.turns) < self._turns:
            turn = await self._sample_turn(engine, conversation, messages, self._schemas)
            if turn is None:
                break
            last = turn
            calls = turn.message.get("tool_calls", ())
            if not calls:
                break
            with stage("tools"):
                results = await asyncio.gather(*(self._call_tool(call["function"]) for call in calls))
            messages.append(turn.message)
            messages += self._with_valid_text(
                [
                    {"role": "tool", "tool_call_id": call["id"], "content": result}
                    for call, result in zip(calls, results, strict=True)
                ]
            )
        assert last is not None  # an episode has at least one turn
        record("conversation/turns", len(conversation.turns))
        return self._trajectories(conversation, await self._score_conversation(messages, last, data), data)

    async def _call_tool(self, function: dict[str, Any]) -> str | list[Any]:
        """Return the result of a call, or an error message for the model."""
        name, tool = function["name"], self._tools.get(function["name"])
        if tool is None:
            return f"error: there is no tool {name!r}; the tools are {', '.join(self._tools)}."
        try:
            async with asyncio.timeout(self._tool_seconds):
                result = await tool.call(**function["arguments"])
            if isinstance(result, str):
                return result
            if not _has_image_parts(result):
                return json.dumps(result)
            parts = await asyncio.to_thread(_read_parts, result)
            return parts if self._renderer.reads_images else text_with_image_marks(parts)
        except TimeoutError:
            return f"error: {name} took longer than {self._tool_seconds:g} s."
        except DataError as error:  # a broken image
            return f"error: {name}: {error}"
        except RLError:
            raise
        except Exception as error:  # noqa: BLE001 - any error of a tool becomes its result
            return f"error: {type(error).__name__}: {error}"


def _has_image_parts(result: Any) -> bool:
    return isinstance(result, list) and any(map(is_image_part, result))


def _read_parts(parts: list[Any]) -> list[Any]:
    """Return the content of a tool message with its images read.

    Raises:
        DataError: a part is not a text or a readable image. A path is rejected, because the tool's text may come from
            the model.
    """
    for part in parts:
        is_text = isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        source = image_source(part) if is_image_part(part) else None
        if not is_text and (source is None or (isinstance(source, str) and not source.startswith("data:"))):
            raise DataError(f"expected text parts, or images as data URLs or objects, found {part!r:.60}")
    (message,) = with_read_images([{"role": "tool", "content": parts}])
    return list(message["content"])
