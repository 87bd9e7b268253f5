"""Tools of rows, and the nulls that Arrow adds to them and to tool calls."""

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
        {"tools": [WEATHER, STOCK]},
        {"tools": json.dumps([WEATHER, STOCK])},
        {"tools": [json.dumps(WEATHER), json.dumps(STOCK)]},
        {"tools": [WEATHER["function"], STOCK["function"]]},
        {"tools": None, "tool_defs": [WEATHER, STOCK]},
        {"tools": [WEATHER, STOCK], "functions": [WEATHER["function"], STOCK["function"]]},
    ],
)
def test_tools_of_any_form_are_schemas_in_the_row(tmp_path: Path, columns: dict[str, Any]) -> None:
    chat = write(tmp_path / "a.jsonl", {"messages": [USER, ANSWER], **columns})
    pair = write(tmp_path / "b.jsonl", {"prompt": "Weather?", "chosen": "Rain.", "rejected": "Sun.", **columns})
    sums = write(tmp_path / "c.jsonl", {"question": "2?", "answer": "2", **columns})

    rows = [Chat(chat, form="rl"), Chat(chat, form="sft"), HHRLHF(pair), GSM8K(sums), GSM8K(sums, form="sft")]
    assert [data[0]["tools"] for data in rows] == [[WEATHER, STOCK]] * 5


@pytest.mark.parametrize("empty", [[], "[]", "null", "", None])
@pytest.mark.parametrize("column", ["tools", "functions"])
def test_tools_of_a_row_without_any_are_no_entry(tmp_path: Path, column: str, empty: Any) -> None:
    file = write(tmp_path / "a.jsonl", {"messages": [USER, ANSWER], column: empty})

    assert Chat(file, form="sft")[0].keys() == {"prompt_id", "messages"}
    assert Chat(file, form="rl")[0].keys() == {"prompt_id", "messages", "answer"}


@pytest.mark.parametrize("columns", [{"tools": ["search"]}, {"tools": [WEATHER], "tool_defs": [STOCK]}, {"tools": "a"}])
@pytest.mark.parametrize("form", ["rl", "sft"])
def test_tools_that_are_no_schemas_are_rejected(tmp_path: Path, form: str, columns: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl:1: .*tool"):
        Chat(write(tmp_path / "a.jsonl", {"messages": [USER, ANSWER], **columns}), form=form)


def test_parquet_nulls_in_calls_and_tools_are_removed(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {"messages": talk("weather", town="Ulm"), "tools": [WEATHER, STOCK], "extra": {"a": 1}},
        {"messages": talk("stock", ticker="ACME"), "tools": [WEATHER, STOCK], "extra": {"b": 2}},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")

    data = Chat(tmp_path, form="sft")
    assert [row["messages"] for row in data] == [row["messages"] for row in rows]
    assert data[0]["tools"] == [WEATHER, STOCK]
    assert [row["extra"] for row in Chat(tmp_path)] == [{"a": 1, "b": None}, {"a": None, "b": 2}]


def test_json_nulls_in_calls_and_tools_stay(tmp_path: Path) -> None:
    nullable = tool("weather", "town") | {"strict": None}
    messages = talk("weather", town=None)

    row = Chat(write(tmp_path / "train.jsonl", {"messages": messages, "tools": [nullable]}), form="sft")[0]

    assert (row["messages"], row["tools"]) == (messages, [nullable])
