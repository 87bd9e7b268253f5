"""Generated word problems in GSM8K's format, and preference pairs of a right answer and one with a mistake.

The problems are easy enough for a tiny model, and numerous enough to hold some out.

    Ann has 11 eggs, finds 3, then sells 4. How many eggs does Ann have?

    <<11+3=14>>14
    <<14-4=10>>10
    #### 10

A model has to learn only which verbs mean addition and which mean subtraction; the rest is arithmetic with small
numbers. Level n has n steps. No choice of operations leads below zero, so an answer with wrong operations is as
well-formed as the right one.
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
"""Operation that each verb stands for."""

NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Ida")
ITEMS = ("eggs", "pens", "cards", "coins", "cups", "books", "shells", "stamps")

MAX_LEVEL = 3
MAX_AMOUNT = 4
"""Maximum amount that a step adds or subtracts; the minimum is 1."""
_STARTS = 5
"""Number of possible start values of a level. Even if all steps subtract, no start value leads below zero."""

MISTAKES = ("operation", "result", "unfinished")
"""Kinds of mistakes in a rejected answer.

`operation`: one step adds instead of subtracting, or the reverse. `result`: one result is wrong, and later steps
continue from it. `unfinished`: the line with the final number is missing.
"""
_OFF_BY = (-2, -1, 1, 2)

_DEFAULT_SIZES = {"train": 8192, "test": 512}
_HELD_OUT_DIVISOR = 5
"""One of this many problems is held out."""
_MAX_FAILED_DRAWS = 20_000
"""Consecutive draws without a new problem after which generation stops."""


@dataclass(frozen=True, slots=True)
class Step:
    """Clause of a problem, such as `finds 3`."""

    verb: str
    amount: int


@dataclass(frozen=True, slots=True)
class Problem:
    """Word problem: a person, items, their number at the start, and the steps."""

    name: str
    item: str
    start: int
    steps: tuple[Step, ...]

    @property
    def core(self) -> tuple[int, tuple[Step, ...]]:
        """Arithmetic of the problem, without the person and the items. Train and test share no core."""
        return self.start, self.steps

    @property
    def operations(self) -> tuple[str, ...]:
        """Operation `+` or `-` of each step, according to its verb."""
        return tuple(OPERATION_OF[step.verb] for step in self.steps)

    @property
    def question(self) -> str:
        """Text of the problem."""
        clauses = [f"{step.verb} {step.amount}" for step in self.steps]
        first, last = clauses[:-1], clauses[-1]
        start = ", ".join([f"{self.name} has {self.start} {self.item}", *first])
        joined = f"{start}, then {last}" if first else f"{start} and {last}"
        return f"{joined}. How many {self.item} does {self.name} have?"

    def worked_answer(self, operations: Sequence[str] = (), slips: Sequence[int] = ()) -> str:
        """Return one line with calculator marks per step, then `#### n`.

        Args:
            operations: `+` or `-` per step; by default the right ones. With others the arithmetic is right, but the
                operations do not match the verbs.
            slips: error to add to the result of each step, by default 0. If the result would be below zero, the
                absolute error is added instead.
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
    """Options of generated problems in addition to split, form and seed."""

    setting: ClassVar[str] = "word-problems data"
    levels: Sequence[int] = bounded(
        (2,), f"one or more of 1 to {MAX_LEVEL}", lambda levels: levels and {*levels} <= {*range(1, MAX_LEVEL + 1)}
    )
    """Levels to generate in equal parts, each a number of steps from 1 to 3; a single level may be an integer."""
    size: int | None = bounded(None, "at least 1, or none", lambda size: size is None or size >= 1)
    """Number of distinct problems; by default 8192 for training and 512 held out."""

    def __post_init__(self) -> None:
        if isinstance(self.levels, int):
            self.levels = (self.levels,)
        super().__post_init__()


class WordProblems(Rows[Problem]):
    """Distinct generated problems of one split.

    RL form: `{"prompt_id": index, "messages": [the question], "answer": worked answer, "level": number of steps,
    "verbs": [verb of each step]}`. SFT form: `{"prompt_id": index, "messages": [the question, the worked answer]}`.

    A hash of the seed and the problem's core determines its split. So the splits are disjoint for all sizes, and a
    held-out problem never differs from a training problem only in the person or the items.
    """

    def __init__(
        self,
        path: str | None = None,
        split: str = "train",
        form: str = "rl",
        seed: int = 0,
        **options: Any,
    ) -> None:
        """Generate all examples.

        Args:
            path: must be empty, because nothing is read; every data set accepts it.
            split: `train` or `test` (held out).
            form: `rl` or `sft`.
            seed: seed of the problems and of the split into train and test.
            **options: fields of `WordProblemsOptions`.

        Raises:
            ConfigError: `path` is not empty, the split, form or an option is unknown, or there are fewer distinct
                problems than requested.
        """
        expected = "no path, because the problems are generated (data.name=chat or gsm8k reads files)"
        require(not path, "data.path with data.name=word-problems", expected, path)
        require_choice("split", split, tuple(_DEFAULT_SIZES))
        require_form("word-problems", form, ("rl", "sft"))
        self.form = form
        problem_options = read_options(WordProblemsOptions, "word-problems", options)
        size = _DEFAULT_SIZES[split] if problem_options.size is None else problem_options.size
        self.problems: list[Problem] = list(_generate(split, seed, tuple(problem_options.levels), size))
        """Problems of the examples, in the same order."""
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
    """Return the split of a problem for a seed: `train` or `test`."""
    digest = hashlib.blake2b(repr((seed, problem.core)).encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "big") % _HELD_OUT_DIVISOR == 0 else "train"


def draw_problem(rng: random.Random, level: int) -> Problem:
    """Return a random problem with `level` steps, of either split."""
    lowest = MAX_AMOUNT * level
    verbs = ADDING + TAKING
    steps = tuple(Step(rng.choice(verbs), rng.randint(1, MAX_AMOUNT)) for _ in range(level))
    start = rng.randrange(lowest, lowest + _STARTS)
    return Problem(rng.choice(NAMES), rng.choice(ITEMS), start, steps)


@lru_cache(maxsize=4)  # a command reads its examples several times: to count, to measure, to train
def _generate(split: str, seed: int, levels: tuple[int, ...], size: int) -> tuple[Problem, ...]:
    """Return `size` distinct problems of a split, with levels in turn.

    Raises:
        ConfigError: there are fewer than `size` distinct problems.
    """
    rng = random.Random(f"{seed} {split}")
    problems: dict[Problem, None] = {}  # an ordered set
    failed_draws = 0
    while len(problems) < size and failed_draws < _MAX_FAILED_DRAWS:
        problem = draw_problem(rng, levels[len(problems) % len(levels)])
        is_new = problem not in problems and split_of(problem, seed) == split
        failed_draws = 0 if is_new else failed_draws + 1
        if is_new:
            problems[problem] = None
    require(
        len(problems) == size,
        "word-problems data: size",
        f"at most about {len(problems)} for levels {list(levels)} of the {split} split",
        size,
    )
    return tuple(problems)


class WordProblemPairs(Rows[Problem]):
    """Generated preference pairs, one per problem, with all kinds of mistakes in equal parts.

    An example is `{"prompt_id": index, "chosen": [question, right answer], "rejected": [question, wrong answer],
    "mistake": one of MISTAKES}`.
    """

    def __init__(
        self,
        path: str | None = None,
        split: str = "train",
        form: str = "pairs",
        seed: int = 0,
        **options: Any,
    ) -> None:
        """Generate all examples.

        Args:
            path: must be empty, because nothing is read; every data set accepts it.
            split: `train` or `test` (held out).
            form: `pairs`.
            seed: seed of the problems, the mistakes, and the split into train and test.
            **options: fields of `rl_datasets.word_problems.WordProblemsOptions`.

        Raises:
            ConfigError: `path` is not empty, the split, form or an option is unknown, or there are fewer distinct
                problems than requested.
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
    """Return a worked answer with one mistake (see `MISTAKES`)."""
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
