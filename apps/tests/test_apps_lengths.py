"""Rows that are too long: found before anything starts, and refused, left out or cut."""

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

SHORT, LONG = "Ann has 3 eggs.", "Ann has 3 eggs. " * 20  # a word is a token; the model holds 256


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
    """Rows of which the first fits, the second has a long answer (but where answers are made), the third a long
    question."""
    if form == "rl":
        return [{"messages": _talk(SHORT)}, {"messages": _talk(SHORT)}, {"messages": _talk(LONG + "How many?")}]
    if form == "sft":
        return [{"messages": _talk(*texts)} for texts in ((SHORT, SHORT), (SHORT, LONG), (LONG, SHORT))]
    wrong = "Ann has 4 eggs."
    texts = ((SHORT, SHORT, wrong), (SHORT, LONG, wrong), (LONG, SHORT, wrong))
    return [{"chosen": _talk(asked, good), "rejected": _talk(asked, bad)} for asked, good, bad in texts]


@pytest.mark.parametrize(("form", "too_long"), [("rl", 1), ("sft", 2), ("pairs", 2)])
def test_rows_that_are_too_long_are_refused_with_how_many_the_longest_and_the_limit(tokenizer, form, too_long):
    sentence = (
        rf"^{too_long} of 3 examples \(train\) have more than 60 tokens.*; the longest has 1\d\d; the first is row"
    )
    with pytest.raises(DataError, match=sentence):
        _lengths(tokenizer, form, "refuse").fit(_rows(form), "train")


@pytest.mark.parametrize(("form", "left"), [("rl", [0, 1]), ("sft", [0]), ("pairs", [0])])
def test_rows_that_are_too_long_are_left_out_and_told(tokenizer, form, left):
    rows = _rows(form)
    kept, sentence = _lengths(tokenizer, form, "drop").fit(rows, "train")

    assert list(kept) == kept[:] == [rows[number] for number in left]
    assert sentence.endswith(f": 0 truncated, {3 - len(left)} dropped")


@pytest.mark.parametrize("form", ["sft", "pairs"])
def test_rows_whose_answer_is_too_long_are_cut_and_those_without_any_of_it_left_out(tokenizer, form):
    rows = _rows(form)
    kept, sentence = _lengths(tokenizer, form, "truncate").fit(rows, "train")

    assert list(kept) == rows[:2]
    assert sentence.endswith(": 1 truncated, 1 dropped")


def test_prompt_that_is_too_long_loses_its_beginning_and_leaves_room_for_an_answer(tokenizer):
    kept, sentence = _lengths(tokenizer, "rl", "truncate").fit(_rows("rl"), "train")

    assert len(kept) == 3
    assert len(ChatRenderer(tokenizer).render(kept[2]["messages"])) <= 60 - 20
    assert kept[2]["messages"][-1]["content"].endswith("How many?")
    assert sentence.endswith(": 1 truncated, 0 dropped")


@pytest.mark.parametrize("form", ["rl", "sft"])
def test_tools_of_a_row_count_as_its_tokens(form):
    function = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
    row = {"messages": _talk("a", "b")[: 1 + (form == "sft")], "tools": [{"type": "function", "function": function}]}

    rows, sentence = _lengths(make_chat_tokenizer("gemma3"), form, "drop", limit=100).fit(
        [row, {**row, "tools": []}], "train"
    )

    assert len(rows) == 1
    assert "1 dropped" in sentence


@pytest.mark.parametrize("form", ["rl", "sft", "pairs"])
def test_row_that_the_template_does_not_show_whole_is_refused_by_name(form):
    hidden = [{"role": "developer", "content": "Be brief."}]
    rows = [_rows(form)[0], {k: hidden + v if isinstance(v, list) else v for k, v in _rows(form)[0].items()}]

    with pytest.raises(DataError, match="row 1: message 0"):
        _lengths(make_chat_tokenizer("llama3"), form, "drop", limit=1000).fit(
            [{**r, "prompt_id": i} for i, r in enumerate(rows)], "train"
        )


def test_rows_that_all_fit_are_handed_on_as_they_are(tokenizer):
    rows = _rows("sft")[:1]
    assert _lengths(tokenizer, "sft", "drop").fit(rows, "train") == (rows, "")


def test_columns_that_go_along_to_a_reward_are_not_measured(tokenizer):
    rows = [{"messages": _talk(SHORT), "chosen": LONG, "rejected": 3}]

    assert _lengths(tokenizer, "rl", "refuse").fit(rows, "train") == (rows, "")


def test_data_of_which_nothing_is_left_is_refused(tokenizer):
    with pytest.raises(DataError, match="none is left"):
        _lengths(tokenizer, "sft", "drop").fit(_rows("sft")[1:], "train")


def test_longest_row_is_what_the_model_holds_and_more_is_refused(model, tmp_path):
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
def test_command_with_rows_beyond_the_models_context_is_refused_before_anything_starts(
    capsys, tmp_path, model, data, app
):
    assert main(app, [*data, f"model.path={model}", f"run_dir={tmp_path / 'run'}"]) == 2

    assert "1 of 2 examples (train) have more than 256 tokens" in capsys.readouterr().err
    assert all(log.name.startswith("reward-") for log in (tmp_path / "run").glob("logs/*"))  # it was tried


def test_dry_run_says_which_rows_are_left_out(capsys, model, data):
    assert main("gsm8k-grpo", ["--dry-run", *data, f"model.path={model}", "data.overlong=drop"]) == 0
    out = capsys.readouterr().out
    assert "data.overlong=drop: 1 of 2 examples (train) have more than 256 tokens" in out
    assert "data.overlong=drop: 1 of 2 examples (test)" in out
    assert "repeats some" not in out


def test_step_of_more_prompts_than_there_are_rows_is_told(capsys, model, data):
    words = [*data, f"model.path={model}", "data.overlong=drop", "data.batch_size=2"]
    assert main("gsm8k-grpo", ["--dry-run", *words]) == 0
    assert "data.batch_size=2 exceeds the 1 examples of the data, so every step repeats" in capsys.readouterr().out


@pytest.mark.parametrize("app", [gsm8k_grpo.APP, gsm8k_sft.APP], ids=lambda app: app.name)
def test_trainers_learn_from_the_rows_that_are_left(tmp_path, model, data, app):
    config = app.config([*data, f"model.path={model}", "data.overlong=drop"])
    with Components(Run(config, layout_of("fsdp:d1", "optional"), tmp_path, "cpu")) as parts:
        assert [row["messages"][0]["content"] for row in parts.rows("train", app.form)] == [SHORT]
        assert parts.workflow(len).max_length == 256


def test_engine_schedule_spans_the_steps_that_the_epochs_have(tmp_path, model, data):
    words = [*data, f"model.path={model}", "data.overlong=drop", "data.batch_size=1", "total_epochs=3"]
    config = gsm8k_sft.APP.config([*words, "actor.minibatches=1", "actor.optimizer.schedule=linear"])
    with Components(Run(config, layout_of("fsdp:d1", "optional"), tmp_path, "cpu")) as parts:
        parts.rows("train", "sft")

        assert parts.engine()._spec.total_steps == 3


def test_row_with_a_token_beyond_the_embedding_is_refused_by_its_name(model, tmp_path, capsys):
    larger = shutil.copytree(model, tmp_path / "larger")
    larger_tokenizer = AutoTokenizer.from_pretrained(larger)
    larger_tokenizer.add_tokens(["<|new|>"])
    larger_tokenizer.save_pretrained(larger)
    rows = [{"question": text, "answer": "#### 3"} for text in (SHORT, "Ann has <|new|> eggs.")]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = [f"data.path={tmp_path}", "data.name=gsm8k", "data.batch_size=1", "evaluation.rows=0"]

    assert main("gsm8k-grpo", ["--dry-run", *words, f"model.path={larger}"]) == 2

    assert "row 1 has the token '<|new|>'" in capsys.readouterr().err


def test_together_of_a_pair_has_the_tokens_of_both_sides(tokenizer):
    lengths = _lengths(tokenizer, "pairs", "drop")
    row = _rows("pairs")[0]

    assert lengths.together(row) == sum(map(len, lengths.ids(row))) > lengths.tokens(row)


def test_load_rows_of_one_file_for_both_splits_is_refused(tmp_path, data):
    file = (tmp_path / "train.jsonl").rename(tmp_path / "all.jsonl")
    config = DataConfig(name="gsm8k", path=str(file))

    with pytest.raises(ConfigError, match=r"data\.path"):
        load_rows(config, "test", "rl", 0)
    with pytest.raises(ConfigError, match=r"data\.test_split"):
        load_rows(replace(config, path=str(tmp_path), test_split="train"), "test", "rl", 0)
    assert len(load_rows(config, "train", "rl", 0)) == 2
