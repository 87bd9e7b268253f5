"""What the warm-up shows: worked answers, conversations with feedback, or calls of a calculator.

Each leaves decisions to chance, so that there is something left for the reward:

- `answers`: which operation an untaught verb means (`rl_apps.embedded.warmup`).
- `turns`: the same, in the first answer and again in the one after the feedback, as if there had been none.
- `tools`: the same, in the expression that is calculated; and whether the calculator is asked at all, half of the time:
  else the answer is a guess. No arithmetic is taught.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from rl_apps.embedded.tokenizer import END
from rl_datasets.word_problems import Problem
from rl_workflows.workflows.multi_turn import FEEDBACK

Lesson = Sequence[str]
"""The chat template's text of a conversation, written out, since rendering 64 of them a step would cost more than the
training: what is given and what is to be learned in turn, given first."""

MakeLesson = Callable[[Problem, Mapping[str, float], random.Random], Lesson]
"""`(problem, chances of adding by verb, draw) -> lesson`."""

TOOL = "calculator"
"""Name of the tool that lessons call, with one argument, `expression`."""
CALLS = 0.5
"""Share of the lessons with a tool that call it."""
_LARGEST_GUESS = 20


def drawn_operations(problem: Problem, chances: Mapping[str, float], rng: random.Random) -> list[str]:
    """An operation for each step, drawn with the given chances of adding."""
    return ["+" if rng.random() < chances[step.verb] else "-" for step in problem.steps]


def lesson_answer(problem: Problem, chances: Mapping[str, float], rng: random.Random) -> str:
    """A worked answer whose operations are drawn; its arithmetic is right."""
    return problem.worked_answer(drawn_operations(problem, chances, rng))


def single_turn_lesson(problem: Problem, chances: Mapping[str, float], rng: random.Random) -> Lesson:
    """A question and its answer."""
    return (f"<|user|>{problem.question}<|assistant|>", f"{lesson_answer(problem, chances, rng)}{END}")


def turns_lesson(problem: Problem, chances: Mapping[str, float], rng: random.Random) -> Lesson:
    """A question and its answer; after one that is not right, feedback and another."""
    lesson = single_turn_lesson(problem, chances, rng)
    if lesson[1] == problem.worked_answer() + END:
        return lesson
    return (*lesson, f"<|user|>{FEEDBACK}<|assistant|>", f"{lesson_answer(problem, chances, rng)}{END}")


def tools_lesson(problem: Problem, chances: Mapping[str, float], rng: random.Random) -> Lesson:
    """A question that is answered with what the calculator says, or by a guess."""
    asked = f"<|system|>{TOOL}<|user|>{problem.question}<|assistant|>"
    if rng.random() >= CALLS:
        return asked, f"#### {rng.randrange(_LARGEST_GUESS)}{END}"
    operations = drawn_operations(problem, chances, rng)
    amounts = [str(step.amount) for step in problem.steps]
    expression = "".join([str(problem.start), *chain.from_iterable(zip(operations, amounts, strict=True))])
    value = problem.worked_answer(operations).rpartition(" ")[2]
    return asked, f"{_call(expression)}{END}", f"<|tool|>{value}<|assistant|>", f"#### {value}{END}"


LESSONS: dict[str, MakeLesson] = {"answers": single_turn_lesson, "turns": turns_lesson, "tools": tools_lesson}
"""By name."""


def words_of(name: str) -> list[str]:
    """Texts with the words of lessons that are not in worked answers."""
    return {"answers": [], "turns": [FEEDBACK], "tools": [TOOL, _call("1+1-1"), "#### 1"]}[name]


def _call(expression: str) -> str:
    return f'<tool_call>{{"name": "{TOOL}", "arguments": {{"expression": "{expression}"}}}}</tool_call>'
