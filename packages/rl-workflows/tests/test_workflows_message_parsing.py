"""Parsing of completions into messages: tool calls, reasoning, stop strings, and malformed calls that stay text."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_contracts.chat.rendering import ChatRenderer
from rl_contracts.errors import ConfigError
from rl_contracts.testing import make_tiny_tokenizer
from rl_contracts.testing.chat_formats import TOOL_FORMATS, format_completion, make_chat_tokenizer
from rl_workflows.agents.message_parsing import MessageParser

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALLS = [{"name": "add", "arguments": {"a": 1, "b": [True, "</think>"]}}, {"name": "list", "arguments": {}}]
TYPED = {"text": '"a"\n5\n', "digits": "5", "number": 5, "flag": True, "list": [1, {"k": None}], "nothing": None}
_TYPES = {"text": "string", "digits": "string", "number": "integer", "flag": "boolean", "list": "array"}
TYPED_TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"properties": {k: {"type": t} for k, t in _TYPES.items()}}},
    }
]
QUESTION = {"role": "user", "content": "how much?"}
RESPONSE_TEMPLATE = {
    "version": 1,
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {"open": "say: ", "close": "\n"},
        "tool_calls": {"open": "call: ", "close": "\n", "repeats": True, "content": "json"},
    },
}


def _parser(name: str, **options: Any) -> MessageParser:
    tokenizer = make_chat_tokenizer(name)
    return MessageParser(tokenizer, stop_ids=ChatRenderer(tokenizer).stop_ids, **options)


def _parse(name: str, text: str, tools: Any = TOOLS, opening: str = "", stop: tuple[str, ...] = ()) -> dict[str, Any]:
    ids = ChatRenderer(make_chat_tokenizer(name)).encode(text)
    return _parser(name).message([1, 2], opening, ids, tools, stop)


def _functions(message: dict[str, Any]) -> list[Any]:
    return [call["function"] for call in message.get("tool_calls", [])]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_message_parallel_calls_of_each_family_are_parsed(name: str) -> None:
    message = _parse(name, format_completion(name, calls=CALLS))

    assert _functions(message) == CALLS
    assert message["content"] == ""
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_message_call_rendered_by_template_is_parsed_unchanged(name: str) -> None:
    renderer = ChatRenderer(make_chat_tokenizer(name))
    function = {"name": "add", "arguments": TYPED}
    turn = {"role": "assistant", "content": "", "tool_calls": [{"id": "abcdefghi", "function": function}]}

    _, _, rendered = renderer.text([QUESTION, turn], TYPED_TOOLS, False).rpartition(QUESTION["content"])
    message = _parse(name, rendered, TYPED_TOOLS)

    assert _functions(message) == [function]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, '"5"', '"5"'),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5", 5),
        ({"enum": ["5", "6"]}, "5", "5"),
        ({"const": "5"}, "5", "5"),
        ({"enum": [5, "auto"]}, "5", 5),
        ({}, "5", 5),
        ({}, "five\n", "five\n"),
        ({}, "None", None),
        ({"type": [5, {}], "anyOf": "string", "oneOf": [5]}, "5", 5),
    ],
)
def test_message_values_without_types_follow_schema(schema: Any, text: str, value: Any) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": schema}}}}]
    parameter = f"<parameter=a>\n{text}\n</parameter>"

    qwen3_message = _parse("qwen3_coder", f"<tool_call>\n<function=add>\n{parameter}\n</function>\n</tool_call>", tools)
    glm45_message = _parse(
        "glm45", f"<tool_call>add<arg_key>a</arg_key><arg_value>{text}</arg_value></tool_call>", tools
    )

    assert _functions(qwen3_message) == _functions(glm45_message) == [{"name": "add", "arguments": {"a": value}}]


@given(
    name=st.sampled_from(TOOL_FORMATS),
    fragments=st.lists(
        st.sampled_from(
            [
                *("<tool_call>", "</tool_call>", "<function=add>", "</function>", "<parameter=a>", "</parameter>"),
                *("<arg_key>a</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "<|message|>"),
                *(" to=functions.add", "<|call|>", '{"name": "add", "parameters": {}}', "{", "add", "\n"),
            ]
        )
    ),
)
def test_message_random_tags_without_call_keep_all_text(name: str, fragments: list[str]) -> None:
    text = "".join(fragments)
    message = _parser(name).message([], "", make_chat_tokenizer(name).encode(text, add_special_tokens=False), TOOLS)

    if "tool_calls" not in message:
        stop = "<|call|>" if name == "gpt_oss" else ""
        assert message["content"].strip() in (text.strip(), text.removesuffix(stop).strip())


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_message_without_tools_in_request_is_text(name: str) -> None:
    message = _parse(name, format_completion(name, calls=CALLS), tools=None)

    assert "tool_calls" not in message
    assert "add" in message["content"]


@given(text=st.text(max_size=40), name=st.sampled_from(TOOL_FORMATS))
def test_message_text_without_tags_is_unchanged(text: str, name: str) -> None:
    parser = _parser(name)
    ids = ChatRenderer(make_chat_tokenizer(name)).encode(text)

    assert parser.message([], "", ids, TOOLS)["content"] == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3", '<tool_call>\n{"name": "add", "arguments": \n</tool_call>'),
        ("qwen3", '<tool_call>{"name": "add", "arguments": {}}'),
        ("qwen3", '<tool_call>{"name": 1, "arguments": {}}</tool_call>'),
        ("qwen3", "<tool_call></tool_call>"),
        ("qwen3", "<tool_call>" + "[" * 100_000 + "</tool_call>"),
        ("llama3", 'so {"name": "add"}'),
        ("llama3", '{"all": [{"name": "add", "parameters": {}}]} and {'),
        ("llama3", '{"a":' * 20_000),
        ("llama3", f'{{"a": {"1" * 5000}}}'),
        ("llama3", "12"),
        ("mistral", '[TOOL_CALLS]{"name": "add", "arguments": {}}'),
        ("mistral", '[TOOL_CALLS][{"name": "add"}]'),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", "[TOOL_CALLS]add[ARGS]{"),
        ("qwen3_coder", '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>1</function></tool_call>"),
        ("qwen3_coder", "<tool_call><function=add>so<parameter=a>1</parameter></function></tool_call>"),
        ("glm45", '<tool_call>{"name": "add", "arguments": {}}</tool_call>'),
        ("glm45", "<tool_call>add<arg_key>a</arg_key><arg_value>1</tool_call>"),
        ("glm45", "<tool_call>add<arg_value>1</arg_value></tool_call>"),
        ("gpt_oss", "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{<|call|>"),
    ],
)
def test_message_malformed_calls_stay_text(name: str, text: str) -> None:
    message = _parse(name, text)

    assert "tool_calls" not in message
    assert message["content"] == text


def test_message_valid_call_among_text_and_malformed_call_is_parsed() -> None:
    message = _parse(
        "qwen3", 'first\n<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>\n<tool_call>x</tool_call>'
    )

    assert _functions(message) == [{"name": "add", "arguments": {"a": 1}}]
    assert message["content"] == "first\n\n<tool_call>x</tool_call>"


def test_message_llama3_calls_among_text_are_parsed() -> None:
    message = _parse(
        "llama3", 'so\n<|python_tag|>{"name": "add", "parameters": {"a": {}}}; {"name": "add", "parameters": {}} {}'
    )

    assert _functions(message) == [{"name": "add", "arguments": {"a": {}}}, {"name": "add", "arguments": {}}]
    assert message["content"] == "so\n{}"


def test_message_llama3_json_of_unknown_tool_is_text() -> None:
    text = 'An example: {"name": "Bob", "parameters": {"age": 5}}'

    assert _parse("llama3", text)["content"] == text


def test_message_llama3_list_of_calls_is_parsed() -> None:
    message = _parse("llama3", '[{"name": "add", "parameters": {"a": 1}}]')

    assert _functions(message) == [{"name": "add", "arguments": {"a": 1}}]
    assert message["content"] == ""


def test_message_gpt_oss_reasoning_before_call_is_parsed() -> None:
    message = _parse(
        "gpt_oss", format_completion("gpt_oss", "hm, to=functions.none", CALLS[:1]), opening="<|start|>assistant"
    )

    assert _functions(message) == CALLS[:1]
    assert (message["reasoning_content"], message["content"]) == ("hm, to=functions.none", "")


@pytest.mark.parametrize("call_id", ["", "[CALL_ID]probe0123"])
def test_message_mistral_args_format_after_text_is_parsed(call_id: str) -> None:
    message = _parse("mistral", f'so[TOOL_CALLS]add{call_id}[ARGS]{{"a": 1}}[TOOL_CALLS]list{call_id}[ARGS]{{}}')

    assert _functions(message) == [{"name": "add", "arguments": {"a": 1}}, {"name": "list", "arguments": {}}]
    assert message["content"] == "so"


@pytest.mark.parametrize(
    ("text", "opening", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nit is", "", "hm", "it is"),
        ("hm\n</think>\n\nit is", "<|im_start|>assistant\n<think>\n", "hm", "it is"),
        ("<think>\n\n</think>\n\nit is", "", None, "it is"),
    ],
)
def test_message_reasoning_is_separated(text: str, opening: str, reasoning: str | None, content: str) -> None:
    message = _parse("qwen3", text + "<|im_end|>", opening=opening)

    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


def test_message_stop_string_ends_text_unless_stop_token_did() -> None:
    assert _parse("llama3", "it is 12\n", stop=("\n", "12"))["content"] == "it is "
    assert _parse("llama3", "it is 12\n<|eot_id|>", stop=("\n",))["content"] == "it is 12\n"


def test_message_call_ids_depend_on_prompt_and_completion() -> None:
    parser, renderer = _parser("qwen3"), ChatRenderer(make_chat_tokenizer("qwen3"))
    ids = renderer.encode(format_completion("qwen3", calls=CALLS))

    first, again, other = (parser.message(prompt, "", ids, TOOLS) for prompt in ([1], [1], [2]))

    assert first == again
    assert json.dumps(first) != json.dumps(other)


def test_parser_tokenizer_with_response_template_uses_transformers() -> None:
    tokenizer = copy.copy(make_chat_tokenizer("qwen3"))
    tokenizer.response_template = RESPONSE_TEMPLATE
    parser = MessageParser(tokenizer)
    call = json.dumps({"name": "add", "arguments": {"a": 1}})

    message = parser.message([], "", tokenizer.encode(f"say: so\ncall: {call}\ncall: {call}\n"), TOOLS)

    assert parser.form == "transformers"
    assert message["content"] == "so"
    assert _functions(message) == [{"name": "add", "arguments": {"a": 1}}] * 2
    malformed = "say: so\ncall: {\n"
    assert parser.message([], "", tokenizer.encode(malformed), TOOLS)["content"] == malformed


@pytest.mark.parametrize(
    "call",
    [
        '<tool_call>{"tool": "{{ call.name }}", "values": {{ call.arguments | tojson }}}</tool_call>',
        '<tool_call>{"name": "{{ call.name }}", "arguments": {}}</tool_call>',
        '<|tool_call|>[{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}]<|/tool_call|>',
        "{{ call.arguments.missing.key }}",
    ],
)
def test_parser_unknown_format_reads_no_tools(call: str) -> None:
    tokenizer = copy.copy(make_chat_tokenizer("qwen3"))
    _, end, rest = tokenizer.chat_template.partition("{% endmacro %}")
    tokenizer.chat_template = "{%- macro called(call) %}" + call + end + rest

    parser = MessageParser(tokenizer)

    assert (parser.form, parser.reads_tools) == ("none", False)


def test_parser_form_of_each_trl_template() -> None:
    trl = importlib.util.find_spec("trl")
    if trl is None:
        pytest.skip("trl is not installed")
    forms = dict[str, set[str]]()
    for path in (Path(str(trl.origin)).parent / "chat_templates").glob("*.jinja"):
        tokenizer = copy.copy(make_chat_tokenizer("qwen3"))
        tokenizer.chat_template = path.read_text()
        forms.setdefault(MessageParser(tokenizer).form, set()).add(path.stem.removesuffix("_training"))

    del forms["none"]
    assert forms == {
        "hermes": {"qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"},
        "llama3": {"llama3_1", "llama3_2"},
        "qwen3_coder": {
            *("qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8"),
            *("nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"),
        },
        "glm45": {"glm4moe"},
        "gpt_oss": {"gptoss"},
    }


def test_parser_unknown_or_unsupported_form_raises() -> None:
    with pytest.raises(ConfigError, match=r"endpoint.tool_calls"):
        MessageParser(make_tiny_tokenizer(), "hermse")
    with pytest.raises(ConfigError, match="no `response_template`"):
        MessageParser(make_tiny_tokenizer(), "transformers")
    assert not MessageParser(make_tiny_tokenizer()).reads_tools


@pytest.mark.parametrize(("special", "expected"), [(True, "It is 5."), (False, "It is<|extra|> 5.")])
def test_final_text_reasoning_and_special_tokens_are_removed(special: bool, expected: str) -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>", "<|extra|>"], special_tokens=special)
    parser = MessageParser(tokenizer, stop_ids=ChatRenderer(tokenizer).stop_ids)
    ids = tokenizer.encode("so 7</think>It is<|extra|> 5.<|im_end|>", add_special_tokens=False)

    assert parser.final_text(ids, "<think>\n") == expected
    assert parser.final_text(ids[:4], "<think>\n") == ""


def test_final_text_with_response_template_is_content() -> None:
    tokenizer = make_tiny_tokenizer()
    fields = {"content": {"open": "say: ", "close": "\n"}, "reasoning_content": {"open": "muse: ", "close": "\n"}}
    tokenizer.response_template = {**RESPONSE_TEMPLATE, "fields": fields}
    ids = tokenizer.encode("muse: 7\nsay: It is 5.\n", add_special_tokens=False)

    assert MessageParser(tokenizer).final_text(ids, "") == "It is 5."


def test_final_text_response_template_empty_reasoning_is_content() -> None:
    tokenizer = make_tiny_tokenizer()
    thought = {"open": "<think>\n", "close": "</think>\n\n"}
    fields = {"reasoning_content": thought, "content": {"close": "<|im_end|>"}}
    tokenizer.response_template = {**RESPONSE_TEMPLATE, "fields": fields}
    ids = tokenizer.encode("\n</think>\n\nIt is 5.", add_special_tokens=False)

    assert MessageParser(tokenizer).final_text(ids, "<|im_start|>assistant\n<think>\n") == "It is 5."
