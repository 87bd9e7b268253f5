"""OpenAI's chat completions and completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from secrets import token_hex
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from rl_contracts.conversation import Prompt
from rl_inference.endpoint import wire
from rl_inference.endpoint.session import Answer, Call, CallError

Penalty = Annotated[float, Meta(ge=-2, le=2)]


class _OpenAI(wire.Asked):
    """What both have."""

    n: wire.Many | None = None
    stop: wire.Stop | wire.Stops | None = None
    max_tokens: wire.Count | None = None
    seed: int | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stream_options: wire.StreamOptions | None = None

    def check_stream(self) -> None:
        """Raises: CallError: options of a stream, and none is asked for."""
        wire.refuse(self.stream_options and not self.stream, "stream_options", "expected them with stream=true alone.")

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def _reply(
        self, kind: str, prefix: str, prompt: Prompt, answers: Sequence[Answer], choices: list[Any]
    ) -> wire.Names:
        before, after = wire.usage(prompt, answers)
        return {
            "id": f"{prefix}-{token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
            "choices": choices,
            "usage": {"prompt_tokens": before, "completion_tokens": after, "total_tokens": before + after},
        }

    def _chunks(self, reply: wire.Names, kind: str, parts: list[wire.Names]) -> list[tuple[str, Any]]:
        """The reply in parts of its choices."""
        base = {name: reply[name] for name in ("id", "created", "model")} | {"object": kind}
        told = self.stream_options is not None and self.stream_options.include_usage
        events: list[tuple[str, Any]] = [
            ("", {**base, "choices": [part], **({"usage": None} if told else {})}) for part in parts
        ]
        if told:
            events.append(("", {**base, "choices": [], "usage": reply["usage"]}))
        return [*events, ("", "[DONE]")]


class ChatCompletion(_OpenAI):
    """`POST /v1/chat/completions`."""

    messages: list[wire.Names] = msgspec.field(default_factory=list)
    tools: list[wire.Names] | None = None
    tool_choice: str | wire.Names | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: wire.Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: wire.Names | None = None
    store: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    def call(self) -> Call:
        self.check_stream()
        wire.refuse(not self.messages, "messages", "expected at least one.")
        wire.refuse(self.parallel_tool_calls is False, "parallel_tool_calls", "a model cannot be kept from them here.")
        wire.refuse(self.top_logprobs, "top_logprobs", "those of sampled tokens alone are known; expected 0.")
        form = self.response_format or {"type": "text"}
        if form.get("type") == "json_schema":
            form = {"type": "json_schema", **wire.objects([form.get("json_schema")], "response_format.json_schema")[0]}
        tools = [_tool(tool) for tool in self.tools or ()]
        return Call(
            messages=[_message(message, f"messages[{i}]") for i, message in enumerate(self.messages)],
            tools=wire.choose(tools, self.tool_choice) or None,
            n=self.n or 1,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            stop=self.stops,
            schema=wire.schema(form, "response_format"),
        )

    def answered(self, prompt: Prompt, answers: Sequence[Answer], tokenizer: Any) -> wire.Names:
        choices = []
        for index, answer in enumerate(answers):
            message = {
                "role": "assistant",
                "content": answer.message["content"] or (None if answer.calls else ""),
                "refusal": None,
            }
            if reasoning := answer.message.get("reasoning_content"):
                message["reasoning_content"] = reasoning
            if answer.calls:
                message["tool_calls"] = [
                    {**call, "function": {**call["function"], "arguments": wire.written(call["function"]["arguments"])}}
                    for call in answer.calls
                ]
            finish = "tool_calls" if answer.calls else "length" if answer.cut else "stop"
            logprobs = {"content": wire.logprobs(answer, tokenizer), "refusal": None} if self.logprobs else None
            choices.append({"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish})
        return self._reply("chat.completion", "chatcmpl", prompt, answers, choices)

    def events(self, reply: wire.Names) -> list[tuple[str, Any]]:
        parts = []
        for choice in reply["choices"]:
            message = choice["message"]
            deltas: list[wire.Names] = [{"role": "assistant", "content": ""}]
            for name in ("reasoning_content", "content"):
                deltas += [{name: piece} for piece in wire.pieces(message.get(name) or "")]
            for index, call in enumerate(message.get("tool_calls") or ()):
                function = call["function"]
                deltas.append({"tool_calls": [{**call, "index": index, "function": {**function, "arguments": ""}}]})
                for piece in wire.pieces(function["arguments"]):
                    deltas.append({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
            made = [
                {"index": choice["index"], "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas
            ]
            made[0]["logprobs"] = choice["logprobs"]
            parts += [*made, {**made[0], "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}]
        return self._chunks(reply, "chat.completion.chunk", parts)


class Completion(_OpenAI):
    """`POST /v1/completions`."""

    prompt: str | list[Any] = ""
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: Literal[False] | None = None

    def call(self) -> Call:
        self.check_stream()
        prompt = self.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        good = isinstance(prompt, str) or all(type(token) is int and 0 <= token < 2**31 for token in prompt)
        wire.refuse(not good or not prompt, "prompt", "expected one text or one list of token ids, not empty.")
        wire.refuse((self.logprobs or 0) > 1, "logprobs", "those of sampled tokens alone are known; expected 0 or 1.")
        return Call(completion=prompt, n=self.n or 1, max_tokens=self.max_tokens, stop=self.stops)

    def answered(self, prompt: Prompt, answers: Sequence[Answer], tokenizer: Any) -> wire.Names:
        choices = []
        for index, answer in enumerate(answers):
            told: wire.Names | None = None
            if self.logprobs is not None:
                entries = wire.logprobs(answer, tokenizer)
                told = {
                    "tokens": [entry["token"] for entry in entries],
                    "token_logprobs": [entry["logprob"] for entry in entries],
                    "top_logprobs": None,
                    "text_offset": None,
                }
            finish = "length" if answer.cut else "stop"
            text = answer.message["content"]
            choices.append({"index": index, "text": text, "logprobs": told, "finish_reason": finish})
        return self._reply("text_completion", "cmpl", prompt, answers, choices)

    def events(self, reply: wire.Names) -> list[tuple[str, Any]]:
        parts = []
        for choice in reply["choices"]:
            made = [{**choice, "text": piece, "finish_reason": None} for piece in wire.pieces(choice["text"]) or [""]]
            parts += [
                *({**part, "logprobs": None} for part in made[:-1]),
                {**made[-1], "finish_reason": choice["finish_reason"]},
            ]
        return self._chunks(reply, "text_completion", parts)


def _tool(tool: wire.Names) -> wire.Names:
    given = tool.get("function")
    if tool.get("type") != "function" or not isinstance(given, dict):
        raise CallError(f"tools: expected functions, found one of type {tool.get('type')!r}.")
    return wire.function(given.get("name"), given.get("description"), given.get("parameters"))


def _message(message: wire.Names, where: str) -> wire.Names:
    role, text = message.get("role"), wire.text_of(message.get("content"), where)
    if role in ("system", "developer", "user"):
        return {"role": "user" if role == "user" else "system", "content": text}
    if role == "tool":
        return {"role": "tool", "tool_call_id": wire.told(message.get("tool_call_id"), where), "content": text}
    wire.refuse(role != "assistant", where, f"expected a role of system, user, assistant or tool, found {role!r:.80}.")
    given = wire.objects(message.get("tool_calls") or [], where)
    functions = wire.objects([call.get("function") for call in given], where)
    calls = [
        (call.get("id", ""), f.get("name", ""), f.get("arguments")) for call, f in zip(given, functions, strict=True)
    ]
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    return wire.assistant(text, wire.text_of(reasoning, where), calls, where)
