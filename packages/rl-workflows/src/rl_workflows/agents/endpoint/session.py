"""Session of one episode: its conversation and the calls that extend it, independent of the API."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from rl_contracts.chat.image_messages import has_images, with_read_images
from rl_contracts.data import ModelRequest, ModelResponse, StopReason
from rl_contracts.endpoint import EpisodeReport, RolloutSession, SequencesPer
from rl_contracts.errors import AgentError, ConfigError, DataError, InferenceError, RLError
from rl_contracts.images import Image
from rl_workflows.agents.conversation import Conversation, Prompt, PromptTooLongError, Turn

if TYPE_CHECKING:
    from rl_contracts.batch.trajectory import Trajectory
    from rl_contracts.chat.rendering import ChatRenderer, Message
    from rl_contracts.config import GenerationConfig
    from rl_contracts.inference import InferenceEngine
    from rl_workflows.agents.endpoint.config import EndpointConfig
    from rl_workflows.agents.message_parsing import MessageParser

MAX_CONCURRENT = 32
"""Maximum number of completions of a session that are generated at the same time, so that an agent without a limit of
its own does not delay the other sessions."""
MAX_TOKENS = 1 << 20
"""Maximum number of tokens of a session: prompts and completions of all branches, shared tokens counted once. It bounds
the memory of an agent in an endless loop."""
MAX_MEMORY = 1 << 27
"""Maximum memory in bytes for the messages, images and tools of a session: hundreds of times the text of a long
session. Repeated messages count once, except in stored responses (`store`). Tools count only if they differ from the
tools of the last call."""
UPDATE_SECONDS = 0.05
"""Seconds between two updates of a streamed completion."""
RENDERED_CHARACTERS = 1 << 16
"""Requests with at most this number of characters are always rendered. A template may omit parts of tools and messages,
so such a request may fit although its text seems too long."""


type OnMessage = Callable[[int, Message], None]
"""Function of the index of a completion and the message parsed from its tokens so far."""


class CallError(AgentError):
    """The endpoint rejected a call.

    Args:
        message: message for the agent.
        status: HTTP status.
        code: OpenAI's error code, or None.
    """

    def __init__(self, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True)
class Call:
    """Request of an agent, independent of the API."""

    messages: Sequence[Message] = ()
    """Messages of the conversation; empty for a request of the Completions API."""
    system: str = ""
    """System message to insert before `messages`; empty for none."""
    previous_reply_id: str = ""
    """Id of the stored reply whose conversation this call continues; empty for none."""
    store: bool = False
    """Store the conversation, so that another call can continue it."""
    text_prompt: str | Sequence[int] = ""
    """Prompt of a request of the Completions API, as text or token ids."""
    tools: Sequence[dict[str, Any]] | None = None
    """Functions that the model may call, in OpenAI's format, or None."""
    n: int = 1
    """Number of completions."""
    max_tokens: int | None = None
    """Maximum number of tokens of a completion, or None. The limit of the run applies as well."""
    stop: Sequence[str] = ()
    """Strings that end a completion."""
    schema: dict[str, Any] | None = None
    """JSON schema that constrains the completions, or None. Constrained completions are not trained on."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters and seed by name. They apply only in sessions with `applies_sampling`."""


@dataclass(frozen=True, slots=True)
class GeneratedMessage:
    """One completion of a call."""

    message: Message
    """Message that the agent receives."""
    response: ModelResponse
    """Sampled tokens."""
    stop: str | None
    """Stop string that ended the completion, or None."""
    turn: Turn
    """Turn of the conversation that holds the completion."""

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Tool calls of the message."""
        return list(self.message.get("tool_calls") or ())

    @property
    def is_truncated(self) -> bool:
        """True if a length limit ended the completion."""
        return self.response.stop_reason == StopReason.LENGTH


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call with its tokenized prompt."""

    call: Call
    """The call with all messages of its conversation."""
    prompt: Prompt
    memory: int
    """Bytes of the call's messages and tools that the session keeps after the call."""


@dataclass(frozen=True)
class Model:
    """Tokenizer, chat template, message parser and settings that all sessions share."""

    tokenizer: Any
    renderer: ChatRenderer
    reader: MessageParser
    config: EndpointConfig

    @cached_property
    def token_characters(self) -> int:
        """Length of the longest token in characters. A text of n tokens has at most n times as many characters."""
        return max(map(len, self.tokenizer.get_vocab()))


@dataclass(eq=False)
class Session(RolloutSession):
    """Session of an HTTP endpoint. Calls run on the endpoint's event loop, generation on the engine's."""

    model: Model
    engine: InferenceEngine
    generation: GenerationConfig
    max_length: int | None
    loop: asyncio.AbstractEventLoop
    """Event loop on which the engine is used."""
    url: str
    key: str
    on_close: Callable[[Session], Coroutine[Any, Any, None]]
    """Function that `close` calls, from any event loop."""
    applies_sampling: bool = False
    """Whether the sampling parameters of a call replace those of `generation`. False for episodes, whose sampling
    distribution must be known."""
    closed: bool = False
    expired: bool = False
    """True if the session was closed because its time limit passed."""
    rejected_calls: int = 0
    """Number of rejected calls."""
    open_calls: int = 0
    """Number of calls without a reply, including calls whose body has not arrived."""
    outcome: float | None = None
    """Reward of the episode, or None if the agent reported none."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics that the agent reported, by name."""
    turns_by_reply: dict[str, list[Turn]] = field(default_factory=dict)
    """Turns of the completions by the id of their reply."""
    stored: dict[str, list[Message]] = field(default_factory=dict)
    """Stored conversations by the id of their last reply."""
    _turn_rewards: dict[Turn, float] = field(default_factory=dict)
    _failure: RLError | None = None
    preparing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock held while a thread prepares a prompt, so that a session uses at most one thread."""
    _running: set[asyncio.Task[Any]] = field(default_factory=set)
    _pending: int = 0
    """Number of completions that are being generated."""
    _tokens: int = 0
    """Number of tokens of all turns."""
    _memory: int = 0
    """Bytes of the messages and tools of completed calls."""
    _pending_memory: int = 0
    """Bytes of the messages and tools of running calls."""
    _last_tools: Sequence[dict[str, Any]] | None = None
    """Tools of the last call. A call with equal tools shares this object."""

    def __post_init__(self) -> None:
        self.conversation = Conversation(self.model.renderer)
        stops = dict.fromkeys([*self.generation.stop_token_ids, *self.model.renderer.stop_ids])
        self.generation = replace(self.generation, stop_token_ids=list(stops))

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def api_key(self) -> str:
        return self.key

    @property
    def failure(self) -> RLError | None:
        return self._failure

    @property
    def report(self) -> EpisodeReport:
        return EpisodeReport(
            self.outcome, sum(self._turn_rewards.values()) if self._turn_rewards else None, self.metrics
        )

    def add_reward(self, call_id: str, index: int, reward: float) -> None:
        """Set the reward of one completion. A previous reward is replaced.

        Args:
            call_id: id of the reply that contained the completion.
            index: index of the completion in the reply.
            reward: reward of the completion, in addition to the episode's reward.

        Raises:
            CallError: the session has no such completion.
        """
        turns = self.turns_by_reply.get(call_id)
        if turns is None:
            raise CallError(f"call_id: expected the id of a response of this session, found {call_id!r:.80}.", 404)
        if index >= len(turns):
            raise CallError(
                f"index: expected less than {len(turns)}, the number of completions of this call, found {index}."
            )
        turns[index].reward = self._turn_rewards[turns[index]] = reward

    def trajectories(self, reward: float, per: SequencesPer = "branch") -> list[Trajectory]:
        if not self.closed:
            raise AgentError("the session is still open; call `close` before `trajectories`.")
        config = self.model.config
        sequences = self.conversation.trajectories(reward, per, config.credit, config.discount)  # type: ignore[arg-type]
        decode = self.model.renderer.decode
        for sequence in sequences:
            start = int(sequence.loss_mask.argmax()) if per == "call" else int((sequence.versions >= 0).argmax())
            sequence.info |= {
                "prompt": decode(sequence.input_ids[:start].tolist()),
                "completion": decode(sequence.input_ids[start:].tolist()),
            }
        return sequences

    async def close(self) -> None:
        await self.on_close(self)

    def end(self) -> None:
        """Reject further calls and cancel the running ones. Must run on the event loop of the endpoint."""
        self.closed = True
        for task in self._running:
            task.cancel()

    def with_history(self, call: Call) -> Call:
        """Return the call with the messages of the stored conversation that it continues.

        Raises:
            CallError: the session has not stored that conversation.
        """
        if call.previous_reply_id and call.previous_reply_id not in self.stored:
            raise CallError(
                f"previous_response_id: expected the id of a response stored in this session, found "
                f"{call.previous_reply_id!r:.80}.",
                code="previous_response_not_found",
            )
        return replace(call, messages=[*self.stored.get(call.previous_reply_id, ()), *call.messages])

    def remember_reply(self, reply_id: str, call: Call, completions: Sequence[GeneratedMessage]) -> None:
        """Record a reply under its id, so that later calls can reward or continue it."""
        self.turns_by_reply[reply_id] = [completion.turn for completion in completions]
        if call.store:
            self.stored[reply_id] = [*call.messages, completions[0].message]

    def prepare(self, received_call: Call) -> Prepared:
        """Render and tokenize the prompt of a call. Runs in a thread; the caller holds `preparing`.

        Args:
            received_call: the call as received, without the messages of a stored conversation.

        Raises:
            CallError: an image cannot be read; see also `with_history` and `prompt`.
        """
        received_call = replace(received_call, messages=self._read_images(received_call.messages))
        call = self.with_history(received_call)
        has_same_tools = call.tools == self._last_tools
        call = replace(call, tools=self._last_tools) if has_same_tools else call
        prompt = self.prompt(call)
        retained = [
            received_call.messages if call.store else prompt.new_messages,
            None if has_same_tools else call.tools,
        ]
        return Prepared(call, prompt, sum(map(_size, _walk(retained))))

    def _read_images(self, messages: Sequence[Message]) -> Sequence[Message]:
        if not has_images(messages):
            return messages
        if not self.model.renderer.reads_images:
            raise CallError("messages: expected text only, found images; this model reads no images.")
        try:
            return with_read_images(messages)
        except DataError as error:
            raise CallError(str(error)) from error

    def prompt(self, call: Call) -> Prompt:
        """Return the prompt of a call and its place in the conversation.

        Raises:
            CallError: the prompt cannot be rendered, or leaves no room for a completion.
        """
        context_length = min(self.max_length or MAX_TOKENS, MAX_TOKENS)
        max_characters = context_length * self.model.token_characters
        self._require_short(call, context_length, max(max_characters, RENDERED_CHARACTERS))
        if call.tools and not self.model.reader.reads_tools:
            raise CallError(
                "tools: the chat template of this model has no known format of tool calls; send no tools, or set "
                "rollout.endpoint.tool_calls of a run."
            )
        conversation = self.conversation
        try:
            if call.tools and not self.model.renderer.renders_tools(call.tools):
                raise CallError("tools: the chat template of this model does not render tools; send none.")
            if call.messages:
                system = [{"role": "system", "content": call.system}] if call.system else []
                prompt = conversation.prompt([*system, *call.messages], call.tools, max_characters)
            else:
                prompt = conversation.completion(call.text_prompt)
        except PromptTooLongError as error:
            raise _too_long(context_length, f"more than {context_length} ({error})") from error
        except (DataError, RecursionError, UnicodeError) as error:
            raise CallError(f"cannot build the prompt: {error}") from error
        if not 0 < len(prompt.ids) < context_length:
            raise _too_long(context_length, str(len(prompt.ids)))
        return prompt

    def _require_short(self, call: Call, context_length: int, max_characters: int) -> None:
        """Reject a call that cannot fit, before anything is rendered or tokenized.

        Each message, tool and token id takes at least one token. Reasoning is not counted here but after rendering,
        because templates drop the reasoning of earlier turns.

        Args:
            call: the call to check.
            context_length: maximum number of tokens of a prompt and its completion.
            max_characters: maximum number of characters of messages and tools.

        Raises:
            CallError: the call exceeds one of the limits.
        """
        min_tokens = len(call.messages) + len(call.tools or ())
        if not isinstance(call.text_prompt, str):
            min_tokens = len(call.text_prompt)
        if min_tokens > context_length:
            raise _too_long(context_length, f"at least {min_tokens}")
        messages = [
            [value for name, value in message.items() if name != "reasoning_content"] for message in call.messages
        ]
        values = _walk(
            [messages, call.tools, call.system, call.text_prompt if isinstance(call.text_prompt, str) else ""]
        )
        characters = sum(len(value) if isinstance(value, str) else 1 for value in values)
        if characters > max_characters:
            raise _too_long(context_length, f"more than {context_length} ({characters} characters)")

    async def generate(self, prepared: Prepared, on_message: OnMessage | None = None) -> list[GeneratedMessage]:
        """Generate the completions of a call and add them to the conversation.

        Args:
            prepared: call with its prompt.
            on_message: function to call with the unfinished completions, or None.

        Raises:
            CallError: the call was rejected, the session was closed, or the servers cannot use the schema.
            RLError: the engine failed, or the completion cannot be trained on; the error is also the session's
                `failure`.
        """
        call, prompt = prepared.call, prepared.prompt
        if self.closed:  # while the body arrived
            raise CallError("the session was closed before the call arrived.", 401, "invalid_api_key")
        if call.schema is not None and not self.engine.capabilities.schemas:
            raise CallError(
                "response_format (Responses API: text.format): expected text; this server cannot constrain completions "
                "to a format. vLLM and SGLang can."
            )
        if prompt.images and not self.engine.capabilities.images:
            raise CallError("messages: expected text only, found images; the servers of this run read no images.")
        self.admit(prompt.added, call.n, prepared.memory)
        task = asyncio.ensure_future(self._generate(call, prompt, on_message))
        self._running.add(task)
        self._pending += call.n
        self._pending_memory += prepared.memory
        try:
            await asyncio.wait({task})
        finally:
            self._running.discard(task)
            self._pending -= call.n
            self._pending_memory -= prepared.memory
            task.cancel()  # has an effect only if the agent disconnected
        if self.closed:
            raise CallError("the session was closed before the completion was ready.", 401, "invalid_api_key")
        responses = task.result()
        self._memory += prepared.memory
        self._last_tools = call.tools or self._last_tools
        completions = []
        for response in responses:
            message, stop = self._parse(call, prompt, response)
            try:
                turn = self.conversation.add(
                    prompt, response, message, self.generation.temperature, call.schema is None
                )
            except DataError as error:  # a placeholder of an image was sampled, so the episode cannot be trained on
                self._failure = self._failure or error
                raise
            self._tokens += len(turn.prompt) + len(turn.output)
            completions.append(GeneratedMessage(message, response, stop, turn))
        return completions

    def admit(self, added: int = 0, completions: int = 1, memory: int = 0) -> None:
        """Reject a call that exceeds a limit of the episode.

        Args:
            added: number of new tokens in the prompt; 0 if not known yet.
            completions: number of requested completions, at least 1.
            memory: bytes of the messages and tools; 0 if not known yet.

        Raises:
            CallError: the call exceeds a limit, which the message names.
        """
        config = self.model.config
        total = len(self.conversation.turns) + self._pending + completions
        concurrent = max(self.open_calls, self._pending + completions)
        message_bytes = self._memory + self._pending_memory + memory
        limits = (
            (total, config.max_calls, "completions (endpoint.max_calls)"),
            (concurrent, MAX_CONCURRENT, "concurrent completions"),
            (self._tokens + added + completions, MAX_TOKENS, "tokens"),
            (message_bytes, MAX_MEMORY, "bytes of messages and tools"),
        )
        for count, limit, unit in limits:
            if count > limit:
                raise CallError(
                    f"an episode may have at most {limit} {unit}; with this call it would have {count}.",
                    429,
                    "rate_limit_exceeded",
                )

    async def _generate(self, call: Call, prompt: Prompt, on_message: OnMessage | None = None) -> list[ModelResponse]:
        max_new_tokens = min(call.max_tokens or self.generation.max_new_tokens, self.generation.max_new_tokens)
        if self.max_length is not None:
            max_new_tokens = min(max_new_tokens, self.max_length - len(prompt.ids))
        sampling = dict(call.sampling) if self.applies_sampling else {}
        seed = sampling.pop("seed", None)
        try:
            generation = replace(
                self.generation,
                max_new_tokens=max_new_tokens,
                min_new_tokens=min(max_new_tokens, self.generation.min_new_tokens),
                stop=list(dict.fromkeys([*self.generation.stop, *call.stop])),
                **sampling,
            )
        except ConfigError as error:  # a sampling parameter
            raise CallError(str(error)) from error
        request = ModelRequest(prompt.ids, generation, schema=call.schema, images=prompt.images)
        requests = [
            replace(
                request,
                seed=None if seed is None else (seed + index) % 2**63,
                on_tokens=None if on_message is None else self._parse_tokens(call, prompt, partial(on_message, index)),
            )
            for index in range(call.n)
        ]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._generate_one(request)) for request in requests]
        except* Exception as errors:
            failure = _first_error(errors)
            if call.schema is not None and isinstance(failure, InferenceError):
                # most likely the server rejected the schema
                raise CallError(f"response_format (Responses API: text.format): {failure}") from errors
            self._failure = self._failure or failure
            raise self._failure from errors
        return [task.result() for task in tasks]

    async def _generate_one(self, request: ModelRequest) -> ModelResponse:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.engine.agenerate(request), self.loop))

    def _parse_tokens(
        self, call: Call, prompt: Prompt, on_message: Callable[[Message], None]
    ) -> Callable[[Sequence[int]], None]:
        """Return a function of the tokens of an unfinished completion, which the engine calls on its event loop.

        Every `UPDATE_SECONDS` at most, it parses them on the endpoint's event loop, and calls `on_message`.
        """
        loop, newest = asyncio.get_running_loop(), list[Sequence[int]]()

        def parse() -> None:
            ids = list(newest.pop())
            stops = [*call.stop, *self.generation.stop]
            on_message(self.model.reader.message(prompt.ids, self._opening(prompt), ids, stop=stops))

        def on_tokens(ids: Sequence[int]) -> None:
            if not newest and ids:  # the list grows until it is parsed
                newest.append(ids)
                loop.call_soon_threadsafe(loop.call_later, UPDATE_SECONDS, parse)

        return on_tokens

    def _opening(self, prompt: Prompt) -> str:
        """Return the end of a prompt that opens the turn of the assistant."""
        length = len(self.model.renderer.generation_prompt)
        return prompt.text[-length:] if length else ""

    def _parse(self, call: Call, prompt: Prompt, response: ModelResponse) -> tuple[Message, str | None]:
        """Return the message for the agent and the stop string that ended the completion, or None."""
        reader, ids = self.model.reader, response.output_ids
        text = reader.text(ids)
        has_stop_string = ids[-1] not in self.generation.stop_token_ids and response.stop_reason != StopReason.LENGTH
        stop_strings = [*call.stop, *self.generation.stop]
        stop = min((s for s in stop_strings if s in text), key=text.find, default=None) if has_stop_string else None
        stops = [stop] if stop else ()
        if not call.messages:
            return {"role": "assistant", "content": reader.text(ids, stops)}, stop
        return reader.message(prompt.ids, self._opening(prompt), ids, call.tools, stops), stop


def _too_long(context_length: int, size: str) -> CallError:
    return CallError(
        f"This model's maximum context length is {context_length} tokens: expected a prompt of 1 to "
        f"{context_length - 1} tokens, found {size}.",
        code="context_length_exceeded",
    )


def _walk(value: Any) -> Iterator[Any]:
    """Yield a value and, recursively, all values and keys that it contains."""
    pending = [value]
    while pending:
        yield (value := pending.pop())
        if isinstance(value, dict):
            pending += value
            pending += value.values()
        elif isinstance(value, list | tuple):
            pending += value


def _size(value: Any) -> int:
    """Return the size of a value in bytes, without the values that it contains."""
    return len(value.data) if isinstance(value, Image) else sys.getsizeof(value)


def _first_error(errors: BaseExceptionGroup) -> RLError:
    error = errors.exceptions[0]
    if isinstance(error, BaseExceptionGroup):
        return _first_error(error)
    message = f"the engine raised {type(error).__name__}: {error}"
    return error if isinstance(error, RLError) else InferenceError(message)
