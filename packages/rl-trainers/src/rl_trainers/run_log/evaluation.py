"""Evaluation of a model's completions on held-out examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from rl_contracts.config import GenerationConfig, Settings, bounded
from rl_contracts.runtime.metrics import Metrics

if TYPE_CHECKING:
    from rl_contracts.batch.parallel import ParallelContext
    from rl_contracts.rollout import RolloutRuntime
    from rl_trainers.run_log.rollouts import RolloutWriter

Evaluation = Callable[[int], dict[str, float | None]]
"""`(step) -> metrics`, the same on every rank (collective)."""


@dataclass
class HeldOutConfig(Settings):
    """Schedule and number of examples of evaluations on held-out data."""

    setting: ClassVar[str] = "evaluation"
    every: int = bounded(0, "0 (only before and after training) or more steps", lambda steps: steps >= 0)
    """Steps between evaluations; 0: only before the first step and after the last."""
    examples: int = bounded(512, "0 (off) or more", lambda examples: examples >= 0)
    """Number of held-out examples: a random sample that is the same in every run. 0 disables evaluation."""


@dataclass
class EvaluationConfig(HeldOutConfig):
    """Schedule and sampling of completions for held-out examples."""

    n: int = bounded(1, "at least 1", lambda completions: completions >= 1)
    """Completions per example."""
    temperature: float = bounded(0.0, "0 (greedy) or 1e-4 to 1e4", lambda value: value == 0 or 1e-4 <= value <= 1e4)
    """Sampling temperature: 0 (greedy decoding), or a value in [1e-4, 1e4]. Other sampling settings: those of
    `rollout.generation`, or their defaults without it."""
    max_new_tokens: int = bounded(0, "0 (that of rollout.generation) or more", lambda tokens: tokens >= 0)
    """Maximum number of tokens to generate per completion; 0: that of `rollout.generation`, or 256 without it."""

    def sampling(self, training: GenerationConfig) -> GenerationConfig:
        """Return the sampling settings of an evaluation.

        Args:
            training: sampling settings of the training completions.
        """
        max_new_tokens = self.max_new_tokens or training.max_new_tokens
        return replace(
            training,
            temperature=self.temperature,
            max_new_tokens=max_new_tokens,
            min_new_tokens=min(training.min_new_tokens, max_new_tokens),
        )


class CompletionEvaluation:
    """Evaluation by the rewards of generated completions. If every reward is 0 or 1, the mean is the accuracy."""

    def __init__(
        self,
        rollout: RolloutRuntime,
        examples: Sequence[dict[str, Any]],
        config: EvaluationConfig,
        generation: GenerationConfig,
        parallel: ParallelContext,
        writer: RolloutWriter | None = None,
    ) -> None:
        """Create an evaluation.

        Args:
            rollout: runtime that generates and scores the completions.
            examples: held-out examples, the same on every rank.
            config: temperature, length and number of completions.
            generation: sampling settings of the training completions, for all other sampling settings.
            parallel: ranks of the run.
            writer: writer of the completions to files, if they are stored.
        """
        self.rollout, self.rows, self.config, self.parallel, self.writer = rollout, examples, config, parallel, writer
        self.generation = config.sampling(generation)

    def __call__(self, step: int) -> dict[str, float | None]:
        """Generate and score completions of all examples (collective).

        Returns:
            `eval/reward`, `eval/length` (generated tokens per sequence), `eval/examples` (examples), `eval/failed`
            (episodes without a reward) and, only if each reward is 0 or 1, `eval/accuracy`. Failed episodes count as 0
            in reward and accuracy. Means are None if there is no completion.
        """
        import torch

        trajectories = self.rollout.evaluate(self.rows, self.generation, self.config.n)
        if self.writer is not None:
            self.writer.write(f"eval_step_{step}", trajectories)
        episodes = {(trajectory.group_id, trajectory.episode_id): trajectory.reward for trajectory in trajectories}
        rewards = torch.tensor([*episodes.values()])
        metrics = Metrics()
        metrics.add("eval/accuracy", rewards == 1)
        metrics.add("graded", (rewards != 0) & (rewards != 1), kind="max")
        metrics.add("eval/reward", rewards)
        metrics.add("eval/length", torch.tensor([int((trajectory.versions >= 0).sum()) for trajectory in trajectories]))
        metrics.add("episodes", len(rewards), kind="sum")
        results = metrics.over_replicas(self.parallel).results()
        if results.pop("graded"):
            del results["eval/accuracy"]
        count, requested = results.pop("episodes") or 0.0, len(self.rows) * self.config.n
        for name in results.keys() & {"eval/accuracy", "eval/reward"} if count else ():
            results[name] = (results[name] or 0.0) * count / requested
        failed = requested - count
        return results | {"eval/examples": float(len(self.rows)), "eval/failed": failed}
