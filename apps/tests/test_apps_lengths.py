"""Examples that are too long: detected before a run starts, and rejected, dropped or cut."""

import json
import shutil
from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from rl_apps.cli.driver import main
from rl_apps.embedded.prepare import EmbeddedRecipe, prepare_embedded
from rl_apps.programs import gsm8k_grpo, gsm8k_sft
from rl_apps.run.app import Run
from rl_apps.run.components import Components
from rl_apps.run.sequence_lengths import Lengths, longest_row
from rl_apps.settings.data import DataConfig, load_rows
from rl_apps.settings.device_layout import layout_of
from rl_contracts.chat.rendering import ChatRenderer
from rl_contracts.errors import ConfigError, DataError
from rl_contracts.testing.chat_formats import make_chat_tokenizer

SHORT, LONG = "Ann has 3 eggs.", "Ann has 3 eggs. " * 20  # one token per word; the model's context has 256


@pytest.fixture(scope="module")
def model():
    return str(prepare_embedded(1, EmbeddedRecipe(warm_up=None)))


@pytest.fixture(scope="module")
def tokenizer(model):
    return AutoTokenizer.from_pretrained(model)


def _talk(question, *answers):
    turns = [{"role": "user", "content": question}]
    return [*turns, *({"role": "assistant", "content": answer} for answer in answers)]


def _lengths(tokenizer, form, overlong, limit=60):
    return Lengths(DataConfig(overlong=overlong), form, tokenizer, limit, room=20)


def _rows(form):
    """Three examples: the first fits, the second has a long completion (except in form `rl`), the third a long
    question."""
    if form == "rl":
        return [{"messages": _talk(SHORT)}, {"messages": _talk(SHORT)}, {"messages": _talk(LONG + "How many?")}]
    if form == "sft":
        return [{"messages": _talk(*texts)} for texts in ((SHORT, SHORT), (SHORT, LONG), (LONG, SHORT))]
    wrong = "Ann has 4 eggs."
    texts = ((SHORT, SHORT, wrong), (SHORT, LONG, wrong), (LONG, SHORT, wrong))
    return [{"chosen": _talk(question, good), "rejected": _talk(question, bad)} for question, good, bad in texts]


def test_fit_reject_reports_number_longest_and_limit(tokenizer):
    sentence = r"^2 of 3 examples \(train\) have more than 60 tokens.*; the longest has 1\d\d; the first is example"
    with pytest.raises(DataError, match=sentence):
        _lengths(tokenizer, "sft", "reject").fit(_rows("sft"), "train")


@pytest.mark.parametrize(("form", "fitting"), [("rl", [0, 1]), ("sft", [0]), ("pairs", [0])])
def test_fit_drop_removes_long_examples_and_reports_them(tokenizer, form, fitting):
    rows = _rows(form)
    selected, sentence = _lengths(tokenizer, form, "drop").fit(rows, "train")

    assert list(selected) == selected[:] == [rows[number] for number in fitting]
    assert sentence.endswith(f": 0 truncated, {3 - len(fitting)} dropped")


@pytest.mark.parametrize("form", ["sft", "pairs"])
def test_fit_truncate_cuts_completions_and_drops_empty_ones(tokenizer, form):
    rows = _rows(form)
    selected, sentence = _lengths(tokenizer, form, "truncate").fit(rows, "train")

    assert list(selected) == rows[:2]
    assert sentence.endswith(": 1 truncated, 1 dropped")


def test_fit_truncate_cuts_the_beginning_of_a_prompt(tokenizer):
    selected, sentence = _lengths(tokenizer, "rl", "truncate").fit(_rows("rl"), "train")

    assert len(selected) == 3
    assert len(ChatRenderer(tokenizer).render(selected[2]["messages"])) <= 60 - 20
    assert selected[2]["messages"][-1]["content"].endswith("How many?")
    assert sentence.endswith(": 1 truncated, 0 dropped")


@pytest.mark.parametrize("form", ["rl", "sft"])
def test_fit_counts_tokens_of_tools(form):
    function = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
    row = {"messages": _talk("a", "b")[: 1 + (form == "sft")], "tools": [{"type": "function", "function": function}]}

    rows, sentence = _lengths(make_chat_tokenizer("gemma3"), form, "drop", limit=100).fit(
        [row, {**row, "tools": []}], "train"
    )

    assert len(rows) == 1
    assert "1 dropped" in sentence


@pytest.mark.parametrize("form", ["rl", "pairs"])
def test_fit_example_not_rendered_whole_is_rejected(form):
    hidden = [{"role": "developer", "content": "Be brief."}]
    rows = [_rows(form)[0], {k: hidden + v if isinstance(v, list) else v for k, v in _rows(form)[0].items()}]

    with pytest.raises(DataError, match="example 1: message 0"):
        _lengths(make_chat_tokenizer("llama3"), form, "drop", limit=1000).fit(
            [{**r, "prompt_id": i} for i, r in enumerate(rows)], "train"
        )


def test_fit_ignores_columns_for_the_reward(tokenizer):
    rows = [{"messages": _talk(SHORT), "chosen": LONG, "rejected": 3}]

    assert _lengths(tokenizer, "rl", "reject").fit(rows, "train") == (rows, "")


def test_fit_without_any_fitting_example_is_rejected(tokenizer):
    with pytest.raises(DataError, match="no example remains"):
        _lengths(tokenizer, "sft", "drop").fit(_rows("sft")[1:], "train")


def test_longest_row_is_limited_by_the_context(model, tmp_path):
    assert longest_row(DataConfig(), model) == 256
    assert longest_row(DataConfig(max_length=99), model) == 99
    assert longest_row(DataConfig(), str(tmp_path)) == 2048
    with pytest.raises(ConfigError, match=f"data.max_length: expected at most 256, the context of {model}, found 257"):
        longest_row(DataConfig(max_length=257), model)


@pytest.fixture
def data(tmp_path):
    rows = [{"question": SHORT, "answer": "#### 3"}, {"question": LONG * 4, "answer": "#### 3"}]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [f"data.path={tmp_path}", "data.name=gsm8k", "data.batch_size=1"]


@pytest.mark.parametrize("app", ["gsm8k-grpo", "gsm8k-sft"])
def test_examples_beyond_the_context_are_rejected_before_start(capsys, tmp_path, model, data, app):
    assert main(app, [*data, f"model.path={model}", f"run_dir={tmp_path / 'run'}"]) == 2

    assert "1 of 2 examples (train) have more than 256 tokens" in capsys.readouterr().err
    # the trial episode has run its reward
    assert all(log.name.startswith("reward-") for log in (tmp_path / "run").glob("logs/*"))


def test_dry_run_reports_dropped_examples_and_a_larger_batch(capsys, model, data):
    arguments = [*data, f"model.path={model}", "data.overlong=drop", "data.batch_size=2"]
    assert main("gsm8k-grpo", ["--dry-run", *arguments]) == 0
    out = capsys.readouterr().out
    assert "data.overlong=drop: 1 of 2 examples (train) have more than 256 tokens" in out
    assert "data.overlong=drop: 1 of 2 examples (test)" in out
    assert "data.batch_size=2 exceeds the 1 examples of the data, so every step repeats" in out


def test_components_rows_drops_long_examples(tmp_path, model, data):
    config = gsm8k_grpo.APP.config([*data, f"model.path={model}", "data.overlong=drop"])
    with Components(Run(config, layout_of("fsdp:d1", "optional"), tmp_path, "cpu")) as components:
        assert [row["messages"][0]["content"] for row in components.rows("train", "rl")] == [SHORT]
        assert components.workflow(len).max_length == 256


def test_engine_schedule_spans_the_steps_of_the_epochs(tmp_path, model, data):
    arguments = [*data, f"model.path={model}", "data.overlong=drop", "data.batch_size=1", "total_epochs=3"]
    config = gsm8k_sft.APP.config([*arguments, "actor.dtype=float32", "actor.optimizer.schedule=linear"])
    with Components(Run(config, layout_of("fsdp:d1", "optional"), tmp_path, "cpu")) as components:
        components.rows("train", "sft")

        assert components.engine()._spec.total_steps == 3


def test_example_with_a_token_without_embedding_is_rejected(model, tmp_path, capsys):
    larger = shutil.copytree(model, tmp_path / "larger")
    larger_tokenizer = AutoTokenizer.from_pretrained(larger)
    larger_tokenizer.add_tokens(["<|new|>"])
    larger_tokenizer.save_pretrained(larger)
    rows = [{"question": text, "answer": "#### 3"} for text in (SHORT, "Ann has <|new|> eggs.")]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arguments = [f"data.path={tmp_path}", "data.name=gsm8k", "data.batch_size=1", "evaluation.examples=0"]

    assert main("gsm8k-grpo", ["--dry-run", *arguments, f"model.path={larger}"]) == 2

    assert "example 1 has the token '<|new|>'" in capsys.readouterr().err


def test_together_counts_both_sides_of_a_pair(tokenizer):
    lengths = _lengths(tokenizer, "pairs", "drop")
    row = _rows("pairs")[0]

    assert lengths.together(row) == sum(map(len, lengths.ids(row))) > lengths.tokens(row)


def test_load_rows_with_one_file_for_both_splits_is_rejected(tmp_path, data):
    file = (tmp_path / "train.jsonl").rename(tmp_path / "all.jsonl")
    config = DataConfig(name="gsm8k", path=str(file))

    with pytest.raises(ConfigError, match=r"data\.path"):
        load_rows(config, "test", "rl", 0)
    with pytest.raises(ConfigError, match=r"data\.test_split"):
        load_rows(replace(config, path=str(tmp_path), test_split="train"), "test", "rl", 0)
    assert len(load_rows(config, "train", "rl", 0)) == 2
