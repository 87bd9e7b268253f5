"""Measuring the answers of a model to held-out rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from rl_contracts.config import GenerationConfig, Settings, bounded
from rl_contracts.runtime.metrics import Metrics

if TYPE_CHECKING:
    from rl_contracts.batch.parallel import ParallelContext
    from rl_contracts.rollout import RolloutRuntime
    from rl_trainers.run_log.rollouts import RolloutWriter

Evaluation = Callable[[int], dict[str, float | None]]
"""`(step) -> figures`, the same on every rank (collective)."""


@dataclass
class HeldOutConfig(Settings):
    """When held-out rows are looked at."""

    setting: ClassVar[str] = "evaluation"
    every: int = bounded(0, "0 (ends only) or more steps", lambda steps: steps >= 0)
    """Steps between evaluations; 0: only before the first step and after the last."""
    rows: int = bounded(512, "0 (off) or more", lambda rows: rows >= 0)
    """Held-out rows, a random sample that is the same in every run; 0 switches evaluation off."""


@dataclass
class EvaluationConfig(HeldOutConfig):
    """When and how held-out rows are answered."""

    n: int = bounded(1, "at least 1", lambda answers: answers >= 1)
    """Answers per row."""
    generation: GenerationConfig = field(default_factory=lambda: GenerationConfig(temperature=0.0))
    """How they are sampled; greedy unless told otherwise."""


class CompletionEvaluation:
    """Rewards of generated answers; where each is 0 or 1 their mean is the accuracy."""

    def __init__(
        self,
        rollout: RolloutRuntime,
        rows: Sequence[dict[str, Any]],
        config: EvaluationConfig,
        parallel: ParallelContext,
        writer: RolloutWriter | None = None,
    ) -> None:
        self.rollout, self.rows, self.config, self.parallel, self.writer = rollout, rows, config, parallel, writer

    def __call__(self, step: int) -> dict[str, float | None]:
        """`eval/reward`, `eval/length` and, unless a reward is neither 0 nor 1, `eval/accuracy` (collective); None
        without an answer. Beside them `eval/rows`, and `eval/failed`, answers without a reward, which count as 0 in
        reward and accuracy."""
        import torch

        answers = self.rollout.evaluate(self.rows, self.config.generation, self.config.n)
        if self.writer is not None:
            self.writer.write(f"eval_step_{step}", answers)
        episodes = {(answer.group_id, answer.episode_id): answer.reward for answer in answers}
        rewards = torch.tensor([*episodes.values()])
        figures = Metrics()
        figures.add("eval/accuracy", rewards == 1)
        figures.add("graded", (rewards != 0) & (rewards != 1), kind="max")
        figures.add("eval/reward", rewards)
        figures.add("eval/length", torch.tensor([int((answer.versions >= 0).sum()) for answer in answers]))
        figures.add("episodes", len(rewards), kind="sum")
        found = figures.over_replicas(self.parallel).results()
        if found.pop("graded"):
            del found["eval/accuracy"]
        count, asked = found.pop("episodes") or 0.0, len(self.rows) * self.config.n
        for name in found.keys() & {"eval/accuracy", "eval/reward"} if count else ():
            found[name] = (found[name] or 0.0) * count / asked
        failed = asked - count
        return found | {"eval/rows": float(len(self.rows)), "eval/failed": failed}
