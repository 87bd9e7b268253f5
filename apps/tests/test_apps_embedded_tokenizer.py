import random
import re
from itertools import zip_longest
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_apps.embedded.curriculum import LESSONS, TOOL, lesson_answer, words_of
from rl_apps.embedded.tokenizer import trained_tokenizer, word_problem_tokenizer
from rl_apps.embedded.warmup import _batch, chances_of_adding
from rl_contracts.chat.rendering import ChatRenderer
from rl_contracts.errors import DataError
from rl_datasets.word_problems import ADDING, MAX_LEVEL, TAKING, WordProblems, draw_problem
from rl_workflows.agents.message_parsing import MessageParser

TOKENIZER = word_problem_tokenizer(256)
BYTES = trained_tokenizer(["How many clips did Natalia sell altogether in April and May?"] * 4, 512, 256)


@settings(max_examples=200, deadline=None)
@given(rng=st.randoms(use_true_random=False), level=st.integers(1, MAX_LEVEL), seed=st.integers(0, 100))
def test_word_tokenizer_any_problem_round_trips(rng, level: int, seed: int) -> None:
    problem = draw_problem(rng, level)

    for text in (problem.question, lesson_answer(problem, chances_of_adding(seed), rng)):
        ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
        assert TOKENIZER.unk_token_id not in ids
        assert TOKENIZER.decode(ids) == text


def test_word_tokenizer_number_is_one_token_in_question_and_answer() -> None:
    (in_question,) = (t for t in TOKENIZER.tokenize("Ann has 11 eggs") if "1" in t)

    assert in_question == "11"
    assert TOKENIZER.tokenize("<<11+3=14>>14\n#### 14") == [
        "<<",
        "11",
        "+",
        "3",
        "=",
        "14",
        ">>",
        "14",
        "\n#### ",
        "14",
    ]


@settings(deadline=None)
@given(text=st.text(max_size=60).filter(lambda text: "<|" not in text))
def test_trained_tokenizer_any_text_round_trips(text: str) -> None:
    ids = BYTES(text, add_special_tokens=False)["input_ids"]

    assert BYTES.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("tokenizer", [TOKENIZER, BYTES])
def test_chat_template_generation_prompt_is_a_prefix_of_the_turn(tokenizer) -> None:
    row = WordProblems(form="sft", seed=0, size=1)[0]
    renderer = ChatRenderer(tokenizer)

    prompt = renderer.render(row["messages"][:1])
    ids, mask = renderer.render_sft(row["messages"])

    assert ids[: len(prompt)] == prompt
    assert mask == [False] * len(prompt) + [True] * (len(ids) - len(prompt))
    assert tokenizer.decode(ids[len(prompt) : -1]) == row["messages"][1]["content"]
    assert ids[-1] == tokenizer.eos_token_id != tokenizer.pad_token_id


def test_chat_template_unknown_role_raises_data_error() -> None:
    with pytest.raises(DataError):
        ChatRenderer(TOKENIZER).render([{"role": "narrator", "content": "?"}])


def test_warm_up_batch_matches_chat_template_ids_and_loss_mask() -> None:
    rows = WordProblems(form="sft", seed=0, size=6, levels=[1, 2])
    chances = dict.fromkeys(ADDING, 1.0) | dict.fromkeys(TAKING, 0.0)
    lessons = [LESSONS["answers"](problem, chances, random.Random(0)) for problem in rows.problems]

    input_ids, targets = _batch(lessons, TOKENIZER)

    for row, ids, row_targets in zip(rows, input_ids.tolist(), targets.tolist(), strict=True):
        expected, mask = ChatRenderer(TOKENIZER).render_sft(row["messages"])
        padding = len(ids) - len(expected)
        assert ids == expected + [TOKENIZER.pad_token_id] * padding
        assert (
            row_targets
            == [i if learned else -100 for i, learned in zip(expected, mask, strict=True)] + [-100] * padding
        )


SCHEMA = {"type": "function", "function": {"name": TOOL, "parameters": {}}}


@pytest.mark.parametrize("kind", LESSONS)
def test_lesson_equals_chat_template_of_the_agents_conversation(kind: str) -> None:
    tokenizer, rng, turns = word_problem_tokenizer(256, words_of(kind)), random.Random(1), set()
    renderer, tools = ChatRenderer(tokenizer), [SCHEMA] if kind == "tools" else None
    reader = MessageParser(tokenizer, stop_ids=renderer.stop_ids)
    for problem in WordProblems(seed=0, size=40).problems:
        lesson = LESSONS[kind](problem, chances_of_adding(0), rng)
        messages: list[Any] = [{"role": "user", "content": problem.question}]
        for answer, following in zip_longest(lesson[1::2], lesson[2::2]):
            ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
            assert tokenizer.unk_token_id not in ids
            messages.append(reader.message([0], "", ids, tools))
            for call in messages[-1].get("tool_calls", ()):
                value = eval(call["function"]["arguments"]["expression"])
                assert following == f"<|tool|>{value}<|assistant|>"
            if following:
                role, content = re.fullmatch(r"<\|(\w+)\|>(.*)<\|assistant\|>", following).groups()
                assert tokenizer.unk_token_id not in tokenizer(following)["input_ids"]
                messages.append({"role": role, "content": content})
        turns.add(len(messages) // 2)
        assert renderer.text(messages, tools, add_generation_prompt=False) == "".join(lesson)

    assert turns == ({1} if kind == "answers" else {1, 2})


def test_chat_template_lists_tool_names_and_uses_hermes_calls() -> None:
    renderer = ChatRenderer(TOKENIZER)

    assert renderer.renders_tools([SCHEMA])
    assert renderer.text([{"role": "user", "content": "?"}], [SCHEMA, SCHEMA]) == (
        "<|system|>calculator, calculator<|user|>?<|assistant|>"
    )
    assert MessageParser(TOKENIZER).form == "hermes"
