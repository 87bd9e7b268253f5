"""Text of a chat completion while it is generated."""

from __future__ import annotations

import asyncio
import time
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from rl_contracts.chat.reasoning import MARKS
from rl_workflows.agents.endpoint.chat import TEXTS, ChatCompletion
from rl_workflows.agents.endpoint.request_parsing import ApiRequest, JsonObject

if TYPE_CHECKING:
    from rl_contracts.chat.rendering import Message


def chat_stream(body: ApiRequest) -> ChatStream | None:
    """Return a `ChatStream` for a call whose text can be sent before its end, else None.

    Tool calls and log-probs belong to whole completions.
    """
    if isinstance(body, ChatCompletion) and body.stream and not (body.tools or body.logprobs):
        return ChatStream(body)
    return None


class ChatStream:
    """Text of unfinished completions of a streamed call, before the reply exists.

    The end of a text is held back, because it may be the beginning of a stop string or of a mark of reasoning.
    """

    def __init__(self, body: ChatCompletion) -> None:
        self._body = body
        self._head = {"id": f"chatcmpl-{token_hex(12)}", "created": int(time.time()), "model": body.model}
        self._sent: dict[int, dict[str, str]] = {}
        self.changed = asyncio.Event()
        """Set when `take` has events to return."""
        self._held_back = max(map(len, [*body.stops, *(mark for marks in MARKS for mark in marks)]))
        self._events: list[tuple[str, Any]] = []

    def update(self, index: int, message: Message) -> None:
        """Add events for the text that is new in an unfinished completion.

        Args:
            index: index of the completion.
            message: message parsed from its tokens so far.
        """
        grows = "content" if message["content"] else "reasoning_content"
        for name in TEXTS:
            text, before = message.get(name) or "", self._sent.get(index, {}).get(name, "")
            text = text[: -self._held_back] if name == grows else text
            if len(text) > len(before) and text.startswith(before):
                role = {} if index in self._sent else {"role": "assistant"}
                self._sent.setdefault(index, {})[name] = text
                delta = {**role, name: text[len(before) :]}
                choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
                self._events.append(("", {**self._head, "object": "chat.completion.chunk", "choices": [choice]}))
                self.changed.set()

    def take(self) -> list[tuple[str, Any]]:
        """Return the new events."""
        events, self._events = self._events, []
        self.changed.clear()
        return events

    def rest(self, reply: JsonObject) -> list[tuple[str, Any]]:
        """Return the events that complete the stream, given the whole reply."""
        return [*self.take(), *self._body.events({**reply, **self._head}, self._sent)]
