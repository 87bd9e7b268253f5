"""Columns that belong to a question, in chat data, GSM8K data and preference pairs."""

import json
from pathlib import Path
from typing import Any

import pytest

from rl_contracts.errors import DataError
from rl_datasets import GSM8K, HHRLHF, Chat

PIRATE = {"role": "system", "content": "You are a pirate."}
HI, ARR = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "Arr"}
ALPACA = {"instruction": "Translate.", "input": "good day", "output": "guten Tag"}

UNREAD = (
    *("prompt", "instruction", "question", "query", "problem", "input", "dialog", "dialogue", "developer"),
    *("history", "chat_history", "conversation_history", "context", "contexts", "ctx", "passage", "passages"),
    *("document", "documents", "article", "story", "premise", "hypothesis", "choices", "options", "endings"),
    *("option_a", "option_b", "option_c", "option_d", "opa", "opb", "opc", "opd"),
    *("starter_code", "sql_context", "schema", "api_list", "chat_template_kwargs"),
    *("image", "images", "image_path", "image_url", "video", "videos", "audio", "audios", "audio_path"),
)


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("row", "columns", "question"),
    [
        (ALPACA, {"messages": "instruction", "answer": "output"}, [("user", "Translate.\n\ngood day")]),
        ({**ALPACA, "input": ""}, {"messages": "instruction", "answer": "output"}, [("user", "Translate.")]),
        ({"messages": [PIRATE, HI, ARR], "system": "You are  a pirate."}, {}, [(*PIRATE.values(),), ("user", "hi")]),
        (
            {"history": [["I am Ann", "Hello Ann"]], "query": "Who am I?", "answer": "Ann", "system": "Be brief."},
            {"messages": "query"},
            [("system", "Be brief."), ("user", "I am Ann"), ("assistant", "Hello Ann"), ("user", "Who am I?")],
        ),
        (
            {"Chat_History": [HI, ARR], "messages": "Who am I?", "answer": "Ann"},
            {},
            [("user", "hi"), ("assistant", "Arr"), ("user", "Who am I?")],
        ),
        ({"messages": [HI, ARR], "System_Prompt": "Be."}, {}, [("system", "Be."), ("user", "hi")]),
        (
            {"conversation_history": [["hi", "Arr"]], "messages": "Who?", "answer": "Ann", "system_instruction": "Be."},
            {},
            [("system", "Be."), ("user", "hi"), ("assistant", "Arr"), ("user", "Who?")],
        ),
        ({"Instruction": "Add", "Input": 0, "answer": "0"}, {"messages": "Instruction"}, [("user", "Add\n\n0")]),
    ],
)
def test_chat_question_columns_are_in_the_messages(
    tmp_path: Path, row: Any, columns: dict[str, str], question: list[tuple[str, str]]
) -> None:
    file = write(tmp_path / "a.jsonl", row)

    prompt, conversation = (
        [(message["role"], message["content"]) for message in Chat(file, form=form, columns=columns)[0]["messages"]]
        for form in ("rl", "sft")
    )

    assert prompt == conversation[:-1] == question


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"messages": json.dumps([HI, ARR]), "input": "good day"}, "input"),
        ({"messages": [HI, ARR], "history": [["I am Ann", "Hello Ann"]]}, "history"),
        ({"messages": "Who?", "answer": "Ann", "history": "Ann"}, "history"),
        ({"messages": [PIRATE, HI, ARR], "system": "Be brief."}, "system"),
        ({"messages": [HI, ARR], "system": ["Be brief."]}, "system"),
        ({"messages": "Which one?", "answer": "B", "choices": ["hens", "eggs"]}, "choices"),
        ({"messages": [HI, ARR], "prompt": [{"role": "user", "content": "hello"}]}, "prompt"),
        ({"messages": "Who?", "answer": "Ann", "Documents": ["Ann was here."]}, "Documents"),
        ({"messages": [HI, ARR], "images": [{"path": "a.png"}]}, "images"),
        ({"messages": [HI, {**ARR, "content": "good day"}], "question": "good day"}, "question"),
        ({"messages": "Who?", "answer": "Ann", "history": [["a", "b"]], "chat_history": [["c", "d"]]}, "chat_history"),
    ],
)
def test_chat_unread_question_column_is_rejected_by_name(tmp_path: Path, row: Any, column: str) -> None:
    with pytest.raises(DataError, match=rf"a\.jsonl:2: .*{column!r}"):
        Chat(write(tmp_path / "a.jsonl", {"messages": [HI, ARR]}, row))


def test_chat_unread_question_column_of_each_name_is_rejected(tmp_path: Path) -> None:
    for name in UNREAD:
        file = write(tmp_path / f"{name}.jsonl", {"messages": [HI, ARR], name: "Ann was here."})
        with pytest.raises(DataError, match=rf"{name}\.jsonl:1: .*{name!r}"):
            Chat(file)


def test_chat_columns_that_are_empty_or_in_the_question_are_accepted(tmp_path: Path) -> None:
    row = {
        "messages": "Which? A: hens\nB: eggs",
        "answer": "B",
        "choices": ["hens", "eggs"],
        "images": [],
        "input": None,
    }
    row |= {"prompt": "Which?  A: hens", "options": {"label": ["A", "B"], "text": ["hens", "eggs"]}}

    row |= {"starter_code": "", "dialogue": "B: eggs", "document_id": "d1", "context_length": 5, "schema_version": "2"}

    assert Chat(write(tmp_path / "a.jsonl", row))[0]["choices"] == ["hens", "eggs"]


def test_chat_column_named_unused_is_excluded_from_the_question(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"messages": "hi", "answer": "Arr", "context": "Ann was here."})

    row = Chat(file, columns={"unused_context": "context"})[0]

    assert row == {"prompt_id": 0, "messages": [HI], "answer": "Arr", "unused_context": "Ann was here."}


def test_gsm8k_question_columns_are_in_the_messages(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"question": 7, "input": "plus 1", "answer": "8", "system": "Add."})

    row = GSM8K(file, instruction="Be brief.")[0]

    assert [message["content"] for message in row["messages"]] == ["Add.", "7\n\nplus 1\n\nBe brief."]
    with pytest.raises(DataError, match="context"):
        GSM8K(write(tmp_path / "b.jsonl", {"question": "How many?", "answer": "8", "context": "8 hens"}))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hi", "chosen": "Arr", "rejected": "No.", "system": PIRATE["content"]},
        {"chosen": [HI, ARR], "rejected": [HI, {**ARR, "content": "No."}], "system": PIRATE["content"]},
    ],
)
def test_hh_rlhf_system_column_begins_both_conversations(tmp_path: Path, row: Any) -> None:
    pair = HHRLHF(write(tmp_path / "a.jsonl", row))[0]

    assert pair["chosen"] == [PIRATE, HI, ARR]
    assert pair["rejected"][:2] == [PIRATE, HI]


def test_hh_rlhf_input_and_history_belong_to_the_prompt(tmp_path: Path) -> None:
    sides = {"chosen": "Arr", "rejected": "No."}
    row = {"prompt": "Say", "input": "hi", "history": [["hi", "Arr"]], **sides}

    chosen = HHRLHF(write(tmp_path / "a.jsonl", row))[0]["chosen"]

    assert [message["content"] for message in chosen] == ["hi", "Arr", "Say\n\nhi", "Arr"]
    with pytest.raises(DataError, match="context"):
        HHRLHF(write(tmp_path / "b.jsonl", {"prompt": "hi", "context": "a ship", **sides}))
