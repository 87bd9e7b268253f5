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
"""Values allowed in `include`. Reasoning is never encrypted, so the second one has no effect."""


class Responses(request_parsing.ApiRequest):
    """Request of `POST /v1/responses`. The session stores the response unless `store` is false."""

    previous_response_id: str | None = None
    input: str | list[request_parsing.Names] = ""
    instructions: str | None = None
    max_output_tokens: request_parsing.Count | None = None
    tools: list[request_parsing.Names] | None = None
    tool_choice: str | request_parsing.Names | None = None
    parallel_tool_calls: bool | None = None
    text: request_parsing.Names | None = None
    reasoning: request_parsing.Names | None = None
    store: bool | None = None
    include: list[str] | None = None
    truncation: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    def call(self) -> Call:
        request_parsing.refuse(not self.input, "input", "expected text or at least one item.")
        request_parsing.refuse(
            self.parallel_tool_calls is False,
            "parallel_tool_calls",
            "expected true; this endpoint cannot prevent parallel tool calls.",
        )
        form = request_parsing.objects([(self.text or {}).get("format") or {"type": "text"}], "text.format")[0]
        others = set(self.include or ()) - {LOGPROBS, ENCRYPTED}
        request_parsing.refuse(
            others, "include", f"expected {LOGPROBS} or {ENCRYPTED}, found {min(others, default='')!r:.80}."
        )
        request_parsing.refuse(
            self.truncation not in (None, "disabled"), "truncation", "expected disabled; prompts are never truncated."
        )
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        tools = [_tool(tool) for tool in self.tools or ()]
        return Call(
            _messages(items),
            self.instructions or "",
            self.previous_response_id or "",
            keep=self.store is not False,
            tools=request_parsing.offered_tools(tools, self.tool_choice) or None,
            max_tokens=self.max_output_tokens,
            schema=request_parsing.schema(form, "text.format"),
        )

    def answered(self, prompt: Prompt, answers: Sequence[GeneratedMessage], tokenizer: Any) -> request_parsing.Names:
        answer = answers[0]
        status = "incomplete" if answer.is_truncated else "completed"
        output: list[request_parsing.Names] = []
        if reasoning := answer.message.get("reasoning_content"):
            content = [{"type": "reasoning_text", "text": reasoning}]
            output.append({"type": "reasoning", "id": f"rs_{token_hex(12)}", "summary": [], "content": content})
        if answer.message["content"] or not answer.calls:
            part = {"type": "output_text", "text": answer.message["content"], "annotations": [], "logprobs": []}
            if LOGPROBS in (self.include or ()):
                part["logprobs"] = request_parsing.logprobs(answer, tokenizer)
            said = {"type": "message", "id": f"msg_{token_hex(12)}", "role": "assistant", "content": [part]}
            output.append({**said, "status": status})
        for call in answer.calls:
            name, arguments = call["function"]["name"], request_parsing.arguments_text(call["function"]["arguments"])
            called = {"type": "function_call", "id": f"fc_{token_hex(12)}", "call_id": call["id"], "name": name}
            output.append({**called, "arguments": arguments, "status": "completed"})
        before, after = request_parsing.usage(prompt, answers)
        return {
            "id": f"resp_{token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": self.model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if answer.is_truncated else None,
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
                "input_tokens": before,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": after,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": before + after,
            },
        }

    def events(self, reply: request_parsing.Names) -> list[tuple[str, Any]]:
        begun = {**reply, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        events: list[request_parsing.Names] = [
            {"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")
        ]
        for index, item in enumerate(reply["output"]):
            at = {"output_index": index, "item_id": item["id"]}
            empty: dict[str, request_parsing.Names] = {
                "message": {"content": []},
                "function_call": {"arguments": ""},
                "reasoning": {"content": []},
            }
            started = {**item, **empty[item["type"]], **({"status": "in_progress"} if "status" in item else {})}
            events.append({"type": "response.output_item.added", "output_index": index, "item": started})
            events += _call_events(item, at) if item["type"] == "function_call" else _part_events(item, at)
            events.append({"type": "response.output_item.done", "output_index": index, "item": item})
        events.append({"type": f"response.{reply['status']}", "response": reply})
        return [(event["type"], {**event, "sequence_number": number}) for number, event in enumerate(events)]


def _call_events(item: request_parsing.Names, at: request_parsing.Names) -> list[request_parsing.Names]:
    name = "response.function_call_arguments"
    deltas = [{"type": f"{name}.delta", **at, "delta": piece} for piece in request_parsing.pieces(item["arguments"])]
    return [*deltas, {"type": f"{name}.done", **at, "name": item["name"], "arguments": item["arguments"]}]


def _part_events(item: request_parsing.Names, at: request_parsing.Names) -> list[request_parsing.Names]:
    part, at = item["content"][0], {**at, "content_index": 0}
    name = "response.output_text" if item["type"] == "message" else "response.reasoning_text"
    more: request_parsing.Names = {"logprobs": []} if item["type"] == "message" else {}
    told = {key: part[key] for key in more}
    return [
        {"type": "response.content_part.added", **at, "part": {**part, "text": ""}},
        *({"type": f"{name}.delta", **at, "delta": piece, **more} for piece in request_parsing.pieces(part["text"])),
        {"type": f"{name}.done", **at, "text": part["text"], **told},
        {"type": "response.content_part.done", **at, "part": part},
    ]


def _tool(tool: request_parsing.Names) -> request_parsing.Names:
    if tool.get("type") != "function":
        raise CallError(f"tools: expected tools of type 'function', found type {tool.get('type')!r:.80}.")
    return request_parsing.function(tool.get("name"), tool.get("description"), tool.get("parameters"))


def _messages(items: list[request_parsing.Names]) -> list[request_parsing.Names]:
    """Convert items to messages for chat templates.

    Consecutive reasoning, text and tool calls of the assistant become one message.
    """
    made: list[request_parsing.Names] = []
    said: dict[str, Any] | None = None
    for number, item in enumerate(items):
        where, kind, role = f"input[{number}]", item.get("type", "message"), item.get("role")
        theirs = kind in ("reasoning", "function_call") or (kind == "message" and role == "assistant")
        if theirs:
            said = said or {"text": "", "reasoning": "", "calls": [], "where": where}
        elif said is not None:
            made.append(request_parsing.assistant(**said))
            said = None
        if kind == "message":
            text = request_parsing.text_of(item.get("content"), where)
            if said is not None:
                said["text"] += text
                continue
            known = role in ("user", "system", "developer")
            request_parsing.refuse(
                not known,
                where,
                f"expected the role user, system, developer or assistant, found {role!r:.80}.",
            )
            made.append({"role": "user" if role == "user" else "system", "content": text})
        elif kind == "function_call_output":
            output = request_parsing.text_of(item.get("output"), where)
            made.append(
                {
                    "role": "tool",
                    "tool_call_id": request_parsing.required_text(item.get("call_id"), where),
                    "content": output,
                }
            )
        elif said is not None and kind == "reasoning":
            said["reasoning"] += request_parsing.text_of(item.get("content"), where)
        elif said is not None:
            said["calls"].append((item.get("call_id", ""), item.get("name", ""), item.get("arguments")))
        else:
            raise CallError(
                f"{where}: expected an item of type message, reasoning, function_call or function_call_output, found "
                f"{kind!r:.80}."
            )
    return made if said is None else [*made, request_parsing.assistant(**said)]
