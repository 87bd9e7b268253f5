"""Lessons of the warm-up: worked answers, conversations with feedback, or calls of a calculator.

Each kind of lesson draws some decisions at random and leaves them for reinforcement learning:

- `answers`: the operation of an untaught verb (`rl_apps.embedded.warmup`).
- `turns`: the same, drawn for the first answer and again for the second one. The second draw ignores the feedback.
- `tools`: the same, in the expression that is calculated. Half of the lessons call the calculator; the others guess
  the answer. No arithmetic is taught.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from rl_apps.embedded.tokenizer import END
from rl_datasets.word_problems import Problem
from rl_workflows.workflows.multi_turn import FEEDBACK

Lesson = Sequence[str]
"""Text of a conversation in the format of the chat template, split into alternating context and target, context first.

The text is written directly, because rendering 64 conversations per step would cost more than the training."""

MakeLesson = Callable[[Problem, Mapping[str, float], random.Random], Lesson]
"""Function `(problem, probability of adding per verb, random generator) -> lesson`."""

TOOL = "calculator"
"""Name of the tool in the lessons. It has one argument, `expression`."""
CALLS = 0.5
"""Fraction of the `tools` lessons that call the tool."""
_LARGEST_GUESS = 20


def drawn_operations(problem: Problem, chances: Mapping[str, float], rng: random.Random) -> list[str]:
    """Draw `+` or `-` for each step of a problem, with the given probabilities of adding."""
    return ["+" if rng.random() < chances[step.verb] else "-" for step in problem.steps]


def lesson_answer(problem: Problem, chances: Mapping[str, float], rng: random.Random) -> str:
    """Return a worked answer with drawn operations and correct arithmetic."""
    return problem.worked_answer(drawn_operations(problem, chances, rng))


def single_turn_lesson(problem: Problem, chances: Mapping[str, float], rng: random.Random) -> Lesson:
    """Return a lesson with a question and its answer."""
    return (f"<|user|>{problem.question}<|assistant|>", f"{lesson_answer(problem, chances, rng)}{END}")


def turns_lesson(problem: Problem, chances: Mapping[str, float], rng: random.Random) -> Lesson:
    """Return a lesson with a question and its answer. A wrong answer is followed by feedback and a second answer."""
    lesson = single_turn_lesson(problem, chances, rng)
    if lesson[1] == problem.worked_answer() + END:
        return lesson
    return (*lesson, f"<|user|>{FEEDBACK}<|assistant|>", f"{lesson_answer(problem, chances, rng)}{END}")


def tools_lesson(problem: Problem, chances: Mapping[str, float], rng: random.Random) -> Lesson:
    """Return a lesson whose question is answered with the result of the calculator, or by a guess."""
    prompt = f"<|system|>{TOOL}<|user|>{problem.question}<|assistant|>"
    if rng.random() >= CALLS:
        return prompt, f"#### {rng.randrange(_LARGEST_GUESS)}{END}"
    operations = drawn_operations(problem, chances, rng)
    amounts = [str(step.amount) for step in problem.steps]
    expression = "".join([str(problem.start), *chain.from_iterable(zip(operations, amounts, strict=True))])
    value = problem.worked_answer(operations).rpartition(" ")[2]
    return prompt, f"{_call(expression)}{END}", f"<|tool|>{value}<|assistant|>", f"#### {value}{END}"


LESSONS: dict[str, MakeLesson] = {"answers": single_turn_lesson, "turns": turns_lesson, "tools": tools_lesson}
"""Lesson functions by name."""


def words_of(name: str) -> list[str]:
    """Return texts with the words of a kind of lesson that do not occur in worked answers."""
    return {"answers": [], "turns": [FEEDBACK], "tools": [TOOL, _call("1+1-1"), "#### 1"]}[name]


def _call(expression: str) -> str:
    return f'<tool_call>{{"name": "{TOOL}", "arguments": {{"expression": "{expression}"}}}}</tool_call>'
