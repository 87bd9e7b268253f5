"""Mapping of columns, and the data set of conversations."""

import json
from pathlib import Path
from typing import Any

import pytest

from rl_contracts import registry
from rl_contracts.errors import ConfigError, DataError
from rl_datasets import GSM8K, HHRLHF, Chat
from rl_datasets.columns import renamed
from rl_datasets.validate import main

USER, ASSISTANT = ({"role": role, "content": text} for role, text in (("user", "1 + 1?"), ("assistant", "#### 2")))


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_columns_option_maps_file_columns_to_expected_names(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"problem": "1 + 1?", "reward_model": {"ground_truth": "2"}, "level": 3})

    rows = GSM8K(file, columns={"question": "problem", "answer": "reward_model.ground_truth"})

    assert rows[0] == {"prompt_id": 0, "messages": [USER], "answer": "2"}
    pair = write(tmp_path / "b.jsonl", {"q": "1 + 1?", "good": "2", "bad": "3"})
    sides = HHRLHF(pair, columns={"prompt": "q", "chosen": "good", "rejected": "bad"})[0]
    assert [sides[side][-1]["content"] for side in ("chosen", "rejected")] == ["2", "3"]


def test_columns_option_can_swap_two_columns(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"answer": "1 + 1?", "question": "2"})

    row = GSM8K(file, columns={"question": "answer", "answer": "question"})[0]

    assert (row["messages"], row["answer"]) == ([USER], "2")


@pytest.mark.parametrize(
    ("dataset", "columns", "message"),
    [
        (
            GSM8K,
            {},
            r"expected a column 'question', found only 'problem', 'solution', 'extra\.level'; "
            ".*data.columns.question=problem",
        ),
        (GSM8K, {"question": "probelm"}, r"a column 'probelm' \(data.columns.question=probelm\), found only 'problem'"),
        (HHRLHF, {}, "a column 'chosen', found only 'problem', .*; .* data.columns.chosen=NAME"),
        (Chat, {"question": "problem"}, "found only 'solution', .*'problem'; .* data.columns.messages=problem"),
    ],
)
def test_missing_column_error_names_line_columns_and_setting(
    tmp_path: Path, dataset: Any, columns: dict[str, str], message: str
) -> None:
    file = write(tmp_path / "a.jsonl", {"problem": "1 + 1?", "solution": "2", "extra": {"level": 3}})

    with pytest.raises(DataError, match=message) as error:
        dataset(file, columns=columns)

    assert str(error.value).startswith(f"{file}:1: ")


def test_columns_option_with_unknown_name_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.columns of gsm8k data: expected .*'question'.*found \['qestion'\]"):
        GSM8K(tmp_path, columns={"qestion": "problem"})


def test_chat_rl_form_has_turns_before_the_answer_and_other_columns(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    file = write(
        tmp_path / "a.jsonl",
        {"messages": [system, USER, ASSISTANT], "topic": "sums"},
        {"messages": [USER], "tests": ["2"], "answer": 2},
        {"messages": "1 + 1?"},
        {"messages": [USER, ASSISTANT], "answer": "two"},
    )

    assert list(registry.load("rl.datasets", "chat")(file)) == [
        {"prompt_id": 0, "messages": [system, USER], "answer": "#### 2", "topic": "sums"},
        {"prompt_id": 1, "messages": [USER], "tests": ["2"], "answer": 2},
        {"prompt_id": 2, "messages": [USER]},
        {"prompt_id": 3, "messages": [USER], "answer": "two"},
    ]


def test_chat_sft_form_ends_with_the_assistant(tmp_path: Path) -> None:
    sharegpt = [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "#### 2"}]
    file = write(tmp_path / "a.jsonl", {"messages": sharegpt, "x": 1}, {"messages": "1 + 1?", "answer": "#### 2"})

    rows = Chat(file, form="sft")

    assert list(rows) == [{"prompt_id": i, "messages": [USER, ASSISTANT]} for i in range(2)]
    rows[0]["messages"][0]["content"] = "changed"
    assert rows[0]["messages"] == [USER, ASSISTANT]


def test_chat_options_add_system_message_and_instruction(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"messages": "1 + 1?"})

    (system, user) = Chat(file, system="Be brief.", instruction="End with ####.")[0]["messages"]

    assert (system, user["content"]) == ({"role": "system", "content": "Be brief."}, "1 + 1?\n\nEnd with ####.")


@pytest.mark.parametrize(
    ("row", "form", "message"),
    [
        ({"messages": []}, "rl", "messages: expected a text or a list of messages with role and content"),
        ({"messages": [{"text": "hi"}]}, "rl", "expected messages with role and content, found {'text': 'hi'}"),
        ({"messages": [ASSISTANT]}, "rl", "with a question before the answer, found none"),
        ({"messages": [USER]}, "sft", "instead of 'assistant': expected a column 'answer', found only 'messages'"),
    ],
)
def test_chat_invalid_example_error_names_its_line(tmp_path: Path, row: Any, form: str, message: str) -> None:
    file = write(tmp_path / "a.jsonl", {"messages": [USER, ASSISTANT]}, row)

    with pytest.raises(DataError, match=message) as error:
        Chat(file, form=form)

    assert str(error.value).startswith(f"{file}:2: ")


def test_chat_without_a_path_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"data\.path of chat data: expected a directory"):
        Chat()


def test_validate_command_accepts_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(write(tmp_path / "a.jsonl", {"problem": "1 + 1?", "solution": "#### 2"}))

    (tmp_path / "reward.py").write_text(
        "def ends(prompt, completions, *_, answer, **__): return float(answer in completions)"
    )
    reward = ["--reward", f"{tmp_path / 'reward.py'}:ends"]

    assert main(["gsm8k", file, "--columns", "question=problem", "answer=solution", *reward]) == 0
    assert "1 of 1 gold answers score 1.0" in capsys.readouterr().out
    assert main(["gsm8k", file, "--columns", "question"]) == 2
    assert "--columns: expected FIELD=COLUMN" in capsys.readouterr().err


def test_chat_turn_with_a_switch_off_has_weight_0(tmp_path: Path) -> None:
    for key in ("weight", "loss_weight", "train", "trainable", "training", "learn", "loss"):
        wrong = {"from": "gpt", "value": "3", key: 0.0 if "weight" in key else False}
        talk = [USER | {key: 0}, wrong, USER, ASSISTANT | {key: True}]

        rows = Chat(write(tmp_path / "a.jsonl", {"messages": talk}), form="sft")

        expected = [USER, {"role": "assistant", "content": "3", "weight": 0}, USER, ASSISTANT]
        assert rows[0]["messages"] == expected, key


@pytest.mark.parametrize(
    ("turn", "form"),
    [
        ({**ASSISTANT, "weight": 0.5}, "sft"),
        ({**ASSISTANT, "train": "no"}, "rl"),
        ({**ASSISTANT, "loss_mask": [0, 1]}, "sft"),
        ({**ASSISTANT, "train": True, "weight": 0}, "sft"),
        ({**ASSISTANT, "weight": 0}, "rl"),
        ({**ASSISTANT, "weight": 0}, "sft"),
    ],
)
def test_chat_unsupported_weight_is_rejected(tmp_path: Path, form: str, turn: Any) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl:1: .*(weight|train|loss_mask)"):
        Chat(write(tmp_path / "a.jsonl", {"messages": [USER, turn]}), form=form)


def test_chat_weight_of_a_question_or_example_is_rejected(tmp_path: Path) -> None:
    for row in ({"messages": [USER | {"weight": 1}, ASSISTANT]}, {"messages": [USER, ASSISTANT], "weight": 0}):
        with pytest.raises(DataError, match="weight"):
            Chat(write(tmp_path / "a.jsonl", row), form="sft")
    with pytest.raises(DataError, match="weight"):
        GSM8K(write(tmp_path / "a.jsonl", {"question": "1 + 1?", "answer": "2", "weight": 0}))


CALL = {"name": "add", "arguments": {}}


@pytest.mark.parametrize(
    ("message", "key"),
    [
        ({**USER, "images": ["a.png"]}, "images"),
        ({**ASSISTANT, "function_calls": "add()"}, "function_calls"),
        ({"role": "system", "content": "Be brief.", "tools": [CALL]}, "tools"),
        ({**ASSISTANT, "is_target": False}, "is_target"),
        ({**USER, "value": "2 + 2?"}, "value"),
        ({**ASSISTANT, "tool_calls": [CALL], "function_call": {**CALL, "name": "sub"}}, "function_call"),
    ],
)
def test_chat_unsupported_message_entry_is_rejected(tmp_path: Path, message: Any, key: str) -> None:
    with pytest.raises(DataError, match=rf"a\.jsonl:1: .*{key}"):
        Chat(write(tmp_path / "a.jsonl", {"messages": [message, USER, ASSISTANT]}))


def test_chat_message_entry_of_an_unread_name_is_rejected(tmp_path: Path) -> None:
    unread = {"no_grad": True, "audio": {"path": "a.wav"}, "documents": ["Ann was here."], "functions": "[{}]"}
    for name, value in (unread | {"train_detail": [{"begin_offset": 0, "train": False}]}).items():
        file = write(tmp_path / f"{name}.jsonl", {"messages": [USER, ASSISTANT | {name: value}]})
        with pytest.raises(DataError, match=rf"{name}\.jsonl:1: .*{name!r}"):
            Chat(file)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"content": "#### 2", "value": "#### 2", "from": ""}, ASSISTANT),
        (
            {"content": "", "tool_calls": [], "function_call": CALL},
            {"tool_calls": [{"type": "function", "function": CALL}]},
        ),
        ({"content": "#### 2", "images": [], "tools": ""}, {**ASSISTANT, "images": [], "tools": ""}),
        ({"content": "#### 2", "tool_calls": "null"}, ASSISTANT),
        ({"content": "#### 2", "constraints": ["brief"]}, {**ASSISTANT, "constraints": ["brief"]}),
    ],
)
def test_chat_message_with_two_entry_names_uses_the_nonempty_one(tmp_path: Path, entries: Any, expected: Any) -> None:
    file = write(tmp_path / "a.jsonl", {"messages": [USER, {"role": "assistant", **entries}]})

    assert Chat(file, form="sft")[0]["messages"][1] == {"role": "assistant", "content": "", **expected}


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ({"messages": f" {json.dumps(USER)}", "answer": "#### 2"}, "sft"),
        ({"messages": "1 + 1?", "answer": json.dumps([ASSISTANT])}, "sft"),
        ({"messages": json.dumps([{"from": "human", "value": "1 + 1?"}]), "answer": "#### 2"}, "rl"),
    ],
)
def test_chat_messages_as_json_text_are_parsed(tmp_path: Path, row: Any, form: str) -> None:
    data = Chat(write(tmp_path / "a.jsonl", row), form=form)

    assert data[0]["messages"] == [USER, ASSISTANT][: 2 if form == "sft" else 1]


@pytest.mark.parametrize("text", ['[{"role": "user"}, 1]', "[]", "null"])
def test_chat_other_json_text_is_a_question(tmp_path: Path, text: str) -> None:
    rows = Chat(write(tmp_path / "a.jsonl", {"messages": text, "answer": "2", "input": "in"}))

    assert rows[0]["messages"] == [{"role": "user", "content": f"{text}\n\nin"}]


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"question": "q", "input": "IN", "context": "CTX"}, {"input": "context"}),
        ({"question": "q", "system": "S", "rules": {"text": "R"}}, {"system": "rules.text"}),
    ],
)
def test_renamed_with_an_existing_column_of_the_name_is_rejected(row: Any, columns: dict[str, str]) -> None:
    (name,) = columns
    with pytest.raises(DataError, match=rf"train\.jsonl:1: .*{name!r}.*data\.columns\.unused_{name}={name}"):
        list(renamed([("train.jsonl:1", row)], columns))


@pytest.mark.parametrize(
    ("row", "columns", "value"),
    [
        ({"answer": "A", "solution": "S", "input": "I"}, {"answer": "solution"}, "I"),
        ({"input": "", "context": "CTX"}, {"input": "context"}, "CTX"),
        ({"input": "CTX", "context": "CTX"}, {"input": "context"}, "CTX"),
        ({"input": "IN", "context": "CTX"}, {"input": "context", "unused_input": "input"}, "CTX"),
        ({"input": {"text": "CTX"}}, {"input": "input.text"}, "CTX"),
    ],
)
def test_renamed_replaces_an_empty_or_equal_column(row: Any, columns: dict[str, str], value: str) -> None:
    ((_, record),) = renamed([("train.jsonl:1", row)], columns)

    assert record["input"] == value
