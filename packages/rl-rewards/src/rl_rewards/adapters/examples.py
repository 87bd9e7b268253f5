"""Conversions of prompts, completions and reward values that all adapters share."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rl_contracts.reward import RESERVED_KEYS

type Messages = str | Sequence[Any]
"""A plain text, or messages: dictionaries or objects with `role` and `content`."""


def prompt_text(prompt: Messages) -> str:
    """Return a prompt as text, with the messages separated by blank lines."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(text for message in prompt if (text := _content(message)))


def completion_text(completion: Messages) -> str:
    """Return a completion as text: the last message of the model, or an empty string if there is none."""
    if isinstance(completion, str):
        return completion
    replies = [message for message in completion if _field(message, "role") == "assistant"]
    return _content(replies[-1]) if replies else ""


def example_of(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that a reward function accepts as the example."""
    return {name: value for name, value in columns.items() if name not in RESERVED_KEYS}


def convert[T](value: Any, parse: Callable[[Any], T]) -> T | Awaitable[T]:
    """Return `parse(value)`, or an awaitable of it if the value must be awaited."""

    async def wait() -> T:
        return parse(await value)

    return wait() if inspect.isawaitable(value) else parse(value)


def name_of(reward: Callable[..., Any]) -> str:
    """Return the name of a function, or of the class of a callable object."""
    return str(getattr(reward, "__name__", type(reward).__name__))


def _content(message: Any) -> str:
    """Return the text of a message, without its images."""
    content = _field(message, "content")
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(text for part in content if isinstance(text := _field(part, "text"), str))


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
