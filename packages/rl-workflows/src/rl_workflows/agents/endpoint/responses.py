"""OpenAI's Responses API."""

from __future__ import annotations

import time
from collections.abc import Sequence
from secrets import token_hex
from typing import Any

from rl_workflows.agents.conversation import Prompt
from rl_workflows.agents.endpoint import request_parsing
from rl_workflows.agents.endpoint.session import Call, CallError, GeneratedMessage

LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
"""Values allowed in `include`. Reasoning is never encrypted, so `ENCRYPTED` has no effect."""


class Responses(request_parsing.ApiRequest):
    """Request of `POST /v1/responses`. The session stores the response unless `store` is false."""

    previous_response_id: str | None = None
    input: str | list[request_parsing.JsonObject] = ""
    instructions: str | None = None
    max_output_tokens: request_parsing.Count | None = None
    tools: list[request_parsing.JsonObject] | None = None
    tool_choice: str | request_parsing.JsonObject | None = None
    parallel_tool_calls: bool | None = None
    text: request_parsing.JsonObject | None = None
    reasoning: request_parsing.JsonObject | None = None
    store: bool | None = None
    include: list[str] | None = None
    truncation: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    def call(self) -> Call:
        request_parsing.reject_if(not self.input, "input", "expected text or at least one item.")
        request_parsing.reject_if(
            self.parallel_tool_calls is False,
            "parallel_tool_calls",
            "expected true; this endpoint cannot prevent parallel tool calls.",
        )
        text_format = request_parsing.require_objects(
            [(self.text or {}).get("format") or {"type": "text"}], "text.format"
        )[0]
        unsupported = set(self.include or ()) - {LOGPROBS, ENCRYPTED}
        request_parsing.reject_if(
            unsupported, "include", f"expected {LOGPROBS} or {ENCRYPTED}, found {min(unsupported, default='')!r:.80}."
        )
        request_parsing.reject_if(
            self.truncation not in (None, "disabled"), "truncation", "expected disabled; prompts are never truncated."
        )
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        tools = [_tool(tool) for tool in self.tools or ()]
        return Call(
            _template_messages(items),
            self.instructions or "",
            self.previous_response_id or "",
            store=self.store is not False,
            tools=request_parsing.offered_tools(tools, self.tool_choice) or None,
            max_tokens=self.max_output_tokens,
            schema=request_parsing.schema(text_format, "text.format"),
        )

    def build_reply(
        self, prompt: Prompt, completions: Sequence[GeneratedMessage], tokenizer: Any
    ) -> request_parsing.JsonObject:
        completion = completions[0]
        status = "incomplete" if completion.is_truncated else "completed"
        output: list[request_parsing.JsonObject] = []
        if reasoning := completion.message.get("reasoning_content"):
            content = [{"type": "reasoning_text", "text": reasoning}]
            output.append({"type": "reasoning", "id": f"rs_{token_hex(12)}", "summary": [], "content": content})
        if completion.message["content"] or not completion.calls:
            part = {"type": "output_text", "text": completion.message["content"], "annotations": [], "logprobs": []}
            if LOGPROBS in (self.include or ()):
                part["logprobs"] = request_parsing.logprobs(completion, tokenizer)
            message = {"type": "message", "id": f"msg_{token_hex(12)}", "role": "assistant", "content": [part]}
            output.append({**message, "status": status})
        for call in completion.calls:
            name, arguments = call["function"]["name"], request_parsing.arguments_text(call["function"]["arguments"])
            tool_call = {"type": "function_call", "id": f"fc_{token_hex(12)}", "call_id": call["id"], "name": name}
            output.append({**tool_call, "arguments": arguments, "status": "completed"})
        prompt_tokens, completion_tokens = request_parsing.usage(prompt, completions)
        return {
            "id": f"resp_{token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": self.model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if completion.is_truncated else None,
            "instructions": self.instructions,
            "previous_response_id": self.previous_response_id,
            "metadata": self.metadata or {},
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": self.tools or [],
            "temperature": None,
            "top_p": None,
            "usage": {
                "input_tokens": prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt_tokens + completion_tokens,
            },
        }

    def events(self, reply: request_parsing.JsonObject) -> list[tuple[str, Any]]:
        in_progress = {**reply, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        events: list[request_parsing.JsonObject] = [
            {"type": f"response.{name}", "response": in_progress} for name in ("created", "in_progress")
        ]
        for index, item in enumerate(reply["output"]):
            position = {"output_index": index, "item_id": item["id"]}
            empty: dict[str, request_parsing.JsonObject] = {
                "message": {"content": []},
                "function_call": {"arguments": ""},
                "reasoning": {"content": []},
            }
            started = {**item, **empty[item["type"]], **({"status": "in_progress"} if "status" in item else {})}
            events.append({"type": "response.output_item.added", "output_index": index, "item": started})
            events += _call_events(item, position) if item["type"] == "function_call" else _part_events(item, position)
            events.append({"type": "response.output_item.done", "output_index": index, "item": item})
        events.append({"type": f"response.{reply['status']}", "response": reply})
        return [(event["type"], {**event, "sequence_number": number}) for number, event in enumerate(events)]


def _call_events(
    item: request_parsing.JsonObject, position: request_parsing.JsonObject
) -> list[request_parsing.JsonObject]:
    name = "response.function_call_arguments"
    deltas = [
        {"type": f"{name}.delta", **position, "delta": piece} for piece in request_parsing.pieces(item["arguments"])
    ]
    return [*deltas, {"type": f"{name}.done", **position, "name": item["name"], "arguments": item["arguments"]}]


def _part_events(
    item: request_parsing.JsonObject, position: request_parsing.JsonObject
) -> list[request_parsing.JsonObject]:
    part, position = item["content"][0], {**position, "content_index": 0}
    name = "response.output_text" if item["type"] == "message" else "response.reasoning_text"
    empty_logprobs: request_parsing.JsonObject = {"logprobs": []} if item["type"] == "message" else {}
    logprobs = {key: part[key] for key in empty_logprobs}
    return [
        {"type": "response.content_part.added", **position, "part": {**part, "text": ""}},
        *(
            {"type": f"{name}.delta", **position, "delta": piece, **empty_logprobs}
            for piece in request_parsing.pieces(part["text"])
        ),
        {"type": f"{name}.done", **position, "text": part["text"], **logprobs},
        {"type": "response.content_part.done", **position, "part": part},
    ]


def _tool(tool: request_parsing.JsonObject) -> request_parsing.JsonObject:
    if tool.get("type") != "function":
        raise CallError(f"tools: expected tools of type 'function', found type {tool.get('type')!r:.80}.")
    return request_parsing.function(tool.get("name"), tool.get("description"), tool.get("parameters"))


def _template_messages(items: list[request_parsing.JsonObject]) -> list[request_parsing.JsonObject]:
    """Convert items to messages for chat templates.

    Consecutive reasoning, text and tool calls of the assistant become one message.
    """
    messages: list[request_parsing.JsonObject] = []
    assistant: dict[str, Any] | None = None
    for number, item in enumerate(items):
        where, kind, role = f"input[{number}]", item.get("type", "message"), item.get("role")
        is_assistant = kind in ("reasoning", "function_call") or (kind == "message" and role == "assistant")
        if is_assistant:
            assistant = assistant or {"text": "", "reasoning": "", "calls": [], "where": where}
        elif assistant is not None:
            messages.append(request_parsing.assistant(**assistant))
            assistant = None
        if kind == "message":
            if assistant is not None:
                assistant["text"] += request_parsing.text_of(item.get("content"), where)
                continue
            is_supported = role in ("user", "system", "developer")
            request_parsing.reject_if(
                not is_supported,
                where,
                f"expected the role user, system, developer or assistant, found {role!r:.80}.",
            )
            content_of = request_parsing.content_of if role == "user" else request_parsing.text_of
            content = content_of(item.get("content"), where)
            messages.append({"role": "user" if role == "user" else "system", "content": content})
        elif kind == "function_call_output":
            output = request_parsing.content_of(item.get("output"), where)
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": request_parsing.required_text(item.get("call_id"), where),
                    "content": output,
                }
            )
        elif assistant is not None and kind == "reasoning":
            assistant["reasoning"] += request_parsing.text_of(item.get("content"), where)
        elif assistant is not None:
            assistant["calls"].append((item.get("call_id", ""), item.get("name", ""), item.get("arguments")))
        else:
            raise CallError(
                f"{where}: expected an item of type message, reasoning, function_call or function_call_output, found "
                f"{kind!r:.80}."
            )
    return messages if assistant is None else [*messages, request_parsing.assistant(**assistant)]
