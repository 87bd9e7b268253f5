"""Schemas, checks and conversions that the request classes of all APIs share."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any

from msgspec import Meta, Struct

from rl_workflows.agents.conversation import Prompt
from rl_workflows.agents.endpoint.session import Call, CallError, GeneratedMessage

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
CompletionCount = Annotated[int, Meta(ge=1, le=128)]
Stop = Annotated[str, Meta(min_length=1, max_length=1024)]
Stops = Annotated[list[Stop], Meta(max_length=16)]
MetricName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_./-]{1,64}$")]
JsonObject = dict[str, Any]
"""JSON object whose entries are checked individually, not by a schema."""


Reward = Annotated[float, Meta(ge=-1e6, le=1e6)]


SAMPLING = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "seed")
"""Names of sampling parameters in the requests, which are also names in `GenerationConfig` and `ModelRequest`."""


class Rewards(Struct, forbid_unknown_fields=True):
    """Request of `POST /v1/rewards`: the reward of one completion if `call_id` is set, else of the episode."""

    reward: Reward | None = None
    call_id: str | None = None
    """`id` of the response that contained the completion."""
    index: Annotated[int, Meta(ge=0)] = 0
    """Index of the completion in that response."""
    metrics: dict[MetricName, Reward] = {}
    """Metrics of the episode by name, recorded as `agent/NAME`."""


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Options of an OpenAI stream. `include_obfuscation` has no effect: chunks are never padded."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class ApiRequest(Struct, forbid_unknown_fields=True):
    """Base class of the requests of all APIs.

    In the session of an episode, sampling parameters are accepted but have no effect: training must know the
    distribution of the samples, so the settings of the run apply. A subclass implements one API: `call` parses the
    request, `build_reply` builds the body of the response, and `events` converts it to a stream.
    """

    model: str = ""
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Fraction | None = None
    metadata: JsonObject | None = None
    user: str | None = None
    service_tier: str | None = None

    def call(self) -> Call:
        """Return the call that this request describes, without its `sampling`.

        Raises:
            CallError: the request is invalid, or requires a feature that this endpoint does not support.
        """
        raise NotImplementedError

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling parameters and seed of the request, by name."""
        values = ((name, getattr(self, name, None)) for name in SAMPLING)
        return {name: value for name, value in values if value is not None}

    def build_reply(self, prompt: Prompt, completions: Sequence[GeneratedMessage], tokenizer: Any) -> JsonObject:
        """Return the body of the response.

        Args:
            prompt: the prompt of the call.
            completions: the completions of the call, `Call.n` of them.
            tokenizer: Hugging Face tokenizer, for log-probs.
        """
        raise NotImplementedError

    def events(self, reply: JsonObject) -> list[tuple[str, Any]]:
        """Return the response as server-sent events: pairs of name, which may be empty, and data."""
        raise NotImplementedError


def reject_if(condition: object, name: str, why: str) -> None:
    """Reject the request if `condition` is true.

    Raises:
        CallError: `condition` is true. The message contains the field `name` and the reason `why`.
    """
    if condition:
        raise CallError(f"{name}: {why}")


def text_of(content: Any, where: str) -> str:
    """Return the text of a message's content, which is None, a string, or a list of text parts.

    Raises:
        CallError: the content is of another type, or a part is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    reject_if(
        not isinstance(content, list),
        where,
        f"expected a string or a list of text parts, found {type(content).__name__}.",
    )
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise CallError(f"{where}: expected text parts only, found a part of type {kind!r:.80}.")
        texts.append(text)
    return "".join(texts)


def content_of(content: Any, where: str) -> str | list[JsonObject]:
    """Return the content of a user or tool message: a text, or a list of text and image parts if it has images.

    An image is a part `image_url` (Chat Completions), `input_image` (Responses) or `image` (Messages).

    Raises:
        CallError: the content is of another type, a part is neither text nor an image, or an image is no data URL.
    """
    if not isinstance(content, list) or not any(map(_is_image, content)):
        return text_of(content, where)
    return [
        image_part(part, where) if _is_image(part) else {"type": "text", "text": text_of([part], where)}
        for part in content
    ]


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("image_url", "input_image", "image")


def image_part(part: JsonObject, where: str) -> JsonObject:
    """Return an image in the form that `rl_contracts.chat.image_messages` reads. It is not decoded yet.

    Raises:
        CallError: the image is no data URL in base64. This endpoint downloads nothing and opens no file.
    """
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, dict) else url
    if part["type"] == "image":
        source = part.get("source")
        is_data = isinstance(source, dict) and source.get("type") == "base64"
        url = f"data:{source.get('media_type')};base64,{source.get('data')}" if is_data else source  # type: ignore[union-attr]
    if not isinstance(url, str) or not url.startswith("data:"):
        raise CallError(f"{where}: expected base64 data in the part of type {part['type']!r}, found {url!r:.40}.")
    return {"type": "image_url", "image_url": {"url": url}}


def assistant(text: str, reasoning: str, calls: Sequence[tuple[str, str, Any]], where: str) -> JsonObject:
    """Return the message of an earlier completion in the form that chat templates expect.

    Args:
        text: text of the completion.
        reasoning: reasoning of the completion; empty for none.
        calls: id, name and arguments of each tool call; the arguments are a JSON object or its text.
        where: field name for error messages.

    Raises:
        CallError: the arguments are not an object, or a name or id is not a non-empty string.
    """
    message: JsonObject = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {
                "id": required_text(key, where),
                "type": "function",
                "function": {"name": required_text(name, where), "arguments": parsed_arguments},
            }
            for key, name, arguments in calls
            for parsed_arguments in [_arguments(arguments, where)]
        ]
    return message


def required_text(value: Any, where: str) -> str:
    """Return a value that must be a non-empty string.

    Raises:
        CallError: `value` is not a non-empty string.
    """
    reject_if(not isinstance(value, str) or not value, where, f"expected a non-empty string, found {value!r:.80}.")
    return str(value)


def _arguments(arguments: Any, where: str) -> JsonObject:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    reject_if(not isinstance(arguments, dict), where, "expected a JSON object as the arguments of a tool call.")
    return dict(arguments)


def function(name: Any, description: Any, parameters: Any) -> JsonObject:
    """Return a tool in the form that chat templates expect.

    Raises:
        CallError: the name, the description or the parameters are invalid.
    """
    reject_if(not isinstance(parameters or {}, dict), "tools", "expected a JSON schema object as the parameters.")
    name_and_description: JsonObject = {
        "name": required_text(name, "tools"),
        "description": text_of(description, "tools"),
    }
    return {
        "type": "function",
        "function": {**name_and_description, "parameters": parameters or {"type": "object", "properties": {}}},
    }


def require_objects(value: Any, where: str) -> list[JsonObject]:
    """Check that `value` is a list of JSON objects, and return a copy of the list.

    Raises:
        CallError: `value` is no list, or an item is no JSON object.
    """
    is_valid = isinstance(value, list) and all(isinstance(item, dict) for item in value)
    reject_if(not is_valid, where, "expected a JSON object, or a list of JSON objects, as the API defines.")
    return list(value)


def schema(form: JsonObject, name: str) -> JsonObject | None:
    """Return the JSON schema of a response format, or None for free text.

    Raises:
        CallError: the format is unknown, or its schema is not an object.
    """
    kind = form.get("type")
    reject_if(
        kind not in ("text", "json_object", "json_schema"),
        f"{name}.type",
        f"expected text, json_object or json_schema, found {kind!r:.80}.",
    )
    if kind != "json_schema":
        return {"type": "object"} if kind == "json_object" else None
    return require_objects([form.get("schema")], f"{name}.schema")[0]


def offered_tools(tools: list[JsonObject] | None, choice: Any, name: str = "tool_choice") -> list[JsonObject] | None:
    """Return the tools to list in the prompt, or None if `choice` is `none`.

    Raises:
        CallError: `choice` requires a tool call, which this endpoint cannot enforce.
    """
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    reject_if(
        kind not in (None, "auto", "none"),
        name,
        f"expected auto or none, found {kind!r}; this endpoint cannot force the model to call a tool.",
    )
    return None if kind == "none" else tools


def arguments_text(arguments: Mapping[str, Any]) -> str:
    """Return the arguments of a tool call as JSON text."""
    return json.dumps(arguments, ensure_ascii=False)


def logprobs(answer: GeneratedMessage, tokenizer: Any) -> list[JsonObject]:
    """Return one entry per sampled token, including the token that ended the completion."""
    entries = []
    for token, logprob in zip(answer.response.output_ids, answer.response.logprobs, strict=True):
        text = tokenizer.decode([token])
        encoded = token_bytes(tokenizer, token) if "\ufffd" in text else text.encode()
        entries.append({"token": text, "logprob": logprob, "bytes": list(encoded), "top_logprobs": []})
    return entries


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """Return the bytes of a token that contains only some bytes of a character.

    Byte-level vocabularies represent each byte by a character (GPT-2's table); SentencePiece writes `<0xE2>`.
    """
    name = tokenizer.convert_ids_to_tokens(token)
    if re.fullmatch(r"<0x[0-9A-F]{2}>", name):
        return bytes([int(name[3:5], 16)])
    table = _byte_table()
    is_byte_level = all(character in table for character in name)
    return bytes(table[character] for character in name) if is_byte_level else name.encode()


@cache
def _byte_table() -> dict[str, int]:
    """Return GPT-2's table of bytes by character. Printable bytes represent themselves, others start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(unprintable)}


def usage(prompt: Prompt, completions: Sequence[GeneratedMessage]) -> tuple[int, int]:
    """Return the number of tokens of the prompt, and of all completions together."""
    return len(prompt.ids), sum(len(completion.response.output_ids) for completion in completions)


def pieces(text: str, size: int = 64) -> list[str]:
    """Split a text into pieces of `size` characters for streaming."""
    return [text[start : start + size] for start in range(0, len(text), size)]
