"""Preference pairs in HH-RLHF's format from files, and generated ones."""

import json
import random

import pytest

from rl_contracts.errors import ConfigError, DataError
from rl_datasets import HHRLHF, WordProblemPairs
from rl_datasets.conversations import parse_dialogue
from rl_datasets.word_problems import MISTAKES, WordProblems, with_mistake

DIALOGUE = "\n\nHuman: How are you?\n\nAssistant: Well.\n\nHuman: And now?\n\nAssistant:"
ROW = {"chosen": f"{DIALOGUE} Still well.", "rejected": f"{DIALOGUE} Go away."}


def _file(tmp_path, *rows):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_hh_rlhf_dialogues_become_messages(tmp_path):
    data = HHRLHF(_file(tmp_path, ROW))

    assert len(data) == 1
    assert data[0]["chosen"] == [
        {"role": "user", "content": "How are you?"},
        {"role": "assistant", "content": "Well."},
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": "Still well."},
    ]
    assert data[0]["rejected"][-1] == {"role": "assistant", "content": "Go away."}
    assert data[0]["rejected"][:-1] == data[0]["chosen"][:-1]


def _talk(*texts):
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, texts, strict=False)]


SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"name": "add", "arguments": {"a": 2}}


@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected"),
    [
        (_talk("2 + 2?"), _talk("2 + 2?", "4"), _talk(" 2 + 2?", "5")),
        ([SYSTEM, *_talk("2 + 2?")], _talk("2 + 2?", "4"), [SYSTEM, *_talk("2 + 2?", "5")]),
        ("2 + 2?", [SYSTEM, *_talk("2 + 2?", "4")], [SYSTEM, *_talk("2 + 2?", "5")]),
        (_talk("2 + 2?"), _talk("2 + 2?", "4")[1:], {"role": "assistant", "content": "5"}),
        (_talk("2 + 2?", ""), "4", "5"),
        ("2 + 2?", _talk("2 + 2?", "4"), "5"),
        ("\n\nHuman: 2 + 2?\n\nAssistant:", " 4", " 5"),
        ("2 + 2?\n\nAssistant:", " 4", " 5"),
        ("Human: 2 + 2?", "Human: 2 + 2?\n\nAssistant: 4", "Assistant: 5"),
        ([{**_talk("2 + 2?")[0], "name": "Ann"}], _talk("2 + 2?", "4"), _talk("2 + 2?", "5")),
        (None, *([{"turn": n, "id": n, **m} for m in _talk("2 + 2?", n)] for n in "45")),
        (
            json.dumps(_talk("2 + 2?")),
            json.dumps(_talk("2 + 2?", "4")),
            json.dumps({"role": "assistant", "content": "5"}),
        ),
    ],
)
def test_hh_rlhf_prompt_is_in_each_conversation_once(tmp_path, prompt, chosen, rejected):
    row = HHRLHF(_file(tmp_path, {"prompt": prompt, "chosen": chosen, "rejected": rejected}))[0]

    turns = [
        [(m["role"], m["content"].strip()) for m in row[s] if m["role"] != "system"] for s in ("chosen", "rejected")
    ]
    assert turns == [[("user", "2 + 2?"), ("assistant", answer)] for answer in ("4", "5")]


def test_hh_rlhf_text_without_a_mark_at_the_start_is_one_turn(tmp_path):
    text = "Here is one:\n\nHuman: Hello!\n\nAssistant: Hi"
    row = HHRLHF(_file(tmp_path, {"prompt": f"Continue. {text}", "chosen": text, "rejected": "No."}))[0]

    assert row["chosen"] == _talk(f"Continue. {text}", text)


def test_hh_rlhf_messages_are_read_like_chat_data(tmp_path):
    call = {"name": "weather", "arguments": '{"town": "Ulm"}'}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Weather "}, {"type": "text", "text": "in Ulm?"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": call}], "name": None},
        {"from": "observation", "value": "rain"},
    ]
    last_turns = ({"role": "assistant", "content": text, "reasoning_content": "so"} for text in ("Rain.", "Sun."))
    row = HHRLHF(_file(tmp_path, dict(zip(("chosen", "rejected"), ([*turns, a] for a in last_turns), strict=True))))[0]

    function = {"name": "weather", "arguments": {"town": "Ulm"}}
    assert row["chosen"] == [
        {"role": "user", "content": "Weather in Ulm?"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "a", "function": function}]},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "Rain.", "reasoning_content": "so"},
    ]


def test_hh_rlhf_sides_may_differ_from_an_earlier_assistant_turn(tmp_path):
    sides = {"chosen": _talk("1?", "a", "2?", "b"), "rejected": _talk("1?", "c", "3?", "d")}

    assert HHRLHF(_file(tmp_path, sides))[0]["rejected"] == sides["rejected"]


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": _talk("2 + 2?", "4"), "rejected": _talk("2 + 3?", "4")},
        {"chosen": [SYSTEM, *_talk("2 + 2?", "4")], "rejected": _talk("2 + 2?", "5")},
        {"chosen": _talk("2 + 2?", "4"), "rejected": _talk("2 + 2?", "4", "sure?", "No.")},
        {"prompt": "1 + 1?", "chosen": _talk("2 + 2?", "4"), "rejected": _talk("2 + 2?", "5")},
        {
            "prompt": [SYSTEM, *_talk("a")],
            "chosen": [{**SYSTEM, "content": "Long."}, *_talk("a", "b")],
            "rejected": "c",
        },
        {"prompt": _talk("2 + 2?", "It is"), "chosen": "4", "rejected": "5"},
        {"prompt": "What is 2 + 2?", "chosen": "What is 2 + 2? 4", "rejected": "What is 2 + 2? 5"},
        {"prompt": "2?", "chosen": {**_talk("", "4")[1], "id": 1}, "rejected": {**_talk("", "4")[1], "id": 2}},
        {"chosen": [{**_talk("a")[0], "tool_calls": [CALL]}, *_talk("", "b")[1:]], "rejected": _talk("a", "c")},
        {"chosen": "4", "rejected": "5"},
        {"prompt": "2 + 2?", "chosen": "\n\nAssistant:", "rejected": "5"},
    ],
)
def test_hh_rlhf_pair_without_one_question_and_two_answers_is_rejected(tmp_path, row):
    with pytest.raises(DataError, match=r"train\.jsonl:2"):
        HHRLHF(_file(tmp_path, ROW, row))


def test_hh_rlhf_one_answer_that_begins_with_the_prompt_is_accepted(tmp_path):
    row = HHRLHF(_file(tmp_path, {"prompt": "Hi", "chosen": "Hi there!", "rejected": "Hello"}))[0]

    assert row["chosen"] == _talk("Hi", "Hi there!")


def test_hh_rlhf_answers_may_differ_in_reasoning_or_calls(tmp_path):
    for entry in ({"reasoning_content": "so"}, {"thinking": "so"}, {"tool_calls": [CALL]}):
        question, answer = _talk("2 + 2?", "4")
        row = HHRLHF(_file(tmp_path, {"chosen": [question, answer | entry], "rejected": [question, answer]}))[0]

        assert row["chosen"][1].keys() - row["rejected"][1].keys() == entry.keys()


def test_hh_rlhf_copies_its_examples(tmp_path):
    data = HHRLHF(_file(tmp_path, ROW))
    data[0]["chosen"][0]["content"] = "changed"

    assert data[0]["chosen"][0]["content"] == "How are you?"
    assert data[:1][0]["chosen"][0]["content"] == "How are you?"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**ROW, "rejected": ROW["chosen"]}, "expected different chosen and rejected"),
        ({**ROW, "rejected": DIALOGUE}, "expected 'rejected' to end with an assistant turn"),
        (
            {"chosen": [_talk("2?")[0], {**_talk("", "2")[1], "weight": 0}], "rejected": _talk("2?", "3")},
            "expected 'chosen' to end with an assistant turn",
        ),
    ],
)
def test_hh_rlhf_invalid_pair_error_names_its_line(tmp_path, row, message):
    with pytest.raises(DataError, match=rf"train\.jsonl:2.*{message}"):
        HHRLHF(_file(tmp_path, ROW, row))


def test_hh_rlhf_unknown_form_or_option_is_rejected(tmp_path):
    path = _file(tmp_path, ROW)

    with pytest.raises(ConfigError, match="form"):
        HHRLHF(path, form="rl")
    with pytest.raises(ConfigError, match="found level"):
        HHRLHF(path, level=3)


def test_hh_rlhf_empty_file_is_rejected(tmp_path):
    with pytest.raises(DataError, match="found none"):
        HHRLHF(_file(tmp_path))


@pytest.mark.parametrize(
    ("text", "turns"),
    [
        ("\n\nHuman: a\n\nHuman: b\n\nAssistant: c", [("user", "a\n\nb"), ("assistant", "c")]),
        ("Human: a\n\nAssistant: ", [("user", "a")]),
        ("Human: a\nAssistant: b\nHuman: c\nAssistant:", [("user", "a"), ("assistant", "b"), ("user", "c")]),
        (
            "\n\nHuman: Write one.\n\nAssistant: Fine.\nHuman: a\nAssistant: b",
            [("user", "Write one."), ("assistant", "Fine.\nHuman: a\nAssistant: b")],
        ),
        ("Assistants: unite", []),
    ],
)
def test_parse_dialogue_splits_at_marks_and_joins_turns_of_one_role(text, turns):
    assert parse_dialogue(text) == [{"role": role, "content": content} for role, content in turns]


def test_word_problem_pairs_differ_only_in_the_answer():
    data = WordProblemPairs(seed=3, size=60)

    for row in data[:60]:
        assert row["chosen"][0] == row["rejected"][0]
        assert row["chosen"][1]["content"] != row["rejected"][1]["content"]
    assert {row["mistake"] for row in data[:60]} == set(MISTAKES)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_with_mistake_makes_only_that_mistake(mistake):
    for problem in WordProblems(seed=1, size=50).problems:
        right = problem.worked_answer()
        wrong = with_mistake(problem, mistake, random.Random(0))
        if mistake == "unfinished":
            assert right.startswith(wrong)
            assert "####" not in wrong
            continue
        assert wrong != right
        assert wrong.count("\n") == right.count("\n")
        sums = [line[2:].split(">>")[0].split("=") for line in wrong.splitlines()[:-1]]
        wrong_results = sum(eval(formula) != int(result) for formula, result in sums)
        assert wrong_results == (mistake == "result")


def test_word_problem_pairs_are_reproducible_with_disjoint_splits():
    assert WordProblemPairs(seed=1, size=20)[0] == WordProblemPairs(seed=1, size=20)[0]
    train, test = (
        {row["chosen"][0]["content"] for row in WordProblemPairs(split=s, size=200)[:200]} for s in ("train", "test")
    )
    assert not train & test
