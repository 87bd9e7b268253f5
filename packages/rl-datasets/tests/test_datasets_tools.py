"""Tools of examples, and the nulls that Arrow adds to them and to tool calls."""

import json
from pathlib import Path
from typing import Any

import pytest

from rl_contracts.errors import DataError
from rl_datasets import GSM8K, HHRLHF, Chat

USER = {"role": "user", "content": "Weather in Ulm?"}
ANSWER = {"role": "assistant", "content": "Rain."}


def tool(name: str, parameter: str) -> dict[str, Any]:
    properties = {parameter: {"type": "string"}}
    function = {"name": name, "parameters": {"type": "object", "properties": properties, "required": [parameter]}}
    return {"type": "function", "function": function}


def talk(name: str, **arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "x"}, ANSWER]


WEATHER, STOCK = tool("weather", "town"), tool("stock", "ticker")


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    "columns",
    [
        {"available_tools": json.dumps([WEATHER, STOCK])},
        {"tools": [json.dumps(WEATHER), json.dumps(STOCK)]},
        {"tools": [WEATHER["function"], STOCK["function"]]},
        {"tools": None, "tool_defs": [WEATHER, STOCK]},
        {"Tools": [WEATHER, STOCK]},
        {"tools": [WEATHER, STOCK], "functions": [WEATHER["function"], STOCK["function"]]},
    ],
)
def test_tools_of_any_format_are_schemas_in_the_example(tmp_path: Path, columns: dict[str, Any]) -> None:
    chat = write(tmp_path / "a.jsonl", {"messages": [USER, ANSWER], **columns})
    pair = write(tmp_path / "b.jsonl", {"prompt": "Weather?", "chosen": "Rain.", "rejected": "Sun.", **columns})
    sums = write(tmp_path / "c.jsonl", {"question": "2?", "answer": "2", **columns})

    rows = [Chat(chat, form="rl"), Chat(chat, form="sft"), HHRLHF(pair), GSM8K(sums), GSM8K(sums, form="sft")]
    assert [data[0]["tools"] for data in rows] == [[WEATHER, STOCK]] * 5


@pytest.mark.parametrize(("column", "empty"), [("tools", []), ("tools", ""), ("functions", "null")])
def test_empty_tools_column_adds_no_entry(tmp_path: Path, column: str, empty: Any) -> None:
    file = write(tmp_path / "a.jsonl", {"messages": [USER, ANSWER], column: empty})

    assert Chat(file, form="sft")[0].keys() == {"prompt_id", "messages"}
    assert Chat(file, form="rl")[0].keys() == {"prompt_id", "messages", "answer"}


@pytest.mark.parametrize("columns", [{"tools": ["search"]}, {"tools": [WEATHER], "tool_defs": [STOCK]}])
def test_tools_that_are_not_schemas_or_differ_are_rejected(tmp_path: Path, columns: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl:1: .*tool"):
        Chat(write(tmp_path / "a.jsonl", {"messages": [USER, ANSWER], **columns}))


def test_parquet_nulls_in_calls_and_tools_are_removed(tmp_path: Path) -> None:
    import datetime

    import pyarrow as pa
    import pyarrow.parquet as pq

    day = datetime.date(2026, 1, 2)  # not a JSON value
    rows = [
        {"messages": talk("weather", town="Ulm"), "tools": [WEATHER, STOCK], "extra": {"a": 1}, "when": day},
        {"messages": talk("stock", ticker="ACME"), "tools": [WEATHER, STOCK], "extra": {"b": 2}},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")

    data = Chat(tmp_path, form="sft")
    assert [row["messages"] for row in data] == [row["messages"] for row in rows]
    assert data[0]["tools"] == [WEATHER, STOCK]
    examples = list(Chat(tmp_path))
    assert [row["extra"] for row in examples] == [{"a": 1, "b": None}, {"a": None, "b": 2}]
    assert "when" not in examples[0]


def test_json_nulls_in_calls_and_tools_are_kept(tmp_path: Path) -> None:
    nullable = tool("weather", "town") | {"strict": None}
    messages = talk("weather", town=None)

    row = Chat(write(tmp_path / "train.jsonl", {"messages": messages, "tools": [nullable]}), form="sft")[0]

    assert (row["messages"], row["tools"]) == (messages, [nullable])


def read_calls(tmp_path: Path, *calls: Any) -> list[dict[str, Any]]:
    """Return the tool calls of an example as `Chat` reads them."""
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": list(calls)}]
    return Chat(write(tmp_path / "a.jsonl", {"messages": messages}), form="sft")[0]["messages"][1]["tool_calls"]


@pytest.mark.parametrize(
    "call",
    [
        {"name": "weather", "arguments": '{"town": "Ulm"}'},
        {"type": "tool_use", "name": "weather", "input": {"town": "Ulm"}},
        {"name": "weather", "arguments": {}, "parameters": {"town": "Ulm"}},
        {"function": {"name": "weather"}, "arguments": {"town": "Ulm"}},
    ],
)
def test_tool_call_arguments_of_any_name_are_read(tmp_path: Path, call: dict[str, Any]) -> None:
    expected = {"type": "function", "id": "a", "function": {"name": "weather", "arguments": {"town": "Ulm"}}}

    assert read_calls(tmp_path, {**call, "id": "a"}) == [expected]


@pytest.mark.parametrize("arguments", [{"arguments": ""}, {}])
def test_tool_call_without_arguments_has_an_empty_object(tmp_path: Path, arguments: dict[str, Any]) -> None:
    assert read_calls(tmp_path, {"name": "now", **arguments})[0]["function"] == {"name": "now", "arguments": {}}


@pytest.mark.parametrize(
    ("call", "pattern"),
    [
        ({"name": "weather", "arguments": "{'town': 'Ulm'}"}, "town"),
        ({"name": "weather", "arguments": {"town": "Ulm"}, "parameters": {"town": "Bonn"}}, "parameters"),
        ({"name": "weather", "kwargs": {"town": "Ulm"}}, "kwargs"),
    ],
)
def test_tool_call_with_unsupported_entries_is_rejected(tmp_path: Path, call: dict[str, Any], pattern: str) -> None:
    with pytest.raises(DataError, match=rf"a\.jsonl:1: .*{pattern}"):
        read_calls(tmp_path, call)


XLAM = [{"name": "weather", "arguments": {"town": "Ulm"}}, {"name": "stock", "arguments": {"ticker": "ACME"}}]


@pytest.mark.parametrize(("answer", "calls"), [(XLAM, XLAM), (json.dumps(XLAM[0]), XLAM[:1])])
def test_chat_answer_with_calls_is_a_turn_with_tool_calls(tmp_path: Path, answer: Any, calls: Any) -> None:
    row = {"query": "Weather?", "answers": answer, "tools": json.dumps([WEATHER["function"], STOCK["function"]])}
    file, columns = write(tmp_path / "a.jsonl", row), {"messages": "query", "answer": "answers"}

    turn = Chat(file, form="sft", columns=columns)[0]["messages"][1]

    assert turn == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": call} for call in calls],
    }
    assert Chat(file, columns=columns)[0]["answer"] == answer


@pytest.mark.parametrize(
    ("answer", "tools"),
    [
        (json.dumps(XLAM), []),
        ('[{"name": "Ann"}]', [WEATHER]),
        ("[]", [WEATHER]),
    ],
)
def test_chat_answer_with_other_json_is_text(tmp_path: Path, answer: str, tools: list[Any]) -> None:
    row = {"messages": "Weather?", "answer": answer, "tools": tools}

    turn = Chat(write(tmp_path / "a.jsonl", row), form="sft")[0]["messages"][1]

    assert turn == {"role": "assistant", "content": answer}
