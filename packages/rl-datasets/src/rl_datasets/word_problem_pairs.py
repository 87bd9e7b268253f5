"""Generated preference pairs: a word problem with its right answer, and with one that has a mistake."""

from __future__ import annotations

import random
from typing import Any

from rl_contracts.config import require_choice
from rl_datasets.rows import Rows
from rl_datasets.word_problems import Problem, WordProblems

MISTAKES = ("operation", "result", "unfinished")
"""What may be wrong with a rejected answer: one step adds where it should take away, or the reverse; one result is off
and the rest follows from it; or the line with the final number is missing."""
_OFF_BY = (-2, -1, 1, 2)


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
        require_choice("form", form, ("pairs",))
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
