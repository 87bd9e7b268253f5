"""Tool-call formats of model families: a parser for each, and detection of the format that a chat template renders.

A parser takes the text of a completion after its reasoning, and the tools of the request. It returns the text without
the calls, and the calls. A malformed call stays in the text, so that the agent sees it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from rl_contracts.chat.rendering import ChatRenderer
from rl_contracts.errors import DataError

Call = tuple[str, dict[str, Any]]
"""Name and arguments of a tool."""
Tools = Sequence[Any]
"""JSON schemas of the tools that the model may call."""

_BETWEEN = "; \t\r\n"
"""Characters between calls."""


def _hermes(text: str, tools: Tools) -> tuple[str, list[Call]]:
    """Parse `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5 and Qwen 3."""
    return _parse_tags(text, lambda body: _calls_only(_json_values(body)))


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?", re.DOTALL)


def _qwen3_coder(text: str, tools: Tools) -> tuple[str, list[Call]]:
    """Parse calls with XML parameters: Qwen3-Coder, Qwen 3.5 and later, Nemotron 3.

    The format is `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`, with line
    breaks between the elements.
    """

    def parse(body: str) -> list[Call]:
        function = _FUNCTION.fullmatch(body)
        if function is None:
            return []
        name, parameters = function.groups()
        return _call_with_arguments(name, parameters.split("</parameter>"), _PARAMETER, tools)

    return _parse_tags(text, parse)


_GLM_NAME = re.compile(r"\s*([\w.:/-]+)\s*")
_GLM_ARGUMENT = re.compile(r"\s*<arg_key>([^<\n]+)</arg_key>\s*<arg_value>(.*)", re.DOTALL)


def _glm45(text: str, tools: Tools) -> tuple[str, list[Call]]:
    """Parse calls with pairs of keys and values: GLM 4.5 and later.

    The format is `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>`, with line breaks
    between the elements.
    """

    def parse(body: str) -> list[Call]:
        prefix, tag, pairs = body.partition("<arg_key>")
        name = _GLM_NAME.fullmatch(prefix)
        return _call_with_arguments(name[1], (tag + pairs).split("</arg_value>"), _GLM_ARGUMENT, tools) if name else []

    return _parse_tags(text, parse)


def _mistral(text: str, tools: Tools) -> tuple[str, list[Call]]:
    """Parse calls of Mistral models.

    The format is `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]NAME[ARGS]{...}` per call.
    Some releases have `[CALL_ID]ID` after the name.
    """
    content, *segments = text.split("[TOOL_CALLS]")
    calls: list[Call] = []
    for segment in segments:
        name, args, body = segment.partition("[ARGS]")
        name = name.partition("[CALL_ID]")[0].strip()
        values = [{"name": name, "arguments": _json(body)}] if args else _json(segment)
        parsed = [call for call in map(parse_call, values) if call] if isinstance(values, list) else []
        if not parsed or len(parsed) < len(values):
            return text, []
        calls += parsed
    return content, calls


def _llama3(text: str, tools: Tools) -> tuple[str, list[Call]]:
    """Parse calls `{"name": ..., "parameters": {...}}`: Llama 3.1 to 3.3.

    The text is one call, a list of calls, or calls separated by semicolons. Calls of known tools may also be surrounded
    by other text.
    """
    stripped = text.strip().removeprefix("<|python_tag|>")
    parsed = _json(stripped)
    if only_calls := _calls_only(iter(parsed) if isinstance(parsed, list) else _json_values(stripped)):
        return "", only_calls
    rest, calls, done, start = "", list[Call](), 0, text.find("{")
    while start >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(text, start)
        except json.JSONDecodeError as error:
            start = text.find("{", max(error.pos, start + 1))
            continue
        except (ValueError, RecursionError):  # too many digits, or too deep
            break
        call = parse_call(value)
        if call and any(_function(tool).get("name") == call[0] for tool in tools):
            calls.append(call)
            rest += text[done:start].lstrip(_BETWEEN).removesuffix("<|python_tag|>")
            done = end
        start = text.find("{", end)
    return rest + (text[done:].lstrip(_BETWEEN) if calls else text), calls


_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
_MESSAGE_END = re.compile(r"(?:<\|call\|>|<\|end\|>)\s*$")


def _gpt_oss(text: str, tools: Tools) -> tuple[str, list[Call]]:
    """Parse calls of gpt-oss (harmony).

    The format is `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`. The recipient may
    also precede the channel.
    """
    rest, calls = "", list[Call]()
    for message in re.split(r"(?<=<\|call\|>)|(?<=<\|end\|>)", text):
        header, _, body = message.partition("<|message|>")
        recipient = _RECIPIENT.search(header)
        call = recipient and parse_call({"name": recipient[1], "arguments": _json(_MESSAGE_END.sub("", body))})
        calls += [call] if call else []
        rest += "" if call else message
    return rest, calls


FORMATS: dict[str, Callable[[str, Tools], tuple[str, list[Call]]] | None] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen3_coder,
    "glm45": _glm45,
    "mistral": _mistral,
    "llama3": _llama3,
    "gpt_oss": _gpt_oss,
    "transformers": None,
    "none": None,
}
"""Parsers by the name of their format. `transformers`: parsed with the tokenizer's `response_template`. `none`: the
model calls no tools."""

_QUESTION: Mapping[str, Any] = {"role": "user", "content": "sample-question"}
_ANSWER: Mapping[str, Any] = {"role": "assistant", "content": "sample-answer"}
_PROBE: Call = ("probe", {"probe-key": "probe-value"})
_CALLING: Mapping[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "probe0123", "type": "function", "function": {"name": _PROBE[0], "arguments": _PROBE[1]}},
    ],
}
_TOOL = {
    "type": "function",
    "function": {
        "name": _PROBE[0],
        "description": "A sample tool.",
        "parameters": {"type": "object", "properties": {"probe-key": {"type": "string", "description": "A value."}}},
    },
}
_END = re.compile(r"<\|\w+\|>\s*$")
"""Token that ends a turn with a call. Some templates end a turn with text by a different token."""


def detect_format(tokenizer: Any, split: Callable[[str], str]) -> str:
    """Return the format whose parser extracts a sample call from the text that the chat template renders.

    Args:
        tokenizer: a Hugging Face tokenizer, with or without a chat template.
        split: function that removes the reasoning from the text of a completion.

    Returns:
        a key of `FORMATS`; `none` if no parser matches the call.
    """
    if not getattr(tokenizer, "chat_template", None):
        return "none"
    renderer = ChatRenderer(tokenizer)
    try:
        with_text, with_call = (renderer.text([_QUESTION, turn], [_TOOL], False) for turn in (_ANSWER, _CALLING))
    except DataError:
        return "none"
    # The rendered text message shows where the assistant's turn begins and how it ends.
    with_text, with_call = (text.rpartition(_QUESTION["content"])[2] for text in (with_text, with_call))
    turn_end = with_text.rpartition(_ANSWER["content"])[2]
    start = next((at for at, pair in enumerate(zip(with_text, with_call, strict=False)) if len(set(pair)) > 1), 0)
    text = split(_END.sub("", with_call[start:].removesuffix(turn_end)))
    for name, parse in FORMATS.items():
        content, calls = parse(text, [_TOOL]) if parse else (text, [])
        if calls == [_PROBE] and not content.strip():
            return name
    return "none"


def _parse_tags(text: str, parse: Callable[[str], list[Call]]) -> tuple[str, list[Call]]:
    """Parse the text of each `<tool_call>` element with `parse`; return the remaining text and the calls."""
    calls: list[Call] = []
    rest = ""
    while True:
        before, opened, after = text.partition("<tool_call>")
        body, closed, following = after.partition("</tool_call>")
        rest += before
        if not (opened and closed):
            return rest + opened + body, calls
        parsed = parse(body)
        calls += parsed
        rest += "" if parsed else opened + body + closed
        text = following


def _call_with_arguments(name: str, segments: Sequence[str], pattern: re.Pattern[str], tools: Tools) -> list[Call]:
    """Return one call, or no call if an argument is malformed.

    Args:
        name: name of the tool.
        segments: text of the arguments, split at their closing tags. The last segment must be blank.
        pattern: matches one segment; its groups are the argument's name and value.
        tools: tools of the request.
    """
    *arguments, rest = segments
    matches = [match for argument in arguments if (match := pattern.fullmatch(argument))]
    if rest.strip() or len(matches) < len(arguments):
        return []
    schemas = _parameters(name, tools)
    return [(name, {match[1]: _parse_value(match[2], schemas.get(match[1])) for match in matches})]


def _parameters(name: str, tools: Tools) -> Mapping[str, Any]:
    """Return the JSON schemas of a tool's parameters by name; empty if the tool is unknown or a Python function."""
    for tool in tools:
        function = _function(tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties")
            return properties if isinstance(properties, Mapping) else {}
    return {}


def _function(tool: Any) -> Mapping[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    return function if isinstance(function, Mapping) else {}


_TYPES: Mapping[type, set[str]] = {
    dict: {"object"},
    list: {"array"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    type(None): {"null"},
}
_TYPE_KEYS = ("type", "anyOf", "oneOf")
_PYTHON = {"True": True, "False": False, "None": None}
"""Python literals that some templates render instead of JSON."""


def _parse_value(text: str, schema: Any) -> Any:
    """Return the value of an argument in a format without types.

    Return the text unchanged if it is not JSON, or if the schema allows strings but not the type of the JSON value.
    Otherwise return the JSON value.
    """
    value = _PYTHON[text] if text in _PYTHON else _json(text)
    if value is None and text not in ("null", "None"):
        return text
    allowed = _allowed_types(schema)
    return text if "string" in allowed and not allowed & _TYPES.get(type(value), set()) else value


def _allowed_types(schema: Any) -> set[str]:
    """Return the types that a JSON schema allows, including the types of its `enum` values; empty if it names none."""
    if not isinstance(schema, Mapping):
        return set()
    values = [*(schema.get("enum") or []), *([schema["const"]] if "const" in schema else [])]
    types, *choices = (entry if isinstance(entry := schema.get(key), list) else [entry] for key in _TYPE_KEYS)
    named = {name for name in types if isinstance(name, str)} | {"string" for value in values if isinstance(value, str)}
    return named.union(*map(_allowed_types, chain(*choices)), *(_TYPES.get(type(value), set()) for value in values))


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def parse_call(value: Any) -> Call | None:
    """Return name and arguments if a JSON value is a call, else None."""
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = _json(arguments)
    return (name, arguments) if isinstance(name, str) and name and isinstance(arguments, dict) else None


def _json_values(text: str) -> Iterator[Any]:
    """Yield JSON values separated by whitespace or semicolons. Yield None and stop at text that is not JSON."""
    decoder = json.JSONDecoder()
    text = text.strip()
    while text:
        try:
            value, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            yield None
            return
        yield value
        text = text[end:].lstrip(_BETWEEN)


def _calls_only(values: Iterator[Any]) -> list[Call]:
    """Return the calls if every value is a call, else no calls."""
    candidates = list(values)
    calls = [call for call in map(parse_call, candidates) if call]
    return calls if len(calls) == len(candidates) else []
