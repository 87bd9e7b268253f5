"""Evaluation of a model's completions on held-out examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from rl_contracts.config import GenerationConfig, Settings, bounded, require
from rl_contracts.runtime.metrics import Metrics, collect, record_all
from rl_trainers.run_log.evaluation_scores import ExampleOutcome, scores

if TYPE_CHECKING:
    from rl_contracts.batch.parallel import ParallelContext
    from rl_contracts.batch.trajectory import Trajectory
    from rl_contracts.rollout import RolloutRuntime
    from rl_contracts.workflow import RolloutWorkflow
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
    k: list[int] = field(default_factory=list)
    """Values of k for `pass@k` and `maj@k`, at most `n`. Empty: 1 and `n` if `n` is more than 1, otherwise none."""
    temperature: float = bounded(0.0, "0 (greedy) or 1e-4 to 1e4", lambda value: value == 0 or 1e-4 <= value <= 1e4)
    """Sampling temperature: 0 (greedy decoding), or a value in [1e-4, 1e4]. Other sampling settings: those of
    `rollout.generation`, or their defaults without it."""
    max_new_tokens: int = bounded(0, "0 (that of rollout.generation) or more", lambda tokens: tokens >= 0)
    """Maximum number of tokens to generate per completion; 0: that of `rollout.generation`, or 256 without it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(all(1 <= k <= self.n for k in self.k), "evaluation.k", f"1 to evaluation.n={self.n}", list(self.k))

    @property
    def ks(self) -> list[int]:
        """Values of k in ascending order, by default 1 and `n`."""
        return sorted({*self.k} or ({1, self.n} if self.n > 1 else set()))

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
    """Evaluation by the rewards of generated completions."""

    def __init__(
        self,
        rollout: RolloutRuntime,
        examples: Sequence[dict[str, Any]],
        config: EvaluationConfig,
        generation: GenerationConfig,
        parallel: ParallelContext,
        writer: RolloutWriter | None = None,
        *,
        name: str = "",
        workflow: RolloutWorkflow | None = None,
        extract_answer: Callable[[str], str | None] | None = None,
    ) -> None:
        """Create an evaluation.

        Args:
            rollout: runtime that generates and scores the completions.
            examples: held-out examples, the same on every rank.
            config: temperature, length and number of completions.
            generation: sampling settings of the training completions, for all other sampling settings.
            parallel: ranks of the run.
            writer: writer of the completions to files, if they are stored.
            name: name of the evaluation set, which its metrics, files and records contain; empty for none.
            workflow: workflow of the episodes; None for the one of the rollout runtime.
            extract_answer: the attribute of the reward function that `maj@k` needs, see
                `rl_contracts.reward.RewardFunction`; None without it.
        """
        self.rollout, self.rows, self.config, self.parallel, self.writer = rollout, examples, config, parallel, writer
        self.generation, self.workflow = config.sampling(generation), workflow
        self.name, self._extract_answer = name, extract_answer

    def __call__(self, step: int) -> dict[str, float | None]:
        """Generate and score completions of all examples (collective).

        Returns:
            `eval/<score>`, or `eval/<name>/<score>`, for each score of `rl_trainers.run_log.evaluation_scores.scores`.
        """
        prefix = f"{self.name}/" if self.name else ""
        with collect() as recorded:
            outcomes = self.outcomes(step)
        record_all(Metrics.from_json({f"{prefix}{name}": value for name, value in recorded.to_json().items()}))
        return {f"eval/{prefix}{name}": value for name, value in self.scores(outcomes).items()}

    def scores(self, outcomes: Sequence[ExampleOutcome]) -> dict[str, float | None]:
        """Return the scores of all or some outcomes by name, see `rl_trainers.run_log.evaluation_scores.scores`."""
        return scores(outcomes, self.config.n, self.config.ks)

    def outcomes(self, step: int) -> list[ExampleOutcome]:
        """Generate and score completions, and return the outcomes of all ranks' examples in order (collective)."""
        trajectories = self.rollout.evaluate(self.rows, self.generation, self.config.n, self.workflow)
        if self.name:
            for trajectory in trajectories:
                trajectory.info["set"] = self.name
        if self.writer is not None:
            self.writer.write(f"eval_{self.name}_step_{step}" if self.name else f"eval_step_{step}", trajectories)
        own = [asdict(outcome) for outcome in outcomes_of(trajectories, self._extract_answer).values()]
        gathered = (ExampleOutcome(**each) for rank in self.parallel.gather_json(own) for each in rank)
        by_example = {outcome.example: outcome for outcome in gathered}
        # an example without a finished episode has no trajectory
        return [by_example.get(example) or ExampleOutcome(example) for example in range(len(self.rows))]


def outcomes_of(
    trajectories: Sequence[Trajectory], extract_answer: Callable[[str], str | None] | None = None
) -> dict[int, ExampleOutcome]:
    """Return the outcome of each example with a trajectory, by the group of the example.

    An episode of several sequences counts once, with the answer of its last sequence.
    """
    outcomes: dict[int, ExampleOutcome] = {}
    episodes: dict[tuple[int, int], list[Trajectory]] = {}
    for trajectory in trajectories:
        episodes.setdefault((trajectory.group_id, trajectory.episode_id), []).append(trajectory)
    for (group, _), sequences in episodes.items():
        outcome = outcomes.setdefault(group, ExampleOutcome(group))
        outcome.rewards.append(float(sequences[-1].reward))
        outcome.truncated.append(any(bool(sequence.truncated) for sequence in sequences))
        outcome.lengths += [int((sequence.versions >= 0).sum()) for sequence in sequences]
        if extract_answer is not None:
            outcome.answers.append(extract_answer(_completion(sequences[-1])))
    return outcomes


def _completion(trajectory: Trajectory) -> str:
    """Return the text of a completion, or of the last message of a conversation."""
    messages = trajectory.info.get("conversation") or [{"content": trajectory.info.get("completion")}]
    content = messages[-1].get("content")
    return content if isinstance(content, str) else ""
