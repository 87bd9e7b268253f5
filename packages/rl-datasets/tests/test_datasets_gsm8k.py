import json
import subprocess
import sys
from pathlib import Path

import pytest

from rl_contracts.errors import ConfigError, DataError
from rl_datasets import GSM8K

ROWS = [
    {"question": "Ann has 3 eggs and finds 4. How many has she?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"},
    {"question": "Bo has 9 nuts and eats 2. How many are left?", "answer": "9 - 2 = <<9-2=7>>7\n#### 7"},
    {"question": "What is half of 10?", "answer": 5},
]


def write_jsonl(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: list[dict[str, object]]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    write_jsonl(tmp_path / "test.jsonl", ROWS[:1])
    return tmp_path


def test_gsm8k_rl_form_has_question_and_answer(directory):
    data = GSM8K(directory, "train", "rl")

    assert len(data) == 3
    assert data[1] == {
        "prompt_id": 1,
        "messages": [{"role": "user", "content": ROWS[1]["question"]}],
        "answer": ROWS[1]["answer"],
    }
    assert data[2]["answer"] == "5"


def test_gsm8k_sft_form_has_both_messages(directory):
    assert GSM8K(str(directory), "test", "sft")[0] == {
        "prompt_id": 0,
        "messages": [
            {"role": "user", "content": ROWS[0]["question"]},
            {"role": "assistant", "content": ROWS[0]["answer"]},
        ],
    }


def test_gsm8k_is_a_sequence_that_copies_its_examples(directory):
    data = GSM8K(directory)
    data[0]["messages"][0]["content"] = "changed"

    assert data[0] == next(iter(data)) == data[-3] == data[:2][0]
    assert [row["prompt_id"] for row in data] == [0, 1, 2]
    with pytest.raises(IndexError):
        data[3]


def test_gsm8k_from_a_file_of_any_name_serves_any_split(tmp_path):
    file = write_jsonl(tmp_path / "odd.name.jsonl", ROWS)

    assert len(GSM8K(file, "train")) == len(GSM8K(file, "test")) == 3


def test_gsm8k_parquet_shards_in_subset_keep_their_order(tmp_path):
    for i in range(2):
        write_parquet(tmp_path / "main" / f"test-0000{i}-of-00002.parquet", [ROWS[i]])

    assert list(GSM8K(tmp_path, "test")) == list(GSM8K(write_jsonl(tmp_path / "x.jsonl", ROWS[:2]), "test"))


def test_gsm8k_missing_path_error_names_it(tmp_path):
    for path in (tmp_path / "none", "./none/gsm8k", "some/file.jsonl", "none"):
        with pytest.raises(DataError, match="found nothing there") as error:
            GSM8K(path)
        assert str(path) in str(error.value)


def test_gsm8k_unknown_extension_error_names_it(tmp_path):
    (tmp_path / "data.csv").write_text("question,answer\n")

    with pytest.raises(
        DataError, match=r"data\.csv: expected a \.jsonl or \.parquet file, found the extension '\.csv'"
    ):
        GSM8K(tmp_path / "data.csv")


def test_gsm8k_missing_split_error_lists_the_files(directory):
    with pytest.raises(DataError, match=r"expected validation\.jsonl .* found test\.jsonl, train\.jsonl"):
        GSM8K(directory, "validation")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('{"question": "a", "answer": " "}', "expected text in the column 'answer', found ' '"),
        ('{"question": "a", "answer": ["7"]}', "expected text in the column 'answer', found"),
        ("{}", "found no columns"),
        ("[1]", "expected one JSON object per line"),
        ('{"question": "a", ', "expected one JSON object per line"),
    ],
)
def test_gsm8k_incomplete_example_error_names_file_and_line(tmp_path, bad, message):
    file = tmp_path / "train.jsonl"
    file.write_text(f"{json.dumps(ROWS[0])}\n\n{bad}\n{json.dumps(ROWS[1])}\n")

    with pytest.raises(DataError, match=message) as error:
        GSM8K(tmp_path)
    assert str(error.value).startswith(f"{file}:3: ")


def test_gsm8k_incomplete_parquet_row_error_names_file_and_row(tmp_path):
    file = write_parquet(tmp_path / "train.parquet", [ROWS[0], {"question": "a", "answer": None}])

    with pytest.raises(DataError, match="row 1: expected text in the column 'answer', found None") as error:
        GSM8K(tmp_path)
    assert str(file) in str(error.value)


def test_gsm8k_unreadable_file_error_names_it(tmp_path):
    (tmp_path / "train.jsonl").write_bytes(b"\xff\xfe{}")
    (tmp_path / "test.parquet").write_text("no parquet")
    (tmp_path / "empty.jsonl").write_text("\n")

    with pytest.raises(DataError, match=r"train\.jsonl:1: cannot be read as UTF-8"):
        GSM8K(tmp_path, "train")
    with pytest.raises(DataError, match=r"test\.parquet: cannot be read as parquet"):
        GSM8K(tmp_path, "test")
    with pytest.raises(DataError, match=r"empty\.jsonl: expected examples in the split 'train', found none"):
        GSM8K(tmp_path / "empty.jsonl")


@pytest.mark.slow
def test_gsm8k_unreachable_hub_is_not_retried_and_names_sources(tmp_path, monkeypatch):
    code = "import rl_datasets; rl_datasets.GSM8K('no-such-owner/nothing', 'train')"
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "PATH": ""}

    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)

    assert done.returncode != 0
    assert "Retrying" not in done.stderr
    assert "DataError: no-such-owner/nothing: expected a directory" in done.stderr
    assert "Without a network, set data.path to a directory that contains train.jsonl" in done.stderr
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("rl_datasets.files._is_hub_reachable", lambda hub_id: pytest.fail(f"contacted for {hub_id}"))
    with pytest.raises(DataError, match="no-such-owner/nothing"):
        GSM8K("no-such-owner/nothing", "train")


def test_gsm8k_reads_file_with_byte_order_mark(tmp_path):
    file = tmp_path / "bom.jsonl"
    file.write_text(json.dumps({"question": "1 + 1?", "answer": "#### 2"}), encoding="utf-8-sig")

    assert GSM8K(file)[0]["answer"] == "#### 2"


def test_gsm8k_unknown_form_or_option_is_rejected(directory):
    with pytest.raises(ConfigError, match=r"data\.name=gsm8k: expected the form rl or sft, found 'dpo'"):
        GSM8K(directory, form="dpo")
    with pytest.raises(
        ConfigError,
        match=r"data\.options of data\.name=gsm8k: expected invalid_text, subset, instruction, found instuction",
    ):
        GSM8K(directory, instuction="x")


def test_gsm8k_from_jsonl_imports_no_heavy_library(directory):
    code = (
        f"import sys, rl_datasets; len(rl_datasets.GSM8K({str(directory)!r}));"
        "assert not {'torch', 'datasets', 'pyarrow', 'pandas', 'numpy'} & set(sys.modules)"
    )

    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
