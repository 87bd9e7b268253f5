import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_contracts.errors import ConfigError
from rl_datasets.word_problems import (
    ADDING,
    MAX_LEVEL,
    OPERATION_OF,
    TAKING,
    Problem,
    Step,
    WordProblems,
    draw_problem,
    split_of,
)

SEEDS = st.integers(0, 2**32)
MARK = re.compile(r"<<(\d+)([+-])(\d+)=(\d+)>>(\d+)")


def test_problem_with_two_steps_reads_like_gsm8k() -> None:
    problem = Problem("Ann", "eggs", 11, (Step("finds", 3), Step("sells", 4)))

    assert problem.question == "Ann has 11 eggs, finds 3, then sells 4. How many eggs does Ann have?"
    assert problem.worked_answer() == "<<11+3=14>>14\n<<14-4=10>>10\n#### 10"


def test_problem_with_one_or_three_steps_joins_its_clauses() -> None:
    one = Problem("Ben", "pens", 5, (Step("loses", 1),))
    three = Problem("Ben", "pens", 12, (Step("loses", 1), Step("wins", 2), Step("gets", 3)))

    assert one.question.startswith("Ben has 5 pens and loses 1. How many")
    assert three.question.startswith("Ben has 12 pens, loses 1, wins 2, then gets 3. How many")


@given(seed=SEEDS, level=st.integers(1, MAX_LEVEL), data=st.data())
def test_worked_answer_is_well_formed_and_never_negative(seed: int, level: int, data: st.DataObject) -> None:
    problem = draw_problem(random.Random(seed), level)
    operations = data.draw(st.lists(st.sampled_from("+-"), min_size=level, max_size=level))

    *lines, last = problem.worked_answer(operations).split("\n")

    value = problem.start
    for line, step, operation in zip(lines, problem.steps, operations, strict=True):
        match = MARK.fullmatch(line)
        assert match is not None
        first_operand, operator, second_operand, result, repeated_result = match.groups()
        assert (int(first_operand), operator, int(second_operand)) == (value, operation, step.amount)
        value = value + step.amount if operation == "+" else value - step.amount
        assert int(result) == int(repeated_result) == value >= 0
    assert last == f"#### {value}"


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, levels=st.sets(st.integers(1, MAX_LEVEL), min_size=1))
def test_word_problems_splits_share_no_core(seed: int, levels: set[int]) -> None:
    train = WordProblems(split="train", seed=seed, levels=sorted(levels), size=300)
    test = WordProblems(split="test", seed=seed, levels=sorted(levels), size=100)

    assert not {p.core for p in train.problems} & {p.core for p in test.problems}
    assert {split_of(p, seed) for p in test.problems} == {"test"}
    assert len(set(train.problems)) == 300


def test_word_problems_depend_on_the_seed() -> None:
    first, again, other = (WordProblems(seed=seed, size=50) for seed in (3, 3, 4))

    assert list(first) == list(again)
    assert list(first) != list(other)


def test_word_problems_rl_example_has_answer_level_and_verbs() -> None:
    rows = WordProblems(seed=1, size=20, levels=3)

    row = rows[7]

    assert row["prompt_id"] == 7
    assert row["messages"] == [{"role": "user", "content": rows.problems[7].question}]
    assert row["answer"] == rows.problems[7].worked_answer()
    assert row["level"] == len(row["verbs"]) == 3
    assert set(row["verbs"]) <= set(OPERATION_OF)


def test_word_problems_sft_example_ends_with_worked_answer() -> None:
    rows = WordProblems(form="sft", seed=1, size=20)

    assert [m["role"] for m in rows[0]["messages"]] == ["user", "assistant"]
    assert rows[-1]["messages"][1]["content"] == rows.problems[-1].worked_answer()
    assert rows[2:4] == [rows[2], rows[3]]


def test_word_problems_levels_have_equal_counts() -> None:
    rows = WordProblems(seed=1, size=90, levels=[1, 2, 3])

    assert [sum(row["level"] == level for row in rows) for level in (1, 2, 3)] == [30, 30, 30]


def test_word_problems_defaults_hold_out_512_with_every_verb() -> None:
    held_out = WordProblems(split="test", seed=0)

    assert len(held_out) == 512
    assert {verb for row in held_out for verb in row["verbs"]} == {*ADDING, *TAKING}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "validation"}, "split"),
        ({"form": "dpo"}, "form"),
        ({"path": "somewhere"}, "path"),
        ({"level": 2}, "expected levels, size, found level"),
        ({"levels": [4]}, "levels"),
        ({"levels": []}, "levels"),
        ({"size": 0}, "size"),
        pytest.param({"levels": 1, "split": "test", "size": 100_000}, "at most about", marks=pytest.mark.slow),
    ],
)
def test_word_problems_invalid_options_are_rejected(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WordProblems(**options)  # type: ignore[arg-type]
