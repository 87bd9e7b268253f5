"""OpenAI's Chat Completions API and Completions API."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from secrets import token_hex
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from rl_workflows.agents.conversation import Prompt
from rl_workflows.agents.endpoint import request_parsing
from rl_workflows.agents.endpoint.session import Call, CallError, GeneratedMessage

TEXTS = ("reasoning_content", "content")
"""Names of the texts of a message, in the order of a stream."""
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class _OpenAI(request_parsing.ApiRequest):
    """Fields and methods that both APIs share."""

    n: request_parsing.CompletionCount | None = None
    stop: request_parsing.Stop | request_parsing.Stops | None = None
    max_tokens: request_parsing.Count | None = None
    seed: int | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stream_options: request_parsing.StreamOptions | None = None

    def check_stream(self) -> None:
        """Check that `stream_options` come with `stream=true`.

        Raises:
            CallError: `stream_options` without `stream=true`.
        """
        request_parsing.reject_if(
            self.stream_options and not self.stream, "stream_options", "allowed only with stream=true."
        )

    @property
    def stops(self) -> list[str]:
        """Stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def _reply(
        self, kind: str, prefix: str, prompt: Prompt, completions: Sequence[GeneratedMessage], choices: list[Any]
    ) -> request_parsing.JsonObject:
        prompt_tokens, completion_tokens = request_parsing.usage(prompt, completions)
        return {
            "id": f"{prefix}-{token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
            "choices": choices,
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": completion_tokens,
                "total_tokens": prompt_tokens + completion_tokens,
            },
        }

    def _chunks(
        self, reply: request_parsing.JsonObject, kind: str, choices: list[request_parsing.JsonObject]
    ) -> list[tuple[str, Any]]:
        """Return the events of a stream: one chunk per entry of `choices`, the usage if requested, and `[DONE]`."""
        base = {name: reply[name] for name in ("id", "created", "model")} | {"object": kind}
        include_usage = self.stream_options is not None and self.stream_options.include_usage
        events: list[tuple[str, Any]] = [
            ("", {**base, "choices": [choice], **({"usage": None} if include_usage else {})}) for choice in choices
        ]
        if include_usage:
            events.append(("", {**base, "choices": [], "usage": reply["usage"]}))
        return [*events, ("", "[DONE]")]


class ChatCompletion(_OpenAI):
    """Request of `POST /v1/chat/completions`."""

    messages: list[request_parsing.JsonObject] = msgspec.field(default_factory=list)
    tools: list[request_parsing.JsonObject] | None = None
    tool_choice: str | request_parsing.JsonObject | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: request_parsing.Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: request_parsing.JsonObject | None = None
    store: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    def call(self) -> Call:
        self.check_stream()
        request_parsing.reject_if(not self.messages, "messages", "expected at least one message.")
        request_parsing.reject_if(
            self.parallel_tool_calls is False,
            "parallel_tool_calls",
            "expected true; this endpoint cannot prevent parallel tool calls.",
        )
        request_parsing.reject_if(
            self.top_logprobs, "top_logprobs", "expected 0; this endpoint has log-probs of sampled tokens only."
        )
        response_format = self.response_format or {"type": "text"}
        if response_format.get("type") == "json_schema":
            response_format = {
                "type": "json_schema",
                **request_parsing.require_objects([response_format.get("json_schema")], "response_format.json_schema")[
                    0
                ],
            }
        tools = [_tool(tool) for tool in self.tools or ()]
        return Call(
            messages=[_template_message(message, f"messages[{i}]") for i, message in enumerate(self.messages)],
            tools=request_parsing.offered_tools(tools, self.tool_choice) or None,
            n=self.n or 1,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            stop=self.stops,
            schema=request_parsing.schema(response_format, "response_format"),
        )

    def build_reply(
        self, prompt: Prompt, completions: Sequence[GeneratedMessage], tokenizer: Any
    ) -> request_parsing.JsonObject:
        choices = []
        for index, completion in enumerate(completions):
            message = {
                "role": "assistant",
                "content": completion.message["content"] or (None if completion.calls else ""),
                "refusal": None,
            }
            if reasoning := completion.message.get("reasoning_content"):
                message["reasoning_content"] = reasoning
            if completion.calls:
                message["tool_calls"] = [
                    {
                        **call,
                        "function": {
                            **call["function"],
                            "arguments": request_parsing.arguments_text(call["function"]["arguments"]),
                        },
                    }
                    for call in completion.calls
                ]
            finish_reason = "tool_calls" if completion.calls else "length" if completion.is_truncated else "stop"
            logprobs = (
                {"content": request_parsing.logprobs(completion, tokenizer), "refusal": None} if self.logprobs else None
            )
            choices.append({"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason})
        return self._reply("chat.completion", "chatcmpl", prompt, completions, choices)

    def events(
        self, reply: request_parsing.JsonObject, sent: Mapping[int, Mapping[str, str]] = MappingProxyType({})
    ) -> list[tuple[str, Any]]:
        chunks = []
        for choice in reply["choices"]:
            message, before = choice["message"], sent.get(choice["index"], {})
            deltas: list[request_parsing.JsonObject] = [] if before else [{"role": "assistant", "content": ""}]
            for name in TEXTS:
                text = (message.get(name) or "")[len(before.get(name, "")) :]
                deltas += [{name: piece} for piece in request_parsing.pieces(text)]
            for index, call in enumerate(message.get("tool_calls") or ()):
                function = call["function"]
                deltas.append({"tool_calls": [{**call, "index": index, "function": {**function, "arguments": ""}}]})
                for piece in request_parsing.pieces(function["arguments"]):
                    deltas.append({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
            last = {"index": choice["index"], "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}
            choice_chunks = [{**last, "delta": delta, "finish_reason": None} for delta in deltas]
            if choice_chunks:
                choice_chunks[0]["logprobs"] = choice["logprobs"]
            chunks += [*choice_chunks, last]
        return self._chunks(reply, "chat.completion.chunk", chunks)


class Completion(_OpenAI):
    """Request of `POST /v1/completions`."""

    prompt: str | list[Any] = ""
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: Literal[False] | None = None

    def call(self) -> Call:
        self.check_stream()
        prompt = self.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        is_valid = isinstance(prompt, str) or all(type(token) is int and 0 <= token < 2**31 for token in prompt)
        request_parsing.reject_if(
            not is_valid or not prompt, "prompt", "expected non-empty text or a non-empty list of token ids."
        )
        request_parsing.reject_if(
            (self.logprobs or 0) > 1, "logprobs", "expected 0 or 1; this endpoint has log-probs of sampled tokens only."
        )
        return Call(text_prompt=prompt, n=self.n or 1, max_tokens=self.max_tokens, stop=self.stops)

    def build_reply(
        self, prompt: Prompt, completions: Sequence[GeneratedMessage], tokenizer: Any
    ) -> request_parsing.JsonObject:
        choices = []
        for index, completion in enumerate(completions):
            logprobs: request_parsing.JsonObject | None = None
            if self.logprobs is not None:
                entries = request_parsing.logprobs(completion, tokenizer)
                logprobs = {
                    "tokens": [entry["token"] for entry in entries],
                    "token_logprobs": [entry["logprob"] for entry in entries],
                    "top_logprobs": None,
                    "text_offset": None,
                }
            finish_reason = "length" if completion.is_truncated else "stop"
            text = completion.message["content"]
            choices.append({"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason})
        return self._reply("text_completion", "cmpl", prompt, completions, choices)

    def events(self, reply: request_parsing.JsonObject) -> list[tuple[str, Any]]:
        chunks = []
        for choice in reply["choices"]:
            choice_chunks = [
                {**choice, "text": piece, "finish_reason": None}
                for piece in request_parsing.pieces(choice["text"]) or [""]
            ]
            chunks += [
                *({**chunk, "logprobs": None} for chunk in choice_chunks[:-1]),
                {**choice_chunks[-1], "finish_reason": choice["finish_reason"]},
            ]
        return self._chunks(reply, "text_completion", chunks)


def _tool(tool: request_parsing.JsonObject) -> request_parsing.JsonObject:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise CallError(
            f"tools: expected type 'function' and an object `function`, found type {tool.get('type')!r:.80} and "
            f"{type(function).__name__}."
        )
    return request_parsing.function(function.get("name"), function.get("description"), function.get("parameters"))


def _template_message(message: request_parsing.JsonObject, where: str) -> request_parsing.JsonObject:
    """Convert one message to the form that chat templates expect."""
    role, content = message.get("role"), message.get("content")
    if role == "user":
        return {"role": "user", "content": request_parsing.content_of(content, where)}
    if role == "tool":
        return {
            "role": "tool",
            "tool_call_id": request_parsing.required_text(message.get("tool_call_id"), where),
            "content": request_parsing.content_of(content, where),
        }
    text = request_parsing.text_of(content, where)
    if role in ("system", "developer"):
        return {"role": "system", "content": text}
    request_parsing.reject_if(
        role != "assistant",
        where,
        f"expected the role system, developer, user, assistant or tool, found {role!r:.80}.",
    )
    tool_calls = request_parsing.require_objects(message.get("tool_calls") or [], where)
    functions = request_parsing.require_objects([call.get("function") for call in tool_calls], where)
    calls = [
        (call.get("id", ""), f.get("name", ""), f.get("arguments"))
        for call, f in zip(tool_calls, functions, strict=True)
    ]
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    return request_parsing.assistant(text, request_parsing.text_of(reasoning, where), calls, where)
