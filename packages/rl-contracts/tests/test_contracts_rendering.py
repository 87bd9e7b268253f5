"""Rendering against real tokenizers, made on the spot, and the templates that go wrong."""

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
FORGETFUL = (  # keeps the reasoning of the last message only, as several published templates do
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if loop.last %}{{ m['content'] }}{% else %}{{ m['content'].split('</think>')[-1] }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
UNCLOSED = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
CLOSED_ONCE_MORE = CHATML + "{% if not add_generation_prompt %}<|endoftext|>{% endif %}"
FORCED_REASONING = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
PARTS = (  # reads content as a list of parts only: the characters of plain text have no type, so nothing is shown
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
UNCLOSED_ANSWERS = (  # questions are closed; of the answers, only the last
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% if m['role'] != 'assistant' or loop.last %}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system messages') }}{% endif %}" + CHATML
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


def _learned(renderer: ChatRenderer, tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    ids, mask = renderer.render_sft(messages)
    return tokenizer.decode([token for token, learn in zip(ids, mask, strict=True) if learn])


def test_render_prompt_gives_the_ids_of_the_template_text() -> None:
    ids = RENDERER.render(CONVERSATION[:2])

    assert all(type(token) is int for token in ids)
    assert TOKENIZER.decode(ids) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nwhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_render_template_options_reach_the_template() -> None:
    tokenizer = _tokenizer("{{ mood }}" + CHATML)

    ids = ChatRenderer(tokenizer, {"mood": "calm"}).render(CONVERSATION[:2])

    assert tokenizer.decode(ids).startswith("calm<|im_start|>")


def test_renderer_tokenizer_that_answers_a_mapping_is_understood() -> None:
    class Wrapped:
        chat_template = CHATML

        def apply_chat_template(self, messages: Any, **options: Any) -> Any:
            return TOKENIZER.apply_chat_template(messages, **{**options, "return_dict": True})

    assert ChatRenderer(Wrapped()).render(CONVERSATION) == RENDERER.render(CONVERSATION)


def test_renderer_without_template_is_refused() -> None:
    with pytest.raises(ConfigError, match="chat template"):
        ChatRenderer(_tokenizer(None))


def test_render_template_that_is_none_says_in_which_line() -> None:
    with pytest.raises(DataError, match=r"the chat template is no Jinja template \(line 2\): .*\. Mend it, or give"):
        ChatRenderer(_tokenizer("{% for message in messages %}\n{{ message.content")).render(CONVERSATION)


def test_render_conversation_that_the_template_refuses_says_why() -> None:
    with pytest.raises(DataError, match="no system messages"):
        ChatRenderer(_tokenizer(STRICT)).render(CONVERSATION)


def test_stop_ids_are_end_of_turn_then_end_of_text() -> None:
    expected = TOKENIZER.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])

    assert list(RENDERER.stop_ids) == expected
    assert ChatRenderer(_tokenizer(CHATML, eos="<|im_end|>")).stop_ids == (expected[0],)


@pytest.mark.parametrize(("named", "more"), [([5, 0, 6], [5, 6]), (5, [5]), ([10_000, 5], [5]), (None, [])])
def test_stop_ids_include_those_of_the_generation_config(tmp_path: Path, named: Any, more: list[int]) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))

    assert ChatRenderer(AutoTokenizer.from_pretrained(tmp_path)).stop_ids == (*RENDERER.stop_ids, *more)


@pytest.mark.parametrize(
    ("sampled", "role", "appended"),
    [
        ("<|user|>", "user", "\nand?<|assistant|>"),
        ("<|observation|>", "tool", "\n<tool_response>\nand?\n</tool_response><|assistant|>"),
        ("<|endoftext|>", "user", "<|user|>\nand?<|assistant|>"),
        ("", "user", "<|user|>\nand?<|assistant|>"),
    ],
)
def test_append_turn_that_its_opening_token_ends_has_it_once(
    tmp_path: Path, sampled: str, role: str, appended: str
) -> None:
    make_chat_tokenizer("glm45").save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ends = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|user|>", "<|observation|>"])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    renderer = ChatRenderer(tokenizer)
    ids = renderer.encode(f"it is 2{sampled}")

    more = renderer.append_turn(ids, [{"role": role, "content": "and?"}])

    assert tokenizer.decode(more[len(ids) :]) == appended


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


def test_stop_ids_nothing_can_end_an_answer_is_refused() -> None:
    with pytest.raises(ConfigError, match="no answer could ever end"):
        _ = ChatRenderer(_tokenizer(UNCLOSED, eos=None)).stop_ids


def test_render_sft_learns_answers_with_their_end_and_nothing_else() -> None:
    assert _learned(RENDERER, TOKENIZER, CONVERSATION) == "it is 2<|im_end|>it is 4<|im_end|>"


def test_render_sft_is_what_a_rollout_sees_and_generates() -> None:
    ids, mask = RENDERER.render_sft(CONVERSATION[:3])
    prompt = RENDERER.render(CONVERSATION[:2])

    assert ids[: len(prompt)] == prompt
    assert mask.index(True) == len(prompt)


@given(st.lists(st.text("ab c<|>?\t", min_size=1).map(str.strip), min_size=1, max_size=4))
def test_render_sft_any_answers_mask_decodes_to_exactly_them(answers: list[str]) -> None:
    messages = [
        message
        for answer in answers
        for message in ({"role": "user", "content": "question"}, {"role": "assistant", "content": answer})
    ]

    assert _learned(RENDERER, TOKENIZER, messages) == "".join(answer + "<|im_end|>" for answer in answers)


def test_render_sft_template_that_rewrites_turns_is_refused() -> None:
    messages = [dict(message) for message in CONVERSATION]
    messages[2]["content"] = "<think>1 and 1</think>it is 2"

    with pytest.raises(ConfigError, match="rewrites earlier turns"):
        ChatRenderer(_tokenizer(FORGETFUL)).render_sft(messages)
    tokenizer = _tokenizer(FORGETFUL)
    assert _learned(ChatRenderer(tokenizer), tokenizer, messages[:3]) == messages[2]["content"] + "<|im_end|>"


def test_render_sft_template_that_closes_the_conversation_once_more_is_learned_up_to_the_turn() -> None:
    tokenizer = _tokenizer(CLOSED_ONCE_MORE)

    learned = _learned(ChatRenderer(tokenizer), tokenizer, CONVERSATION)

    assert learned == "it is 2<|im_end|>it is 4<|im_end|>"


def test_render_sft_template_that_opens_reasoning_needs_it_in_the_data() -> None:
    tokenizer = _tokenizer(FORCED_REASONING)
    renderer = ChatRenderer(tokenizer)
    reasoned = [CONVERSATION[1], {"role": "assistant", "content": "<think>\nhm</think>2"}]

    assert _learned(renderer, tokenizer, reasoned) == "hm</think>2<|im_end|>"
    with pytest.raises(ConfigError, match="does not begin with the generation prompt"):
        renderer.render_sft(CONVERSATION[1:3])


def test_template_that_shows_only_parts_gets_plain_text_as_parts() -> None:
    tokenizer = _tokenizer(PARTS)
    renderer = ChatRenderer(tokenizer)

    assert renderer.stop_ids == RENDERER.stop_ids
    assert renderer.render(CONVERSATION) == RENDERER.render(CONVERSATION)
    assert _learned(renderer, tokenizer, CONVERSATION[:3]) == "it is 2<|im_end|>"


def test_append_turn_template_that_opens_reasoning_keeps_the_message() -> None:
    tokenizer = _tokenizer(FORCED_REASONING)
    renderer = ChatRenderer(tokenizer)
    sampled = renderer.render(CONVERSATION[:2]) + tokenizer.encode("hm</think>2<|im_end|>")

    added = tokenizer.decode(renderer.append_turn(sampled, CONVERSATION[3:4])[len(sampled) :])

    assert added == "\n<|im_start|>user\nand 2 + 2?<|im_end|>\n<|im_start|>assistant\n<think>\n"


def test_template_that_closes_only_the_last_answer_is_refused_for_several_turns() -> None:
    renderer = ChatRenderer(_tokenizer(UNCLOSED_ANSWERS))

    with pytest.raises(ConfigError, match="right after an answer"):
        renderer.append_turn(RENDERER.render(CONVERSATION[:2]), CONVERSATION[3:4])
    with pytest.raises(ConfigError, match="rewrites earlier turns"):
        renderer.render_sft(CONVERSATION)


def test_render_sft_template_that_leaves_turns_open_is_refused() -> None:
    with pytest.raises(ConfigError, match="would never end its answer"):
        ChatRenderer(_tokenizer(UNCLOSED)).render_sft(CONVERSATION)


def test_render_sft_text_that_merges_with_the_prompt_is_refused() -> None:
    messages = [CONVERSATION[1], {"role": "assistant", "content": "\n\n\nit is 2"}]

    with pytest.raises(DataError, match="Strip the text's leading blanks"):
        RENDERER.render_sft(messages)


def test_render_sft_end_token_in_the_text_is_refused() -> None:
    messages = [CONVERSATION[1], {"role": "assistant", "content": "2<|im_end|>\nmore"}]

    with pytest.raises(DataError, match=r"message 1 .* contains the end token '<\|im_end\|>'"):
        RENDERER.render_sft(messages)


def test_render_sft_turn_of_weight_0_is_not_learned() -> None:
    messages = [*CONVERSATION[:2], {**CONVERSATION[2], "weight": 0}, *CONVERSATION[3:]]
    ids, mask = RENDERER.render_sft(messages)
    whole_ids, whole = RENDERER.render_sft(CONVERSATION)

    assert ids == whole_ids
    first = whole.index(True)
    end = whole.index(False, first)
    assert mask == [learned and not first <= i < end for i, learned in enumerate(whole)]


@pytest.mark.parametrize("tool_calls", [[], [{"function": {"name": "add", "arguments": {"a": 1}}}]])
def test_render_text_that_is_not_utf8_is_rejected(tool_calls: list[Any]) -> None:
    half = {"role": "user", "content": "half \ud83d", "tool_calls": tool_calls}
    with pytest.raises(DataError, match="UTF-8"):
        RENDERER.render([half])
    with pytest.raises(DataError, match="UTF-8"):
        RENDERER.append_turn(RENDERER.render(CONVERSATION[:2]), [half])


def test_render_sft_no_answer_is_refused() -> None:
    with pytest.raises(DataError, match="assistant message to learn from"):
        RENDERER.render_sft(CONVERSATION[:2])
    with pytest.raises(DataError, match="message before the first assistant"):
        RENDERER.render_sft(CONVERSATION[2:3])


def test_append_turn_keeps_sampled_ids_that_no_tokenizer_would_give() -> None:
    prompt = RENDERER.render(CONVERSATION[:2])
    end = RENDERER.stop_ids[0]
    sampled = [token for letter in "it is 2" for token in TOKENIZER.encode(letter)] + [end]

    ids = RENDERER.append_turn(prompt + sampled, CONVERSATION[3:4])

    assert sampled[:-1] != TOKENIZER.encode("it is 2")
    assert ids[: len(prompt) + len(sampled)] == prompt + sampled
    assert TOKENIZER.decode(ids) == TOKENIZER.decode(RENDERER.render(CONVERSATION[:4]))


def test_append_turn_canonical_answer_equals_rendering_the_whole() -> None:
    answer = [*TOKENIZER.encode("it is 2"), RENDERER.stop_ids[0]]

    ids = RENDERER.append_turn(RENDERER.render(CONVERSATION[:2]) + answer, CONVERSATION[3:4])

    assert ids == RENDERER.render(CONVERSATION[:4])


def test_append_turn_answer_that_was_cut_off_is_closed() -> None:
    cut = RENDERER.render(CONVERSATION[:2]) + TOKENIZER.encode("it is 2")

    ids = RENDERER.append_turn(cut, CONVERSATION[3:4])

    assert ids == RENDERER.render(CONVERSATION[:4])


def test_append_turn_answer_ended_by_end_of_text_stays_as_sampled() -> None:
    sampled = RENDERER.render(CONVERSATION[:2]) + TOKENIZER.encode("it is 2<|endoftext|>")

    text = TOKENIZER.decode(RENDERER.append_turn(sampled, CONVERSATION[3:4]))

    assert "it is 2<|endoftext|>\n<|im_start|>user\nand 2 + 2?" in text


def test_append_turn_works_with_a_template_that_rewrites_turns() -> None:
    tokenizer = _tokenizer(FORGETFUL)
    renderer = ChatRenderer(tokenizer)
    sampled = renderer.render(CONVERSATION[:2]) + tokenizer.encode("<think>hm</think>it is 2<|im_end|>")

    ids = renderer.append_turn(sampled, CONVERSATION[3:4])

    assert ids[: len(sampled)] == sampled
    assert tokenizer.decode(ids[len(sampled) :]) == (
        "\n<|im_start|>user\nand 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_append_turn_nothing_or_open_template_is_refused() -> None:
    with pytest.raises(DataError, match="at least one message"):
        RENDERER.append_turn([1, 2], [])
    with pytest.raises(ConfigError, match="right after an answer"):
        ChatRenderer(_tokenizer(UNCLOSED)).append_turn([1, 2], CONVERSATION[3:4])
