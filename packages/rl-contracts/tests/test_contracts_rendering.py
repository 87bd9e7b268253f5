"""Rendering with small real tokenizers, including faulty templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rl_contracts.chat.rendering import ChatRenderer, adds_bos
from rl_contracts.errors import ConfigError, DataError
from rl_contracts.testing.chat_formats import make_chat_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DROPS_REASONING = (  # keeps the reasoning of the last message only, like several published templates
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if loop.last %}{{ m['content'] }}{% else %}{{ m['content'].split('</think>')[-1] }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
UNCLOSED = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
EXTRA_END_TOKEN = CHATML + "{% if not add_generation_prompt %}<|endoftext|>{% endif %}"
OPENS_REASONING = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
CONTENT_PARTS = (  # reads only lists of content parts; it renders a plain string as nothing
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
UNCLOSED_EARLIER_TURNS = (  # closes user messages, but only the last assistant message
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% if m['role'] != 'assistant' or loop.last %}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM_MESSAGES = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system messages') }}{% endif %}" + CHATML
)
CONVERSATION = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "what is 1 + 1?"},
    {"role": "assistant", "content": "it is 2"},
    {"role": "user", "content": "and 2 + 2?"},
    {"role": "assistant", "content": "it is 4"},
]


def _tokenizer(template: str | None, eos: str | None = "<|endoftext|>") -> Any:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(["user assistant what is the question? it is \n\n\n\n 1 + 1"] * 8, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    if eos is not None:
        tokenizer.eos_token = eos
    tokenizer.chat_template = template
    return tokenizer


TOKENIZER = _tokenizer(CHATML)
RENDERER = ChatRenderer(TOKENIZER)


def _trained_text(renderer: ChatRenderer, tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    ids, mask = renderer.render_sft(messages)
    return tokenizer.decode([token for token, is_trained in zip(ids, mask, strict=True) if is_trained])


def test_render_prompt_returns_the_ids_of_the_template_text() -> None:
    ids = RENDERER.render(CONVERSATION[:2])

    assert all(type(token) is int for token in ids)
    assert TOKENIZER.decode(ids) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nwhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_render_template_options_reach_the_template() -> None:
    tokenizer = _tokenizer("{{ mood }}" + CHATML)

    ids = ChatRenderer(tokenizer, {"mood": "calm"}).render(CONVERSATION[:2])

    assert tokenizer.decode(ids).startswith("calm<|im_start|>")


def test_render_tokenizer_that_returns_a_mapping_works() -> None:
    class Wrapped:
        chat_template = CHATML

        def apply_chat_template(self, messages: Any, **options: Any) -> Any:
            return TOKENIZER.apply_chat_template(messages, **{**options, "return_dict": True})

    assert ChatRenderer(Wrapped()).render(CONVERSATION) == RENDERER.render(CONVERSATION)


def test_renderer_without_template_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="chat template"):
        ChatRenderer(_tokenizer(None))


def test_render_invalid_template_raises_data_error_with_line() -> None:
    with pytest.raises(DataError, match=r"\(line 2\).*model\.chat_template"):
        ChatRenderer(_tokenizer("{% for message in messages %}\n{{ message.content")).render(CONVERSATION)


def test_render_conversation_rejected_by_template_raises_data_error() -> None:
    with pytest.raises(DataError, match="no system messages"):
        ChatRenderer(_tokenizer(NO_SYSTEM_MESSAGES)).render(CONVERSATION)


def test_stop_ids_are_end_of_turn_then_end_of_text() -> None:
    expected = TOKENIZER.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])

    assert list(RENDERER.stop_ids) == expected
    assert ChatRenderer(_tokenizer(CHATML, eos="<|im_end|>")).stop_ids == (expected[0],)


@pytest.mark.parametrize(("eos_token_id", "expected"), [([5, 0, 6], [5, 6]), (5, [5]), ([10_000, 5], [5])])
def test_stop_ids_include_end_tokens_of_generation_config(
    tmp_path: Path, eos_token_id: Any, expected: list[int]
) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_token_id}))

    assert ChatRenderer(AutoTokenizer.from_pretrained(tmp_path)).stop_ids == (*RENDERER.stop_ids, *expected)


@pytest.mark.parametrize(
    ("sampled", "role", "appended"),
    [
        ("<|observation|>", "tool", "\n<tool_response>\nand?\n</tool_response><|assistant|>"),
        ("<|endoftext|>", "user", "<|user|>\nand?<|assistant|>"),
        ("", "user", "<|user|>\nand?<|assistant|>"),
    ],
)
def test_append_turn_ended_by_next_opening_token_has_it_once(
    tmp_path: Path, sampled: str, role: str, appended: str
) -> None:
    make_chat_tokenizer("glm45").save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    end_ids = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|user|>", "<|observation|>"])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": end_ids}))
    renderer = ChatRenderer(tokenizer)
    ids = renderer.encode(f"it is 2{sampled}")

    extended = renderer.append_turn(ids, [{"role": role, "content": "and?"}])

    assert tokenizer.decode(extended[len(ids) :]) == appended


@pytest.mark.parametrize("text", ["it is", "<|endoftext|>it is"])
def test_encode_text_that_begins_a_prompt_has_one_bos(text: str) -> None:
    tokenizer = _tokenizer(CHATML)
    tokenizer.bos_token = "<|endoftext|>"
    assert not adds_bos(tokenizer)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )

    ids = ChatRenderer(tokenizer).encode(text, begins=True)

    assert tokenizer.decode(ids) == "<|endoftext|>it is"
    assert ChatRenderer(tokenizer).encode("it is") == ids[1:]


def test_stop_ids_without_end_token_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="Set `eos_token`"):
        _ = ChatRenderer(_tokenizer(UNCLOSED, eos=None)).stop_ids


def test_render_sft_mask_begins_after_the_rollout_prompt() -> None:
    ids, mask = RENDERER.render_sft(CONVERSATION[:3])
    prompt = RENDERER.render(CONVERSATION[:2])

    assert ids[: len(prompt)] == prompt
    assert mask.index(True) == len(prompt)


@given(st.lists(st.text("ab c<|>?\t", min_size=1).map(str.strip), min_size=1, max_size=4))
def test_render_sft_mask_decodes_to_the_completions(completions: list[str]) -> None:
    messages = [
        message
        for completion in completions
        for message in ({"role": "user", "content": "question"}, {"role": "assistant", "content": completion})
    ]

    assert _trained_text(RENDERER, TOKENIZER, messages) == "".join(
        completion + "<|im_end|>" for completion in completions
    )


def test_render_sft_template_that_rewrites_turns_raises_config_error() -> None:
    messages = [dict(message) for message in CONVERSATION]
    messages[2]["content"] = "<think>1 and 1</think>it is 2"

    with pytest.raises(ConfigError, match=r"the first \d messages"):
        ChatRenderer(_tokenizer(DROPS_REASONING)).render_sft(messages)
    tokenizer = _tokenizer(DROPS_REASONING)
    assert _trained_text(ChatRenderer(tokenizer), tokenizer, messages[:3]) == messages[2]["content"] + "<|im_end|>"


def test_render_sft_extra_end_token_is_not_in_the_mask() -> None:
    tokenizer = _tokenizer(EXTRA_END_TOKEN)

    trained = _trained_text(ChatRenderer(tokenizer), tokenizer, CONVERSATION)

    assert trained == "it is 2<|im_end|>it is 4<|im_end|>"


def test_render_sft_template_that_opens_reasoning_requires_it_in_data() -> None:
    tokenizer = _tokenizer(OPENS_REASONING)
    renderer = ChatRenderer(tokenizer)
    messages = [CONVERSATION[1], {"role": "assistant", "content": "<think>\nhm</think>2"}]

    assert _trained_text(renderer, tokenizer, messages) == "hm</think>2<|im_end|>"
    with pytest.raises(ConfigError, match=r"message 1 .*generation prompt.*template_options"):
        renderer.render_sft(CONVERSATION[1:3])


def test_renderer_template_of_content_parts_gets_text_as_parts() -> None:
    tokenizer = _tokenizer(CONTENT_PARTS)
    renderer = ChatRenderer(tokenizer)

    assert renderer.stop_ids == RENDERER.stop_ids
    assert renderer.render(CONVERSATION) == RENDERER.render(CONVERSATION)
    assert _trained_text(renderer, tokenizer, CONVERSATION[:3]) == "it is 2<|im_end|>"


def test_append_turn_template_that_opens_reasoning_keeps_message() -> None:
    tokenizer = _tokenizer(OPENS_REASONING)
    renderer = ChatRenderer(tokenizer)
    sampled = renderer.render(CONVERSATION[:2]) + tokenizer.encode("hm</think>2<|im_end|>")

    added = tokenizer.decode(renderer.append_turn(sampled, CONVERSATION[3:4])[len(sampled) :])

    assert added == "\n<|im_start|>user\nand 2 + 2?<|im_end|>\n<|im_start|>assistant\n<think>\n"


def test_renderer_template_with_unclosed_turns_raises_config_error() -> None:
    renderer = ChatRenderer(_tokenizer(UNCLOSED_EARLIER_TURNS))

    with pytest.raises(ConfigError, match=r"expected one of \[.*<\|endoftext\|>"):
        renderer.append_turn(RENDERER.render(CONVERSATION[:2]), CONVERSATION[3:4])
    with pytest.raises(ConfigError, match=r"the first \d messages"):
        renderer.render_sft(CONVERSATION)


def test_render_sft_template_without_end_of_turn_raises_config_error() -> None:
    with pytest.raises(ConfigError, match=r"message 2 .*stop ids"):
        ChatRenderer(_tokenizer(UNCLOSED)).render_sft(CONVERSATION)


def test_render_sft_text_merged_with_prompt_raises_data_error() -> None:
    messages = [CONVERSATION[1], {"role": "assistant", "content": "\n\n\nit is 2"}]

    with pytest.raises(DataError, match=r"message 1 .*generation prompt.*[Ss]trip"):
        RENDERER.render_sft(messages)


def test_render_sft_end_token_in_text_raises_data_error() -> None:
    messages = [CONVERSATION[1], {"role": "assistant", "content": "2<|im_end|>\nmore"}]

    with pytest.raises(DataError, match=r"message 1 .* contains the end token '<\|im_end\|>'"):
        RENDERER.render_sft(messages)


def test_render_sft_turn_of_weight_0_is_not_in_the_mask() -> None:
    messages = [*CONVERSATION[:2], {**CONVERSATION[2], "weight": 0}, *CONVERSATION[3:]]
    ids, mask = RENDERER.render_sft(messages)
    full_ids, full_mask = RENDERER.render_sft(CONVERSATION)

    assert ids == full_ids
    first = full_mask.index(True)
    end = full_mask.index(False, first)
    assert mask == [is_trained and not first <= i < end for i, is_trained in enumerate(full_mask)]


@pytest.mark.parametrize("tool_calls", [[], [{"function": {"name": "add", "arguments": {"a": 1}}}]])
def test_render_text_that_is_not_utf8_raises_data_error(tool_calls: list[Any]) -> None:
    half = {"role": "user", "content": "half \ud83d", "tool_calls": tool_calls}
    with pytest.raises(DataError, match="UTF-8"):
        RENDERER.render([half])
    with pytest.raises(DataError, match="UTF-8"):
        RENDERER.append_turn(RENDERER.render(CONVERSATION[:2]), [half])


def test_render_sft_without_completion_or_prompt_raises_data_error() -> None:
    with pytest.raises(DataError, match="found the roles"):
        RENDERER.render_sft(CONVERSATION[:2])
    with pytest.raises(DataError, match="message before the first assistant"):
        RENDERER.render_sft(CONVERSATION[2:3])


def test_append_turn_keeps_sampled_ids_that_tokenizer_never_gives() -> None:
    prompt = RENDERER.render(CONVERSATION[:2])
    end = RENDERER.stop_ids[0]
    sampled = [token for letter in "it is 2" for token in TOKENIZER.encode(letter)] + [end]

    ids = RENDERER.append_turn(prompt + sampled, CONVERSATION[3:4])

    assert sampled[:-1] != TOKENIZER.encode("it is 2")
    assert ids[: len(prompt) + len(sampled)] == prompt + sampled
    assert TOKENIZER.decode(ids) == TOKENIZER.decode(RENDERER.render(CONVERSATION[:4]))


def test_append_turn_truncated_completion_is_closed() -> None:
    truncated = RENDERER.render(CONVERSATION[:2]) + TOKENIZER.encode("it is 2")

    ids = RENDERER.append_turn(truncated, CONVERSATION[3:4])

    assert ids == RENDERER.render(CONVERSATION[:4])


def test_append_turn_completion_with_end_of_text_is_unchanged() -> None:
    sampled = RENDERER.render(CONVERSATION[:2]) + TOKENIZER.encode("it is 2<|endoftext|>")

    text = TOKENIZER.decode(RENDERER.append_turn(sampled, CONVERSATION[3:4]))

    assert "it is 2<|endoftext|>\n<|im_start|>user\nand 2 + 2?" in text


def test_append_turn_template_that_rewrites_turns_keeps_ids() -> None:
    tokenizer = _tokenizer(DROPS_REASONING)
    renderer = ChatRenderer(tokenizer)
    sampled = renderer.render(CONVERSATION[:2]) + tokenizer.encode("<think>hm</think>it is 2<|im_end|>")

    ids = renderer.append_turn(sampled, CONVERSATION[3:4])

    assert ids[: len(sampled)] == sampled
    assert tokenizer.decode(ids[len(sampled) :]) == (
        "\n<|im_start|>user\nand 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_append_turn_no_messages_or_unclosed_template_raises() -> None:
    with pytest.raises(DataError, match="at least one message"):
        RENDERER.append_turn([1, 2], [])
    with pytest.raises(ConfigError, match=r"expected one of \[.*<\|endoftext\|>"):
        ChatRenderer(_tokenizer(UNCLOSED)).append_turn([1, 2], CONVERSATION[3:4])
