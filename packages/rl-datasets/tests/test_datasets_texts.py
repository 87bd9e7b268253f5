"""Texts of examples: half characters, empty texts, and answers that are not finite."""

import json
from pathlib import Path
from typing import Any

import pytest

from rl_contracts.errors import ConfigError, DataError
from rl_datasets import GSM8K, HHRLHF, Chat

USER, ASSISTANT = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}
HALF = "half \ud83d"


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("dataset", "row"),
    [
        (Chat, {"messages": [USER, {**ASSISTANT, "content": HALF}]}),
        (Chat, {"messages": [USER, ASSISTANT], "tests": [{"case": HALF}]}),
        (Chat, {"messages": [USER, ASSISTANT], "tools": json.dumps([{"name": HALF, "parameters": {}}])}),
        (GSM8K, {"question": HALF, "answer": "2"}),
        (HHRLHF, {"prompt": "1 + 1?", "chosen": "2", "rejected": HALF}),
    ],
)
def test_invalid_utf8_text_is_rejected_or_replaced(tmp_path: Path, dataset: Any, row: Any) -> None:
    file = write(tmp_path / "a.jsonl", row)

    with pytest.raises(DataError, match=r"a\.jsonl:1: .*invalid_text"):
        dataset(file)
    text = json.dumps(dataset(file, invalid_text="replace")[0], ensure_ascii=False)
    assert "half \ufffd" in text
    assert text.encode()


def test_bytes_of_another_encoding_are_rejected_or_replaced(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"messages": "1?", "answer": "2"}\n{"messages": "caf\xe9", "answer": "2"}\n')

    with pytest.raises(DataError, match=r"a\.jsonl:2: .*invalid_text"):
        Chat(file)
    assert Chat(file, invalid_text="replace")[1]["messages"][0]["content"] == "caf\ufffd"


def test_invalid_text_option_with_unknown_value_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="invalid_text"):
        Chat(write(tmp_path / "a.jsonl", {"messages": [USER, ASSISTANT]}), invalid_text="drop")


@pytest.mark.parametrize(
    ("dataset", "form", "question", "answer"),
    [
        (Chat, "rl", "messages", "NaN"),
        (Chat, "rl", "messages", "[1.0, NaN]"),
        (Chat, "sft", "messages", "1e400"),
        (GSM8K, "rl", "question", "-Infinity"),
    ],
)
def test_nonfinite_answer_is_rejected_with_its_line(
    tmp_path: Path, dataset: Any, form: str, question: str, answer: str
) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"{question}": "1 + 1?", "answer": {answer}}}\n')

    with pytest.raises(DataError, match=r"a\.jsonl:1: "):
        dataset(tmp_path / "a.jsonl", form=form)


@pytest.mark.parametrize(
    ("dataset", "form", "row"),
    [
        (Chat, "rl", {"messages": [{**USER, "content": " \n"}, ASSISTANT]}),
        (Chat, "rl", {"messages": [USER, {**ASSISTANT, "content": ""}]}),
        (Chat, "sft", {"messages": [USER, {**ASSISTANT, "content": [{"type": "text", "text": " "}]}, USER, ASSISTANT]}),
        (Chat, "sft", {"messages": [USER, ASSISTANT, {**USER, "content": ""}], "answer": "2"}),
        (Chat, "rl", {"messages": "", "answer": "2"}),
        (Chat, "rl", {"messages": [USER], "answer": " "}),
        (Chat, "sft", {"messages": [USER], "answer": " "}),
        (HHRLHF, "pairs", {"prompt": [{**USER, "content": " "}], "chosen": "2", "rejected": "3"}),
        (HHRLHF, "pairs", {"prompt": "hi", "chosen": " ", "rejected": "3"}),
    ],
)
def test_empty_question_or_answer_is_rejected_with_its_line(tmp_path: Path, dataset: Any, form: str, row: Any) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl:1: "):
        dataset(write(tmp_path / "a.jsonl", row), form=form)


def test_empty_turns_with_tool_calls_and_empty_results_are_accepted(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    messages = [{"role": "system", "content": ""}, USER, called, {"role": "tool", "content": ""}, ASSISTANT]

    assert Chat(write(tmp_path / "a.jsonl", {"messages": messages}), form="sft")[0]["messages"] == messages
    row = Chat(write(tmp_path / "b.jsonl", {"messages": [USER, called]}))[0]
    assert row == {"prompt_id": 0, "messages": [USER], "tool_calls": [call]}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (["Paris", "London"], '["Paris", "London"]'),
        ([{"text": "a", "score": 1}, {"text": "b"}], '[{"text": "a", "score": 1}, {"text": "b"}]'),
        ([{"type": "text", "text": "a"}, {"type": "output_text", "text": "b", "annotations": []}], "ab"),
        ([{"text": "a", "type": None}], "a"),
    ],
)
def test_tool_result_is_json_unless_all_parts_are_texts(tmp_path: Path, content: Any, text: str) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "find", "arguments": {}}]}
    messages = [USER, call, {"role": "tool", "content": content}, ASSISTANT]

    data = Chat(write(tmp_path / "a.jsonl", {"messages": messages}), form="sft")

    assert data[0]["messages"][2]["content"] == text


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "reasoning", "text": "x"}, "reasoning"),
        ({"text": "x", "score": 1}, "score"),
        ({"type": "text"}, "text"),
    ],
)
def test_message_part_that_is_not_text_is_rejected(tmp_path: Path, part: Any, kind: str) -> None:
    message = {"role": "assistant", "content": [part, {"type": "input_text", "text": "y"}, "z"]}

    with pytest.raises(DataError, match=rf"a\.jsonl:1: .*{kind}"):
        Chat(write(tmp_path / "a.jsonl", {"messages": [message, USER, ASSISTANT]}), form="sft")
