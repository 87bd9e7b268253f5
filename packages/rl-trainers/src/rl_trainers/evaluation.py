"""Measuring a model on held-out rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rl_contracts.config import GenerationConfig, require
from rl_contracts.metrics import Figures

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_contracts.engine import TrainEngine
    from rl_contracts.parallel import ParallelContext
    from rl_contracts.rollout import RolloutRuntime
    from rl_trainers.rollouts import RolloutWriter

Evaluation = Callable[[int], dict[str, float | None]]
"""`(step) -> figures`, the same on every rank (collective)."""


@dataclass
class EvaluationConfig:
    """When and how held-out rows are answered."""

    every: int = 0
    """Steps between evaluations; 0: only before the first step and after the last."""
    rows: int = 512
    """Held-out rows; 0 switches evaluation off."""
    n: int = 1
    """Answers per row."""
    generation: GenerationConfig = field(default_factory=lambda: GenerationConfig(temperature=0.0))
    """How they are sampled; greedy unless told otherwise."""

    def __post_init__(self) -> None:
        require(self.every >= 0, "evaluation.every", "0 (ends only) or more steps", self.every)
        require(self.rows >= 0, "evaluation.rows", "0 (off) or more", self.rows)
        require(self.n >= 1, "evaluation.n", "at least 1", self.n)


class AnswerEvaluation:
    """Accuracy of generated answers: the share whose reward is at least 1."""

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
        """`eval/accuracy`, `eval/reward` and `eval/length` (collective); None without an answer."""
        import torch

        answers = self.rollout.evaluate(self.rows, self.config.generation, self.config.n)
        if self.writer is not None:
            self.writer.write(f"eval_step_{step}", answers)
        rewards = torch.tensor([answer.reward for answer in answers])
        figures = Figures()
        figures.add("eval/accuracy", rewards >= 1)
        figures.add("eval/reward", rewards)
        figures.add("eval/length", torch.tensor([int((answer.versions >= 0).sum()) for answer in answers]))
        return figures.over_replicas(self.parallel).results()


class LossEvaluation:
    """Cross entropy on held-out rows."""

    def __init__(self, engine: TrainEngine, batch: TensorDict) -> None:
        self.engine, self.batch = engine, batch

    def __call__(self, step: int) -> dict[str, float | None]:
        """`loss/eval`, in nats per token (collective)."""
        from rl_trainers.functional.other_losses import cross_entropy_loss

        result = self.engine.eval_batch(self.batch, cross_entropy_loss, lambda rows: rows["loss_mask"].sum().float())
        return {"loss/eval": result["loss"]}
