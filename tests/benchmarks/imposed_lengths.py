"""Answers of imposed length, the same for every trainer that is compared: who asks which prompt decides, not the model.

Imported by the trainer process of `grpo_step.py` as the run's workflow and reward, and by the peer's process.
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
"""Tokens of every answer in the uniform case."""
MEDIAN_TOKENS = 35.0
"""Median of the log-normal distribution; with `SIGMA` and the cut its mean is about 54."""
SIGMA = 1.0
"""Standard deviation of the logarithm."""
MAX_TOKENS = 256
"""Longer draws are cut to this."""


def uniform(prompt_id: int, sample: int) -> int:
    """The same for all."""
    return UNIFORM_TOKENS


def long_tail(prompt_id: int, sample: int) -> int:
    """Log-normal, 1 to `MAX_TOKENS`; depends on prompt and sample alone."""
    draw = random.Random(f"{prompt_id}/{sample}").lognormvariate(math.log(MEDIAN_TOKENS), SIGMA)
    return min(max(1, round(draw)), MAX_TOKENS)


CASES: dict[str, Callable[[int, int], int]] = {"uniform": uniform, "long_tail": long_tail}
"""Length of an answer by the name of the case: `(prompt_id, sample) -> tokens`."""


class _ImposedLengthWorkflow(RLVRWorkflow):
    length: ClassVar[Callable[[int, int], int]]

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Trajectory]:
        """One answer of the imposed length, without end tokens."""
        episode = current_episode()
        assert episode is not None
        tokens = type(self).length(episode.prompt_id, episode.sample)
        workflow = copy.copy(self)  # the settings of a workflow are shared by all episodes
        workflow.generation = replace(self.generation, max_new_tokens=tokens, min_new_tokens=tokens, ignore_eos=True)
        return await super(_ImposedLengthWorkflow, workflow).arun_episode(engine, data)


class UniformWorkflow(_ImposedLengthWorkflow):
    """Answers of `UNIFORM_TOKENS` each."""

    length = staticmethod(uniform)


class LongTailWorkflow(_ImposedLengthWorkflow):
    """Answers of log-normal length."""

    length = staticmethod(long_tail)


WORKFLOWS: dict[str, type[RLVRWorkflow]] = {"uniform": UniformWorkflow, "long_tail": LongTailWorkflow}


def even_fraction(prompt: Any, completions: Any, prompt_ids: list[int], completion_ids: list[int], **_: Any) -> float:
    """Reward: the share of even token ids. Costs nothing, and differs within a group."""
    return sum(token % 2 == 0 for token in completion_ids) / max(len(completion_ids), 1)
