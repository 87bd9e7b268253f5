"""What the warm-up teaches about the verbs, and what it leaves for the reward to teach.

Every warm-up answer has the right form and the right arithmetic. Of the verbs on each side (adding, taking away) two
are *taught*: their operation is always right. For each of the others the warm-up only has an opinion, drawn by the seed
without regard to what the verb means: on each side half of the untaught verbs are mostly added and half mostly taken
away, 60 to 40. So a verb's opinion says nothing about its meaning, and a model that follows the opinions is right about
two thirds of the verbs: (2/3)^2, or 44 %, of the two-step problems. The 40 % are what reinforcement starts from.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from rl_datasets.word_problems import ADDING, OPERATION_OF, TAKING, Problem

TAUGHT_PER_SIDE = 2
TAUGHT_VERBS: frozenset[str] = frozenset(ADDING[:TAUGHT_PER_SIDE] + TAKING[:TAUGHT_PER_SIDE])
"""The verbs whose operation the warm-up answers always have right."""

OPINION_STRENGTH = 0.6
"""Share of the warm-up answers that follow the opinion of an untaught verb."""


def chances_of_adding(seed: int) -> dict[str, float]:
    """For each verb the probability that a warm-up answer adds: 0 or 1 if it is taught, else its opinion."""
    chances = {verb: 1.0 if operation == "+" else 0.0 for verb, operation in OPERATION_OF.items()}
    for side in (ADDING, TAKING):
        untaught = [verb for verb in side if verb not in TAUGHT_VERBS]
        random.Random(f"{seed} {side[0]}").shuffle(untaught)
        half = len(untaught) // 2
        chances |= dict.fromkeys(untaught[:half], OPINION_STRENGTH)
        chances |= dict.fromkeys(untaught[half:], 1 - OPINION_STRENGTH)
    return chances


def lesson_answer(problem: Problem, chances: Mapping[str, float], rng: random.Random) -> str:
    """A worked answer whose operations are drawn with the given chances of adding; its arithmetic is right."""
    operations: Sequence[str] = ["+" if rng.random() < chances[s.verb] else "-" for s in problem.steps]
    return problem.worked_answer(operations)
