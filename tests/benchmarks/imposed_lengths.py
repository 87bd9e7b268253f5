"""Completions of imposed length, the same for every compared trainer: prompt and sample index decide the length.

The trainer process of `grpo_step.py` imports this module as workflow and reward; the peer's process imports it too.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from rl_workflows import RLVRWorkflow
from rl_workflows.rollout.episode import current_episode

if TYPE_CHECKING:
    from rl_contracts.batch.trajectory import Trajectory
    from rl_contracts.inference import InferenceEngine

UNIFORM_TOKENS = 64
"""Tokens per completion in the uniform case."""
MEDIAN_TOKENS = 35.0
"""Median of the log-normal distribution; with `SIGMA` and `MAX_TOKENS` the mean is about 54."""
SIGMA = 1.0
"""Standard deviation of the logarithm."""
MAX_TOKENS = 256
"""Length limit; longer draws are clipped to it."""


def uniform(prompt_id: int, sample: int) -> int:
    """Return the length of every completion in the uniform case."""
    return UNIFORM_TOKENS


def long_tail(prompt_id: int, sample: int) -> int:
    """Draw a log-normal length between 1 and `MAX_TOKENS`, seeded by prompt and sample."""
    draw = random.Random(f"{prompt_id}/{sample}").lognormvariate(math.log(MEDIAN_TOKENS), SIGMA)
    return min(max(1, round(draw)), MAX_TOKENS)


CASES: dict[str, Callable[[int, int], int]] = {"uniform": uniform, "long_tail": long_tail}
"""Length of a completion by case: `(prompt_id, sample) -> tokens`."""


class _ImposedLengthWorkflow(RLVRWorkflow):
    length: ClassVar[Callable[[int, int], int]]

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Trajectory]:
        """Generate one completion of the imposed length, ignoring end tokens."""
        episode = current_episode()
        assert episode is not None
        tokens = type(self).length(episode.prompt_id, episode.sample)
        workflow = copy.copy(self)  # all episodes share the settings of a workflow
        workflow.generation = replace(self.generation, max_new_tokens=tokens, min_new_tokens=tokens, ignore_eos=True)
        return await super(_ImposedLengthWorkflow, workflow).arun_episode(engine, data)


class UniformWorkflow(_ImposedLengthWorkflow):
    """Completions of `UNIFORM_TOKENS` each."""

    length = staticmethod(uniform)


class LongTailWorkflow(_ImposedLengthWorkflow):
    """Completions of log-normal length."""

    length = staticmethod(long_tail)


WORKFLOWS: dict[str, type[RLVRWorkflow]] = {"uniform": UniformWorkflow, "long_tail": LongTailWorkflow}


def even_fraction(prompt: Any, completions: Any, prompt_ids: list[int], completion_ids: list[int], **_: Any) -> float:
    """Return the fraction of even token ids: a cheap reward that differs within a group."""
    return sum(token % 2 == 0 for token in completion_ids) / max(len(completion_ids), 1)
