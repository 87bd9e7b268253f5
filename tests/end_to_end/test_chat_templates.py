"""Conversations with tools, roles and text parts in the chat templates of TRL."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rl_contracts.chat.rendering import ChatRenderer
from rl_contracts.errors import DataError

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
QUESTION = [{"role": "user", "content": "How is it in Ulm?"}]
ANSWER = [{"role": "assistant", "content": "It rains 12 drops."}]
FUNCTION = {"name": "weather", "arguments": {"town": "Ulm", "days": 3}}
TOOL_CALL = [
    {"role": "assistant", "content": "", "tool_calls": [{"id": "call00001", "type": "function", "function": FUNCTION}]},
    {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": "12"},
]


@cache
def renderer(name: str) -> ChatRenderer:
    """Return a renderer with a tokenizer of bytes and of the template's special tokens."""
    template = (TEMPLATES / f"{name}.jinja").read_text()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    special_tokens = sorted(
        {*re.findall(r"<[|\uff5c][^<>\s{}]*[|\uff5c]>|<(?:start|end)_of_turn>|<\|?turn\|?>", template)}
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": special_tokens})
    tokenizer.chat_template = template
    return ChatRenderer(tokenizer)


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gemma4", "gptoss", "deepseekv3"])
def test_template_with_tool_calls_accepts_conversation(name: str) -> None:
    renderer(name).require_rendered([*QUESTION, *TOOL_CALL, *ANSWER])


DEVELOPER = [{"role": "developer", "content": "Be brief."}]
TOOLS = [{"type": "function", "function": {"name": "Ulm", "description": "", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    ("name", "messages", "tools", "dropped"),
    [
        ("llama3", [*QUESTION, *TOOL_CALL, *ANSWER], None, "message 1"),
        ("deepseek_r1_distill", [*QUESTION, *TOOL_CALL, *ANSWER], None, "message 1"),
        ("qwen3", [*DEVELOPER, *QUESTION, *ANSWER], None, "message 0"),
        ("deepseekv3", [*DEVELOPER, *QUESTION, *ANSWER], None, "message 0"),
        ("gemma", [*QUESTION, *ANSWER], TOOLS, "tools"),
        ("phi3", [*QUESTION, *ANSWER], TOOLS, "tools"),
    ],
)
def test_template_that_drops_messages_or_tools_rejects_conversation(
    name: str, messages: list[Any], tools: list[Any] | None, dropped: str
) -> None:
    with pytest.raises(DataError, match=dropped):
        renderer(name).require_rendered(messages, tools)


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gptoss", "smolvlm", "gemma3"])
def test_text_parts_render_as_joined_text(name: str) -> None:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "How is it "}, {"type": "text", "text": "in Ulm?"}]

    assert renderer(name).text([{"role": "user", "content": parts}]) == renderer(name).text(QUESTION)
