"""Anthropic's Messages API."""

from __future__ import annotations

import json
from collections.abc import Sequence
from secrets import token_hex
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from rl_workflows.agents.conversation import Prompt
from rl_workflows.agents.endpoint import request_parsing
from rl_workflows.agents.endpoint.session import Call, CallError, GeneratedMessage


class Messages(request_parsing.ApiRequest):
    """Request of `POST /v1/messages` and `/v1/messages/count_tokens`."""

    messages: list[request_parsing.JsonObject] = msgspec.field(default_factory=list)
    max_tokens: request_parsing.Count | None = None
    system: str | list[request_parsing.JsonObject] | None = None
    tools: list[request_parsing.JsonObject] | None = None
    tool_choice: request_parsing.JsonObject | None = None
    stop_sequences: request_parsing.Stops | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    thinking: request_parsing.JsonObject | None = None
    cache_control: request_parsing.JsonObject | None = None

    def call(self) -> Call:
        request_parsing.reject_if(not self.messages, "messages", "expected at least one message.")
        no_parallel_calls = (self.tool_choice or {}).get("disable_parallel_tool_use") is True
        request_parsing.reject_if(
            no_parallel_calls,
            "tool_choice.disable_parallel_tool_use",
            "expected false; this endpoint cannot prevent parallel tool calls.",
        )
        request_parsing.reject_if(
            self.messages[-1].get("role") != "user", "messages", "expected a last message with the role user."
        )
        messages = [
            template_message
            for i, message in enumerate(self.messages)
            for template_message in _template_messages(message, f"messages[{i}]")
        ]
        tools = [_tool(tool) for tool in self.tools or ()]
        return Call(
            messages=messages,
            system=request_parsing.text_of(self.system, "system"),
            tools=request_parsing.offered_tools(tools, self.tool_choice) or None,
            max_tokens=self.max_tokens,
            stop=self.stop_sequences or (),
        )

    def build_reply(
        self, prompt: Prompt, completions: Sequence[GeneratedMessage], tokenizer: Any
    ) -> request_parsing.JsonObject:
        completion = completions[0]
        content: list[request_parsing.JsonObject] = []
        if reasoning := completion.message.get("reasoning_content"):
            content.append({"type": "thinking", "thinking": reasoning, "signature": ""})
        if completion.message["content"] or not completion.calls:
            content.append({"type": "text", "text": completion.message["content"]})
        for call in completion.calls:
            function = call["function"]
            content.append(
                {"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]}
            )
        text_stop_reason = (
            "stop_sequence" if completion.stop else "max_tokens" if completion.is_truncated else "end_turn"
        )
        prompt_tokens, completion_tokens = request_parsing.usage(prompt, completions)
        return {
            "id": f"msg_{token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": "tool_use" if completion.calls else text_stop_reason,
            "stop_sequence": completion.stop,
            "usage": {"input_tokens": prompt_tokens, "output_tokens": completion_tokens},
        }

    def events(self, reply: request_parsing.JsonObject) -> list[tuple[str, Any]]:
        usage = reply["usage"]
        empty = {
            **reply,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**usage, "output_tokens": 0},
        }
        events: list[request_parsing.JsonObject] = [{"type": "message_start", "message": empty}]
        for index, block in enumerate(reply["content"]):
            kind = block["type"]
            streamed: dict[str, tuple[request_parsing.JsonObject, str, str, Any]] = {
                "text": ({"text": ""}, "text_delta", "text", block.get("text")),
                "thinking": ({"thinking": ""}, "thinking_delta", "thinking", block.get("thinking")),
                "tool_use": (
                    {"input": {}},
                    "input_json_delta",
                    "partial_json",
                    request_parsing.arguments_text(block.get("input") or {}),
                ),
            }
            empty_fields, delta_type, key, text = streamed[kind]
            events.append({"type": "content_block_start", "index": index, "content_block": {**block, **empty_fields}})
            for piece in request_parsing.pieces(text):
                events.append(
                    {"type": "content_block_delta", "index": index, "delta": {"type": delta_type, key: piece}}
                )
            events.append({"type": "content_block_stop", "index": index})
        end = {"stop_reason": reply["stop_reason"], "stop_sequence": reply["stop_sequence"]}
        events += [{"type": "message_delta", "delta": end, "usage": usage}, {"type": "message_stop"}]
        return [(event["type"], event) for event in events]


def _tool(tool: request_parsing.JsonObject) -> request_parsing.JsonObject:
    if tool.get("type", "custom") != "custom":
        raise CallError(
            f"tools: expected tools of type 'custom', found {tool.get('type')!r}; describe the tool by `name`, "
            "`description` and `input_schema`."
        )
    return request_parsing.function(tool.get("name"), tool.get("description"), tool.get("input_schema"))


def _template_messages(message: request_parsing.JsonObject, where: str) -> list[request_parsing.JsonObject]:
    """Convert one message to the form that chat templates expect. Each tool result becomes a separate message."""
    role, content = message.get("role"), message.get("content")
    request_parsing.reject_if(
        role not in ("user", "assistant"), where, f"expected the role user or assistant, found {role!r:.80}."
    )
    blocks = (
        [{"type": "text", "text": content}]
        if isinstance(content, str)
        else request_parsing.require_objects(content, where)
    )
    messages: list[request_parsing.JsonObject] = []
    parts: list[request_parsing.JsonObject] = []
    calls, reasoning = [], ""
    for block in blocks:
        kind = block.get("type")
        if kind == "text" or (kind == "image" and role == "user"):
            parts.append(block)
        elif kind == "thinking" and role == "assistant":
            reasoning += request_parsing.text_of(block.get("thinking"), where)
        elif kind == "tool_use" and role == "assistant":
            calls.append((block.get("id", ""), block.get("name", ""), block.get("input")))
        elif kind == "tool_result" and role == "user":
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": request_parsing.required_text(block.get("tool_use_id"), where),
                    "content": request_parsing.content_of(block.get("content"), where),
                }
            )
        else:
            raise CallError(
                f"{where}: this endpoint does not support blocks of type {kind!r:.80} in {role} messages; expected "
                "text, image or tool_result from the user, and text, thinking or tool_use from the assistant."
            )
    if role == "assistant":
        return [request_parsing.assistant(request_parsing.text_of(parts, where), reasoning, calls, where)]
    content = request_parsing.content_of(parts, where)
    if content or not messages:
        messages.append({"role": "user", "content": content})
    return messages


def error(status: int, message: str) -> str:
    """Return the body of an error in Anthropic's format."""
    kinds = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}
    kinds |= {413: "request_too_large", 429: "rate_limit_error"}
    kind = kinds.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return json.dumps({"type": "error", "error": {"type": kind, "message": message}})
