"""What models write becomes the message that an agent is given; what is not well-formed stays text."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_contracts.answers import AnswerReader
from rl_contracts.errors import ConfigError
from rl_contracts.rendering import ChatRenderer
from rl_contracts.testing import make_tiny_tokenizer
from rl_contracts.testing.chat_formats import CHAT_FORMATS, make_chat_tokenizer, written

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALLS = [{"name": "add", "arguments": {"a": 1, "b": [True, "</think>"]}}, {"name": "list", "arguments": {}}]
RESPONSE_TEMPLATE = {
    "version": 1,
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {"open": "say: ", "close": "\n"},
        "tool_calls": {"open": "call: ", "close": "\n", "repeats": True, "content": "json"},
    },
}


def _reader(name: str, **options: Any) -> AnswerReader:
    tokenizer = make_chat_tokenizer(name)
    return AnswerReader(tokenizer, stop_ids=ChatRenderer(tokenizer).stop_ids, **options)


def _read(name: str, text: str, tools: Any = TOOLS, opening: str = "", stop: tuple[str, ...] = ()) -> dict[str, Any]:
    ids = ChatRenderer(make_chat_tokenizer(name)).encode(text)
    return _reader(name).message([1, 2], opening, ids, tools, stop)


def _called(message: dict[str, Any]) -> list[Any]:
    return [call["function"] for call in message.get("tool_calls", [])]


@pytest.mark.parametrize("name", CHAT_FORMATS)
def test_read_parallel_calls_of_each_family_are_found(name: str) -> None:
    message = _read(name, written(name, calls=CALLS))

    assert _called(message) == CALLS
    assert message["content"] == ""
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(len(each) == 9 and each.isalnum() for each in ids)


@pytest.mark.parametrize("name", CHAT_FORMATS)
def test_read_without_tools_in_the_request_everything_is_text(name: str) -> None:
    message = _read(name, written(name, calls=CALLS), tools=None)

    assert "tool_calls" not in message
    assert '"add"' in message["content"]


@given(text=st.text(max_size=40), name=st.sampled_from(CHAT_FORMATS))
def test_read_any_text_without_signs_comes_back_as_it_was(text: str, name: str) -> None:
    reader = _reader(name)
    ids = ChatRenderer(make_chat_tokenizer(name)).encode(text)

    assert reader.message([], "", ids, TOOLS)["content"] == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3", '<tool_call>\n{"name": "add", "arguments": \n</tool_call>'),
        ("qwen3", '<tool_call>{"name": "add", "arguments": {}}'),
        ("qwen3", '<tool_call>{"name": "add"}</tool_call>'),
        ("qwen3", '<tool_call>{"name": 1, "arguments": {}}</tool_call>'),
        ("qwen3", "<tool_call></tool_call>"),
        ("qwen3", "<tool_call>" + "[" * 100_000 + "</tool_call>"),
        ("llama3", 'so {"name": "add", "parameters": {}}'),
        ("llama3", '{"name": "add", "parameters": {}} and'),
        ("llama3", "12"),
        ("mistral", '[TOOL_CALLS]{"name": "add", "arguments": {}}'),
        ("mistral", '[TOOL_CALLS][{"name": "add"}]'),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", "[TOOL_CALLS]add[ARGS]{"),
    ],
)
def test_read_malformed_calls_stay_text(name: str, text: str) -> None:
    message = _read(name, text)

    assert "tool_calls" not in message
    assert message["content"] == text


def test_read_calls_beside_text_and_a_malformed_one() -> None:
    message = _read(
        "qwen3", 'first\n<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>\n<tool_call>x</tool_call>'
    )

    assert _called(message) == [{"name": "add", "arguments": {"a": 1}}]
    assert message["content"] == "first\n\n<tool_call>x</tool_call>"


def test_read_newer_calls_of_mistral_with_text_before_them() -> None:
    ids = ChatRenderer(make_chat_tokenizer("mistral")).encode('so[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]list[ARGS]{}')

    message = _reader("mistral").message([], "", ids, TOOLS)

    assert _called(message) == [{"name": "add", "arguments": {"a": 1}}, {"name": "list", "arguments": {}}]
    assert message["content"] == "so"


@pytest.mark.parametrize(
    ("text", "opening", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nit is", "", "hm", "it is"),
        ("hm\n</think>\n\nit is", "<|im_start|>assistant\n<think>\n", "hm", "it is"),
        ("<think>\nhm", "", "hm", ""),
        ("hm", "<think>\n", "hm", ""),
        ("it is", "<think>\n\n</think>\n\n", None, "it is"),
        ("it is", "", None, "it is"),
        ("<think>\n\n</think>\n\nit is", "", None, "it is"),
    ],
)
def test_read_reasoning_is_taken_out(text: str, opening: str, reasoning: str | None, content: str) -> None:
    message = _read("qwen3", text + "<|im_end|>", opening=opening)

    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


def test_read_stop_string_ends_the_text_unless_the_model_ended_it() -> None:
    assert _read("llama3", "it is 12\n", stop=("\n", "12"))["content"] == "it is "
    assert _read("llama3", "it is 12\n<|eot_id|>", stop=("\n",))["content"] == "it is 12\n"


def test_read_ids_of_calls_follow_from_prompt_and_answer() -> None:
    reader, renderer = _reader("qwen3"), ChatRenderer(make_chat_tokenizer("qwen3"))
    ids = renderer.encode(written("qwen3", calls=CALLS))

    first, again, other = (reader.message(prompt, "", ids, TOOLS) for prompt in ([1], [1], [2]))

    assert first == again
    assert json.dumps(first) != json.dumps(other)


def test_reader_of_a_tokenizer_that_describes_its_answers_asks_transformers() -> None:
    tokenizer = copy.copy(make_chat_tokenizer("qwen3"))
    tokenizer.response_template = RESPONSE_TEMPLATE
    reader = AnswerReader(tokenizer)
    call = json.dumps({"name": "add", "arguments": {"a": 1}})

    message = reader.message([], "", tokenizer.encode(f"say: so\ncall: {call}\ncall: {call}\n"), TOOLS)

    assert reader.form == "transformers"
    assert message["content"] == "so"
    assert _called(message) == [{"name": "add", "arguments": {"a": 1}}] * 2
    malformed = "say: so\ncall: {\n"
    assert reader.message([], "", tokenizer.encode(malformed), TOOLS)["content"] == malformed


def test_reader_form_that_is_unknown_or_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"endpoint.tool_calls"):
        AnswerReader(make_tiny_tokenizer(), "hermse")
    with pytest.raises(ConfigError, match="no `response_template`"):
        AnswerReader(make_tiny_tokenizer(), "transformers")
    assert not AnswerReader(make_tiny_tokenizer()).reads_tools


@pytest.mark.parametrize("special", [True, False])
def test_final_text_marks_as_special_tokens_are_found_and_left_out(special: bool) -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>", "<|extra|>"], special_tokens=special)
    reader = AnswerReader(tokenizer, stop_ids=ChatRenderer(tokenizer).stop_ids)
    ids = tokenizer.encode("so 7</think>It is 5.<|im_end|>", add_special_tokens=False)

    assert reader.final_text(ids, "<think>\n") == "It is 5."
    assert reader.final_text(ids[:4], "<think>\n") == ""


def test_final_text_special_tokens_in_the_answer_are_left_out() -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_tokens(["<|extra|>"], special_tokens=True)
    ids = tokenizer.encode("<think>7</think>It is<|extra|> 5.", add_special_tokens=False)

    assert AnswerReader(tokenizer).final_text(ids, "") == "It is 5."


def test_final_text_of_a_described_answer_is_its_content() -> None:
    tokenizer = make_tiny_tokenizer()
    fields = {"content": {"open": "say: ", "close": "\n"}, "reasoning_content": {"open": "muse: ", "close": "\n"}}
    tokenizer.response_template = {**RESPONSE_TEMPLATE, "fields": fields}
    ids = tokenizer.encode("muse: 7\nsay: It is 5.\n", add_special_tokens=False)

    assert AnswerReader(tokenizer).final_text(ids, "") == "It is 5."
