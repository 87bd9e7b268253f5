"""Generated word problems in GSM8K's form, small enough for a tiny model to solve and endless enough to hold some out;
and preference pairs of them, a right answer and one with a mistake.

    Ann has 11 eggs, finds 3, then sells 4. How many eggs does Ann have?

    <<11+3=14>>14
    <<14-4=10>>10
    #### 10

Which words mean adding and which mean taking away is all there is to understand; the rest is arithmetic with small
numbers. Level n has n steps. Neither choice of operations can lead below zero, so that an answer with mistaken
operations is as well-formed as the right one.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from rl_contracts.config import Settings, bounded, require, require_choice
from rl_datasets.rows import Rows, read_options, require_form

ADDING = ("finds", "buys", "wins", "gets", "earns", "collects")
TAKING = ("sells", "loses", "drops", "donates", "discards", "lends")
OPERATION_OF: dict[str, str] = dict.fromkeys(ADDING, "+") | dict.fromkeys(TAKING, "-")
"""What each verb does to the number of things."""

NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Ida")
ITEMS = ("eggs", "pens", "cards", "coins", "cups", "books", "shells", "stamps")

MAX_LEVEL = 3
MAX_AMOUNT = 4
"""A step adds or takes away 1 to this many."""
_STARTS = 5
"""How many first numbers a level has; the smallest covers its steps even if all of them take away."""

MISTAKES = ("operation", "result", "unfinished")
"""What may be wrong with a rejected answer: one step adds where it should take away, or the reverse; one result is off
and the rest follows from it; or the line with the final number is missing."""
_OFF_BY = (-2, -1, 1, 2)

_DEFAULT_SIZES = {"train": 8192, "test": 512}
_HELD_OUT_SHARE = 5
"""One in so many problems is held out."""
_MAX_FRUITLESS_DRAWS = 20_000
"""Draws in a row without a new problem after which there are taken to be no more."""


@dataclass(frozen=True, slots=True)
class Step:
    """One clause: `finds 3`."""

    verb: str
    amount: int


@dataclass(frozen=True, slots=True)
class Problem:
    """One story: who, what, how many at first, and what happens."""

    name: str
    item: str
    start: int
    steps: tuple[Step, ...]

    @property
    def core(self) -> tuple[int, tuple[Step, ...]]:
        """What has to be worked out, without who and what. Train and test share no core."""
        return self.start, self.steps

    @property
    def operations(self) -> tuple[str, ...]:
        """`+` or `-` for each step, as its verb means it."""
        return tuple(OPERATION_OF[step.verb] for step in self.steps)

    @property
    def question(self) -> str:
        """The story and its question."""
        clauses = [f"{step.verb} {step.amount}" for step in self.steps]
        first, last = clauses[:-1], clauses[-1]
        told = ", ".join([f"{self.name} has {self.start} {self.item}", *first])
        joined = f"{told}, then {last}" if first else f"{told} and {last}"
        return f"{joined}. How many {self.item} does {self.name} have?"

    def worked_answer(self, operations: Sequence[str] = (), slips: Sequence[int] = ()) -> str:
        """One line with calculator marks per step, then `#### n`.

        Args:
            operations: `+` or `-` per step; by default the right ones. Others give an answer whose arithmetic is right
                and whose understanding is not.
            slips: by how much each step's result is off, to the other side where it would be below zero; by default
                nowhere.
        """
        value = self.start
        lines = []
        slips = slips or [0] * len(self.steps)
        for step, operation, slip in zip(self.steps, operations or self.operations, slips, strict=True):
            result = value + step.amount if operation == "+" else value - step.amount
            result += slip if result + slip >= 0 else abs(slip)
            lines.append(f"<<{value}{operation}{step.amount}={result}>>{result}")
            value = result
        return "\n".join([*lines, f"#### {value}"])


@dataclass
class WordProblemsOptions(Settings):
    """What may be set beyond split, form and seed."""

    setting: ClassVar[str] = "word-problems data"
    levels: Sequence[int] = bounded(
        (2,), f"one or more of 1 to {MAX_LEVEL}", lambda levels: levels and {*levels} <= {*range(1, MAX_LEVEL + 1)}
    )
    """Numbers of steps, 1 to 3, mixed in equal parts; a single one may be given as a number."""
    size: int | None = bounded(None, "at least 1, or none", lambda size: size is None or size >= 1)
    """Number of distinct problems; by default 8192 to train on and 512 held out."""

    def __post_init__(self) -> None:
        if isinstance(self.levels, int):
            self.levels = (self.levels,)
        super().__post_init__()


class WordProblems(Rows[Problem]):
    """Distinct generated problems of one split.

    RL form: `{"prompt_id": row index, "messages": [the question], "answer": worked answer, "level": steps, "verbs":
    [their verbs]}`. SFT form: `{"prompt_id": row index, "messages": [the question, the worked answer]}`.

    A hash of the seed and the problem's core decides its split, so the splits stay disjoint whatever their sizes, and a
    held-out problem is not a known one about other things.
    """

    def __init__(
        self,
        path: str | None = None,
        split: str = "train",
        form: str = "rl",
        seed: int = 0,
        **options: Any,
    ) -> None:
        """Generate all rows.

        Args:
            path: part of every data set's signature; nothing is read, so it has to be empty.
            split: `train` or `test` (held out).
            form: `rl` or `sft`.
            seed: makes the problems and decides which are held out.
            **options: fields of `WordProblemsOptions`.

        Raises:
            ConfigError: a path, an unknown split, form or option, or more problems than there are.
        """
        expected = "none, because the problems are generated (data.name=chat or gsm8k reads files of your own)"
        require(not path, "data.path with data.name=word-problems", expected, path)
        require_choice("split", split, tuple(_DEFAULT_SIZES))
        require_form("word-problems", form, ("rl", "sft"))
        self.form = form
        chosen = read_options(WordProblemsOptions, "word-problems", options)
        size = _DEFAULT_SIZES[split] if chosen.size is None else chosen.size
        self.problems: list[Problem] = list(_generate(split, seed, tuple(chosen.levels), size))
        """The problems behind the rows, in the same order."""
        super().__init__(self.problems)

    def _row(self, index: int, problem: Problem) -> dict[str, Any]:
        question = {"role": "user", "content": problem.question}
        answer = problem.worked_answer()
        if self.form == "sft":
            return {"prompt_id": index, "messages": [question, {"role": "assistant", "content": answer}]}
        return {
            "prompt_id": index,
            "messages": [question],
            "answer": answer,
            "level": len(problem.steps),
            "verbs": [step.verb for step in problem.steps],
        }


def split_of(problem: Problem, seed: int) -> str:
    """The split that a problem belongs to under a seed: `train` or `test`."""
    digest = hashlib.blake2b(repr((seed, problem.core)).encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "big") % _HELD_OUT_SHARE == 0 else "train"


def draw_problem(rng: random.Random, level: int) -> Problem:
    """A problem of `level` steps, of either split."""
    lowest = MAX_AMOUNT * level
    verbs = ADDING + TAKING
    steps = tuple(Step(rng.choice(verbs), rng.randint(1, MAX_AMOUNT)) for _ in range(level))
    start = rng.randrange(lowest, lowest + _STARTS)
    return Problem(rng.choice(NAMES), rng.choice(ITEMS), start, steps)


@lru_cache(maxsize=4)  # a command reads its rows several times: to count, to measure, to train
def _generate(split: str, seed: int, levels: tuple[int, ...], size: int) -> tuple[Problem, ...]:
    """`size` distinct problems of a split, the levels in turn.

    Raises:
        ConfigError: so many distinct problems were not found.
    """
    rng = random.Random(f"{seed} {split}")
    found: dict[Problem, None] = {}  # a set that keeps the order
    fruitless = 0
    while len(found) < size and fruitless < _MAX_FRUITLESS_DRAWS:
        problem = draw_problem(rng, levels[len(found) % len(levels)])
        is_new = problem not in found and split_of(problem, seed) == split
        fruitless = 0 if is_new else fruitless + 1
        if is_new:
            found[problem] = None
    require(
        len(found) == size,
        "word-problems data: size",
        f"at most about {len(found)} for levels {list(levels)} of the {split} split",
        size,
    )
    return tuple(found)


class WordProblemPairs(Rows[Problem]):
    """One pair per generated problem: `{"prompt_id": row index, "chosen": [question, right answer], "rejected":
    [question, wrong answer], "mistake": one of MISTAKES}`, the mistakes in equal parts.
    """

    def __init__(
        self,
        path: str | None = None,
        split: str = "train",
        form: str = "pairs",
        seed: int = 0,
        **options: Any,
    ) -> None:
        """Generate all rows.

        Args:
            path: part of every data set's signature; nothing is read, so it has to be empty.
            split: `train` or `test` (held out).
            form: `pairs`.
            seed: makes problems and mistakes and decides which problems are held out.
            **options: fields of `rl_datasets.word_problems.WordProblemsOptions`.

        Raises:
            ConfigError: a path, an unknown split, form or option, or more problems than there are.
        """
        require_form("word-problem-pairs", form, ("pairs",))
        super().__init__(WordProblems(path, split, "rl", seed, **options).problems)
        self._seed = seed

    def _row(self, index: int, problem: Problem) -> dict[str, Any]:
        mistake = MISTAKES[index % len(MISTAKES)]
        wrong = with_mistake(problem, mistake, random.Random(f"{self._seed} {index}"))
        return {
            "prompt_id": index,
            "chosen": _conversation(problem, problem.worked_answer()),
            "rejected": _conversation(problem, wrong),
            "mistake": mistake,
        }


def with_mistake(problem: Problem, mistake: str, draw: random.Random) -> str:
    """A worked answer that is wrong in one way (see `MISTAKES`)."""
    if mistake == "unfinished":
        return problem.worked_answer().rpartition("\n")[0]
    place = draw.randrange(len(problem.steps))
    if mistake == "operation":
        operations = list(problem.operations)
        operations[place] = "-" if operations[place] == "+" else "+"
        return problem.worked_answer(operations)
    slips = [0] * len(problem.steps)
    slips[place] = draw.choice(_OFF_BY)
    return problem.worked_answer(slips=slips)


def _conversation(problem: Problem, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": problem.question}, {"role": "assistant", "content": answer}]
