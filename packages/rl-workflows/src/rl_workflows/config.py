"""Settings of the rollout runtime."""

from __future__ import annotations

from dataclasses import dataclass

from rl_contracts.config import require
from rl_contracts.errors import ConfigError


@dataclass
class RolloutConfig:
    """How prompts become groups, and how far generation may run ahead of training."""

    max_staleness: int = 1
    """Versions that may pass between a group's start and the step that trains on it; 0 is exactly on-policy."""
    max_concurrent: int | None = None
    """Groups that run at the same time over all heads. None: as many as `max_staleness` admits, which is
    (max_staleness + 1) * batch size."""
    group_size: int = 8
    """Episodes per prompt."""
    min_group: int | None = None
    """Episodes that must succeed for the group to go on without the others. None: all of them."""
    dynamic_sampling: bool = False
    """Reject groups whose rewards are all equal; other prompts take their place."""
    failure_budget: float = 0.1
    """Share of groups that may fail before the run stops with the first failure's trace."""
    failure_min_groups: int = 16
    """Groups that must have finished before `failure_budget` is looked at."""
    max_rejected_in_row: int = 1000
    """Groups rejected without one accepted in between, after which the run stops."""
    eval_concurrent: int = 256
    """Evaluation episodes that run at the same time on each head, beside the training ones."""
    stall_timeout: float = 600.0
    """Seconds without any progress (nothing generated, accepted, rejected or failed) after which a wait ends with an
    error that names the stuck stage."""
    trainer_timeout: float = 3600.0
    """Seconds after which a trainer that is in no call of the runtime counts as stuck: longer than any training step,
    with what is saved after it. The run then ends with an error that says where the trainer is."""
    seed: int = 0
    """Sampling seeds derive from it, the prompt, the epoch and the sample."""

    def __post_init__(self) -> None:
        require(self.max_staleness >= 0, "rollout.max_staleness", "0 (on-policy) or more", self.max_staleness)
        require(
            self.max_concurrent is None or self.max_concurrent >= 1,
            "rollout.max_concurrent",
            "at least 1 group, or null for no further limit",
            self.max_concurrent,
        )
        require(self.group_size >= 1, "rollout.group_size", "at least 1", self.group_size)
        require(
            self.min_group is None or 1 <= self.min_group <= self.group_size,
            "rollout.min_group",
            f"between 1 and group_size ({self.group_size}), or null for all",
            self.min_group,
        )
        require(
            not self.dynamic_sampling or self.group_size >= 2,
            "rollout.dynamic_sampling",
            "a group_size of at least 2, because the only reward of a group of one is always equal to itself",
            self.group_size,
        )
        require(0 <= self.failure_budget <= 1, "rollout.failure_budget", "a share in [0, 1]", self.failure_budget)
        require(self.failure_min_groups >= 1, "rollout.failure_min_groups", "at least 1", self.failure_min_groups)
        require(self.max_rejected_in_row >= 1, "rollout.max_rejected_in_row", "at least 1", self.max_rejected_in_row)
        require(self.eval_concurrent >= 1, "rollout.eval_concurrent", "at least 1", self.eval_concurrent)
        require(self.stall_timeout > 0, "rollout.stall_timeout", "more than 0 seconds", self.stall_timeout)
        require(self.trainer_timeout > 0, "rollout.trainer_timeout", "more than 0 seconds", self.trainer_timeout)

    @property
    def needed(self) -> int:
        """Episodes that a group needs."""
        return self.group_size if self.min_group is None else self.min_group


def groups_per_replica(total: int, replicas: int, what: str) -> int:
    """How many of `total` groups one data-parallel replica collects.

    Raises:
        ConfigError: it does not divide; names the nearest numbers that do.
    """
    if total >= replicas and total % replicas == 0:
        return total // replicas
    lower, upper = total // replicas * replicas, (total // replicas + 1) * replicas
    near = f"{lower} or {upper}" if lower else str(upper)
    raise ConfigError(
        f"{what}: {total} groups per step cannot be divided equally among {replicas} trainer replicas. Use {near}, "
        "or another number of trainer replicas."
    )
