"""What the three chat APIs have in common: how requests are read, and messages made of them."""

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
Many = Annotated[int, Meta(ge=1, le=128)]
Stop = Annotated[str, Meta(min_length=1, max_length=1024)]
Stops = Annotated[list[Stop], Meta(max_length=16)]
MetricName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_./-]{1,64}$")]
Names = dict[str, Any]
"""An object whose entries are looked at one by one."""


Reward = Annotated[float, Meta(ge=-1e6, le=1e6)]


class Rewards(Struct, forbid_unknown_fields=True):
    """`POST /v1/rewards`: what one answer earned, where `call_id` names its reply; else the outcome of the episode."""

    reward: Reward | None = None
    call_id: str | None = None
    """The `id` of a reply."""
    index: Annotated[int, Meta(ge=0)] = 0
    """Which of its answers."""
    figures: dict[MetricName, Reward] = {}
    """Recorded as `agent/NAME`."""


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Of OpenAI's streams. Nothing here is padded, whatever is said of it."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class ApiRequest(Struct, forbid_unknown_fields=True):
    """A request. What it says of sampling is read and does not count: the run samples as it is trained.

    A subclass is one API: `call` says what is asked for, `answered` what the reply is, and `events` the same as a
    stream.
    """

    model: str = ""
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Fraction | None = None
    metadata: Names | None = None
    user: str | None = None
    service_tier: str | None = None

    def call(self) -> Call:
        """What is asked for.

        Raises:
            CallError: something that this endpoint has not.
        """
        raise NotImplementedError

    def answered(self, prompt: Prompt, answers: Sequence[GeneratedMessage], tokenizer: Any) -> Names:
        """The reply.

        Args:
            prompt: its tokens.
            answers: as many as were asked for.
            tokenizer: a Hugging Face tokenizer.
        """
        raise NotImplementedError

    def events(self, reply: Names) -> list[tuple[str, Any]]:
        """The reply as server-sent events: name, which may be empty, and data."""
        raise NotImplementedError


def refuse(condition: object, name: str, why: str) -> None:
    """Refuse a request where `condition` holds.

    Raises:
        CallError: names the field.
    """
    if condition:
        raise CallError(f"{name}: {why}")


def text_of(content: Any, where: str) -> str:
    """The text of a message's content: a string, none, or parts of text.

    Raises:
        CallError: it has parts that are no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    refuse(not isinstance(content, list), where, f"expected a text or a list of parts, found {type(content).__name__}.")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise CallError(f"{where}: expected parts of text, found one of type {kind!r:.80}.")
        texts.append(text)
    return "".join(texts)


def assistant(text: str, reasoning: str, calls: Sequence[tuple[str, str, Any]], where: str) -> Names:
    """The message of an earlier answer.

    Args:
        calls: (id, name, arguments) of each; arguments as an object or its text.

    Raises:
        CallError: arguments are no object, or a name or an id is no text.
    """
    message: Names = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {
                "id": required_text(key, where),
                "type": "function",
                "function": {"name": required_text(name, where), "arguments": read},
            }
            for key, name, arguments in calls
            for read in [_arguments(arguments, where)]
        ]
    return message


def required_text(value: Any, where: str) -> str:
    """A text that must be there.

    Raises:
        CallError: it is not.
    """
    refuse(not isinstance(value, str) or not value, where, f"expected a text that is not empty, found {value!r:.80}.")
    return str(value)


def _arguments(given: Any, where: str) -> Names:
    if isinstance(given, str):
        try:
            given = json.loads(given or "{}")
        except (ValueError, RecursionError):
            given = None
    refuse(not isinstance(given, dict), where, "expected arguments of a tool call that are a JSON object.")
    return dict(given)


def function(name: Any, description: Any, parameters: Any) -> Names:
    """A tool in the form that chat templates know."""
    refuse(not isinstance(parameters or {}, dict), "tools", "expected parameters that are a JSON schema.")
    described: Names = {"name": required_text(name, "tools"), "description": text_of(description, "tools")}
    return {
        "type": "function",
        "function": {**described, "parameters": parameters or {"type": "object", "properties": {}}},
    }


def objects(found: Any, where: str) -> list[Names]:
    """A list of JSON objects.

    Raises:
        CallError: it is something else.
    """
    good = isinstance(found, list) and all(isinstance(each, dict) for each in found)
    refuse(not good, where, "expected a list of objects.")
    return list(found)


def schema(form: Names, name: str) -> Names | None:
    """The JSON schema of a format of answers; None of free text.

    Raises:
        CallError: it is another one, or its schema is no object.
    """
    kind = form.get("type")
    refuse(
        kind not in ("text", "json_object", "json_schema"),
        f"{name}.type",
        f"expected text, json_object or json_schema, found {kind!r:.80}.",
    )
    if kind != "json_schema":
        return {"type": "object"} if kind == "json_object" else None
    return objects([form.get("schema")], f"{name}.schema")[0]


def offered_tools(tools: list[Names] | None, choice: Any, name: str = "tool_choice") -> list[Names] | None:
    """The tools that the model is shown.

    Raises:
        CallError: the model would have to be forced to call one.
    """
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    refuse(
        kind not in (None, "auto", "none"),
        name,
        f"found {kind!r}, and this endpoint forces no model to call a tool; expected auto or none.",
    )
    return None if kind == "none" else tools


def arguments_text(arguments: Mapping[str, Any]) -> str:
    """Arguments of a tool call as agents get them."""
    return json.dumps(arguments, ensure_ascii=False)


def logprobs(answer: GeneratedMessage, tokenizer: Any) -> list[Names]:
    """One entry per sampled token, the one that ended the answer included."""
    entries = []
    for token, logprob in zip(answer.response.output_ids, answer.response.logprobs, strict=True):
        text = tokenizer.decode([token])
        own = token_bytes(tokenizer, token) if "\ufffd" in text else text.encode()
        entries.append({"token": text, "logprob": logprob, "bytes": list(own), "top_logprobs": []})
    return entries


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """Return the bytes of a token that is a part of a character.

    Byte-level vocabularies write each byte as a character (GPT-2's table), SentencePiece writes `<0xE2>`.
    """
    name = tokenizer.convert_ids_to_tokens(token)
    if re.fullmatch(r"<0x[0-9A-F]{2}>", name):
        return bytes([int(name[3:5], 16)])
    table = _byte_table()
    known = all(character in table for character in name)
    return bytes(table[character] for character in name) if known else name.encode()


@cache
def _byte_table() -> dict[str, int]:
    """Bytes by the characters that stand for them: themselves where they can be printed, else from U+0100 on."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + index): byte for index, byte in enumerate(others)}


def usage(prompt: Prompt, answers: Sequence[GeneratedMessage]) -> tuple[int, int]:
    """Tokens of the prompt, and of all answers."""
    return len(prompt.ids), sum(len(answer.response.output_ids) for answer in answers)


def pieces(text: str, size: int = 64) -> list[str]:
    """A text in the parts in which it is streamed."""
    return [text[at : at + size] for at in range(0, len(text), size)]
