"""One episode's session: its conversation, and the calls that add to it, whichever API they came by."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rl_contracts.data import ModelRequest, ModelResponse, StopReason
from rl_contracts.endpoint import EpisodeReport, RolloutSession, SequencesPer
from rl_contracts.errors import AgentError, DataError, InferenceError, RLError
from rl_workflows.agents.conversation import Conversation, Prompt, PromptTooLongError, Turn

if TYPE_CHECKING:
    from rl_contracts.batch.trajectory import Trajectory
    from rl_contracts.chat.rendering import ChatRenderer, Message
    from rl_contracts.config import GenerationConfig
    from rl_contracts.inference import InferenceEngine
    from rl_workflows.agents.endpoint.config import EndpointConfig
    from rl_workflows.agents.message_parsing import MessageParser

RENDERED_CHARACTERS = 1 << 16
"""Characters of a request that are always rendered, because a template may leave out parts of tools and messages."""


class CallError(AgentError):
    """A call that is refused. `status` is HTTP's, `code` one of OpenAI's where they have one."""

    def __init__(self, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True)
class Call:
    """What an agent asks for, in the words of no API."""

    messages: Sequence[Message] = ()
    """The conversation; empty for a completion."""
    system: str = ""
    """What is put before it."""
    after: str = ""
    """Id of the kept reply whose conversation it goes on from; empty: none."""
    keep: bool = False
    """Keep the conversation, so that another call may go on from it."""
    completion: str | Sequence[int] = ""
    """Prompt of a completion."""
    tools: Sequence[dict[str, Any]] | None = None
    """Functions that the model may call, in OpenAI's form."""
    n: int = 1
    """Answers."""
    max_tokens: int | None = None
    """Of an answer; the run's limit holds beside it."""
    stop: Sequence[str] = ()
    """Strings that end an answer."""
    schema: dict[str, Any] | None = None
    """JSON schema that answers are kept to, which makes them context that is not trained."""


@dataclass(frozen=True, slots=True)
class GeneratedMessage:
    """One answer to a call."""

    message: Message
    """For the agent."""
    response: ModelResponse
    """Its tokens."""
    stop: str | None
    """The string that ended it, if one did."""
    turn: Turn
    """What its conversation has of it."""

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Its tool calls."""
        return list(self.message.get("tool_calls") or ())

    @property
    def is_truncated(self) -> bool:
        """Whether it was ended by a limit of length."""
        return self.response.stop_reason == StopReason.LENGTH


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call whose prompt is known."""

    call: Call
    """With all messages of its conversation."""
    prompt: Prompt
    memory: int
    """Bytes that its messages and tools take once it is answered."""


@dataclass(frozen=True)
class Model:
    """What all sessions share."""

    tokenizer: Any
    renderer: ChatRenderer
    reader: MessageParser
    config: EndpointConfig

    @cached_property
    def token_characters(self) -> int:
        """Characters of the longest token: a text of n tokens has at most n times as many."""
        return max(map(len, self.tokenizer.get_vocab()))


@dataclass(eq=False)
class Session(RolloutSession):
    """See the contract. Its calls run on the endpoint's loop, generation on the engine's."""

    model: Model
    engine: InferenceEngine
    generation: GenerationConfig
    max_length: int | None
    loop: asyncio.AbstractEventLoop
    """On which the engine is used."""
    url: str
    key: str
    on_close: Callable[[Session], Coroutine[Any, Any, None]]
    """Called by `close`, from any loop."""
    closed: bool = False
    expired: bool = False
    """Closed because it took too long."""
    refused: int = 0
    """Calls that were."""
    calling: int = 0
    """Calls that have no reply yet; of some of them the body is still to come."""
    outcome: float | None = None
    """Reward of the episode, where the agent said one."""
    figures: dict[str, float] = field(default_factory=dict)
    """What else it said, by name."""
    calls: dict[str, list[Turn]] = field(default_factory=dict)
    """Answers by the id of the reply that had them."""
    kept: dict[str, list[Message]] = field(default_factory=dict)
    """Conversations by the id of the reply with which they end."""
    _earned: dict[Turn, float] = field(default_factory=dict)
    _failure: RLError | None = None
    preparing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a prompt of this session is prepared in a thread, so that one session occupies one thread at most."""
    _running: set[asyncio.Task[Any]] = field(default_factory=set)
    _asked: int = 0
    _tokens: int = 0
    _memory: int = 0
    """Bytes of the messages and tools of answered calls."""
    _memory_asked: int = 0
    """Bytes of those of running calls."""
    _tools: Sequence[dict[str, Any]] | None = None
    """Tools of the last call, which equal tools of the next one share."""

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
        return EpisodeReport(self.outcome, sum(self._earned.values()) if self._earned else None, self.figures)

    def add_reward(self, call_id: str, index: int, reward: float) -> None:
        """An answer's own reward, instead of one that it had.

        Raises:
            CallError: there is no such answer.
        """
        turns = self.calls.get(call_id)
        if turns is None:
            raise CallError(f"call_id: no reply of this session has the id {call_id!r:.80}.", 404)
        if index >= len(turns):
            raise CallError(f"index: expected one below {len(turns)}, the number of that call's answers.")
        turns[index].reward = self._earned[turns[index]] = reward

    def trajectories(self, reward: float, per: SequencesPer = "branch") -> list[Trajectory]:
        if not self.closed:
            raise AgentError("the session is still open; close it before its trajectories are made.")
        config = self.model.config
        rows = self.conversation.rows(reward, per, config.credit, config.discount)  # type: ignore[arg-type]
        decode = self.model.tokenizer.decode
        for row in rows:
            first = int(row.loss_mask.argmax()) if per == "call" else int((row.versions >= 0).argmax())
            row.info |= {"prompt": decode(row.input_ids[:first]), "completion": decode(row.input_ids[first:])}
        return rows

    async def close(self) -> None:
        await self.on_close(self)

    def end(self) -> None:
        """Refuse further calls and end those that run; on the endpoint's loop."""
        self.closed = True
        for task in self._running:
            task.cancel()

    def with_history(self, call: Call) -> Call:
        """The call with all messages of its conversation.

        Raises:
            CallError: what it goes on from is not kept.
        """
        if call.after and call.after not in self.kept:
            raise CallError(
                f"previous_response_id: no response with the id {call.after!r:.80} was stored in this session.",
                code="previous_response_not_found",
            )
        return replace(call, messages=[*self.kept.get(call.after, ()), *call.messages])

    def remember_reply(self, reply_id: str, call: Call, answers: Sequence[GeneratedMessage]) -> None:
        """A reply gets an id, by which later calls may speak of it."""
        self.calls[reply_id] = [answer.turn for answer in answers]
        if call.keep:
            self.kept[reply_id] = [*call.messages, answers[0].message]

    def prepare(self, own: Call) -> Prepared:
        """Find the prompt of a call; in a thread, while `preparing` is held.

        Raises:
            CallError: see `whole` and `prompt`.
        """
        call = self.with_history(own)
        known = call.tools == self._tools
        call = replace(call, tools=self._tools) if known else call
        prompt = self.prompt(call)
        kept = [own.messages if call.keep else prompt.asked, None if known else call.tools]
        return Prepared(call, prompt, sum(map(sys.getsizeof, _nested(kept))))

    def prompt(self, call: Call) -> Prompt:
        """Return the tokens of a call.

        Raises:
            CallError: they cannot be had, or leave no room for an answer.
        """
        longest = min(self.max_length or self.model.config.max_tokens, self.model.config.max_tokens)
        most = longest * self.model.token_characters
        self._require_short(call, longest, max(most, RENDERED_CHARACTERS))
        if call.tools and not self.model.reader.reads_tools:
            raise CallError(
                "tools: how this model writes tool calls is not known from its chat template; say it in "
                "endpoint.tool_calls."
            )
        talk = self.conversation
        try:
            if call.tools and not self.model.renderer.renders_tools(call.tools):
                raise CallError("tools: the model's chat template does not show them.")
            if call.messages:
                before = [{"role": "system", "content": call.system}] if call.system else []
                prompt = talk.prompt([*before, *call.messages], call.tools, most)
            else:
                prompt = talk.completion(call.completion)
        except PromptTooLongError as error:
            raise _too_long(longest, f"more ({error})") from error
        except (DataError, RecursionError, UnicodeError) as error:
            raise CallError(f"the prompt cannot be made: {error}") from error
        if not 0 < len(prompt.ids) < longest:
            raise _too_long(longest, str(len(prompt.ids)))
        return prompt

    def _require_short(self, call: Call, longest: int, most: int) -> None:
        """Reject a call that cannot fit before anything is rendered or tokenized.

        A message, a tool and a token id each take at least one token. Reasoning is counted once it is rendered, because
        templates drop that of earlier turns.

        Args:
            longest: tokens of a prompt and its answer.
            most: characters of messages and tools.

        Raises:
            CallError: it has more of either.
        """
        parts = len(call.messages) + len(call.tools or ())
        if not isinstance(call.completion, str):
            parts = len(call.completion)
        if parts > longest:
            raise _too_long(longest, f"at least {parts}")
        shown = [[value for name, value in each.items() if name != "reasoning_content"] for each in call.messages]
        texts = _nested([shown, call.tools, call.system, call.completion if isinstance(call.completion, str) else ""])
        characters = sum(len(value) if isinstance(value, str) else 1 for value in texts)
        if characters > most:
            raise _too_long(longest, f"more ({characters} characters)")

    async def answer(self, prepared: Prepared) -> list[GeneratedMessage]:
        """Generate the answers to a call, and remember them.

        Raises:
            CallError: refused; nothing was generated.
            RLError: the engine could not; it is the session's `failure`.
        """
        call, prompt = prepared.call, prepared.prompt
        if self.closed:  # while its body came
            raise CallError("the session was closed before its call was there.", 401, "invalid_api_key")
        if call.schema is not None and not self.engine.capabilities.schemas:
            raise CallError(
                "response_format: the run's servers keep no answer to a format; expected text. vLLM and SGLang can."
            )
        self.admit(prompt.added, call.n, prepared.memory)
        task = asyncio.ensure_future(self._generate(call, prompt))
        self._running.add(task)
        self._asked += call.n
        self._memory_asked += prepared.memory
        try:
            await asyncio.wait({task})
        finally:
            self._running.discard(task)
            self._asked -= call.n
            self._memory_asked -= prepared.memory
            task.cancel()  # where the agent went away
        if self.closed:
            raise CallError("the session was closed before its answer was there.", 401, "invalid_api_key")
        responses = task.result()
        self._memory += prepared.memory
        self._tools = call.tools or self._tools
        answers = []
        for response in responses:
            message, stop = self._read(call, prompt, response)
            turn = self.conversation.add(prompt, response, message, self.generation.temperature, call.schema is None)
            self._tokens += len(turn.prompt) + len(turn.output)
            answers.append(GeneratedMessage(message, response, stop, turn))
        return answers

    def admit(self, added: int = 0, answers: int = 1, memory: int = 0) -> None:
        """Refuse a call that would be more than an episode may have.

        Args:
            added: tokens of its prompt that are new; 0 where that is not known yet.
            answers: that it asks for; at least one.
            memory: bytes of its messages and tools; 0 where that is not known yet.

        Raises:
            CallError: names the limit.
        """
        config = self.model.config
        at_once = max(self.calling, self._asked + answers)
        limits = (
            (len(self.conversation.turns) + self._asked + answers, config.max_calls, "answers in all", "max_calls"),
            (at_once, config.max_concurrent, "answers at the same time", "max_concurrent"),
            (self._tokens + added + answers, config.max_tokens, "tokens in all", "max_tokens"),
            (self._memory + self._memory_asked + memory, config.max_memory, "bytes of messages in all", "max_memory"),
        )
        for found, most, what, name in limits:
            if found > most:
                raise CallError(
                    f"this episode may have {most} {what} (endpoint.{name}), and this call would make {found}.",
                    429,
                    "rate_limit_exceeded",
                )

    async def _generate(self, call: Call, prompt: Prompt) -> list[ModelResponse]:
        most = min(call.max_tokens or self.generation.max_new_tokens, self.generation.max_new_tokens)
        if self.max_length is not None:
            most = min(most, self.max_length - len(prompt.ids))
        generation = replace(
            self.generation,
            max_new_tokens=most,
            min_new_tokens=min(most, self.generation.min_new_tokens),
            stop=list(dict.fromkeys([*self.generation.stop, *call.stop])),
        )
        request = ModelRequest(prompt.ids, generation, schema=call.schema)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._ask(request)) for _ in range(call.n)]
        except* Exception as errors:
            failure = _first(errors)
            if call.schema is not None and isinstance(failure, InferenceError):  # most likely one that cannot be kept
                raise CallError(f"response_format: {failure}") from errors
            self._failure = self._failure or failure
            raise self._failure from errors
        return [task.result() for task in tasks]

    async def _ask(self, request: ModelRequest) -> ModelResponse:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.engine.agenerate(request), self.loop))

    def _read(self, call: Call, prompt: Prompt, response: ModelResponse) -> tuple[Message, str | None]:
        """The agent's message, and the stop string that ended it."""
        reader, ids = self.model.reader, response.output_ids
        whole = reader.text(ids)
        stopped = ids[-1] not in self.generation.stop_token_ids and response.stop_reason != StopReason.LENGTH
        given = [*call.stop, *self.generation.stop]
        stop = min((s for s in given if s in whole), key=whole.find, default=None) if stopped else None
        stops = [stop] if stop else ()
        if not call.messages:
            return {"role": "assistant", "content": reader.text(ids, stops)}, stop
        opening = (
            prompt.text[-len(self.model.renderer.generation_prompt) :] if self.model.renderer.generation_prompt else ""
        )
        return reader.message(prompt.ids, opening, ids, call.tools, stops), stop


def _too_long(longest: int, size: str) -> CallError:
    return CallError(
        f"This model's maximum context length is {longest} tokens: expected a prompt of 1 to {longest - 1}, "
        f"found {size}.",
        code="context_length_exceeded",
    )


def _nested(value: Any) -> Iterator[Any]:
    """Yield a value and all that it contains, names of entries too."""
    waiting = [value]
    while waiting:
        yield (value := waiting.pop())
        if isinstance(value, dict):
            waiting += value
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value


def _first(errors: BaseExceptionGroup) -> RLError:
    error = errors.exceptions[0]
    if isinstance(error, BaseExceptionGroup):
        return _first(error)
    named = f"the engine raised {type(error).__name__}: {error}"
    return error if isinstance(error, RLError) else InferenceError(named)
