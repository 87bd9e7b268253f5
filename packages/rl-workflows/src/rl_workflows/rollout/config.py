"""Settings of the rollout runtime."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rl_contracts.config import Settings, bounded, require
from rl_contracts.errors import ConfigError


@dataclass
class RuntimeConfig(Settings):
    """How episodes are run, for training and for evaluation alike."""

    setting: ClassVar[str] = "rollout"
    failure_budget: float = bounded(0.1, "a fraction in [0, 1]", lambda fraction: 0 <= fraction <= 1)
    """Share of the last `failure_window` groups that may fail before the run stops with the first failure's trace."""
    failure_window: int = 1000
    """Finished groups of each head that `failure_budget` speaks of."""
    failure_min_groups: int = bounded(16, "at least 1", lambda groups: groups >= 1)
    """Groups that must have finished before `failure_budget` is looked at."""
    max_failed_in_row: int = bounded(100, "at least 1", lambda groups: groups >= 1)
    """Groups that fail one after the other, after which the run stops, whatever the budget."""
    eval_concurrent: int = bounded(256, "at least 1", lambda episodes: episodes >= 1)
    """Evaluation episodes that run at the same time on each head, beside the training ones."""
    stall_timeout: float = bounded(600.0, "more than 0 seconds", lambda seconds: seconds > 0)
    """Seconds without any progress (nothing generated, accepted, rejected or failed) after which a wait ends with an
    error that names the stuck stage; a run that has a recover point is then started again."""
    trainer_timeout: float = bounded(3600.0, "more than 0 seconds", lambda seconds: seconds > 0)
    """Seconds after which a trainer that is in no call of the runtime counts as stuck: longer than any training step,
    with what is saved after it. Its process then ends with an error that says where it is, as with `stall_timeout`."""
    seed: int = 0
    """Sampling seeds derive from it, the prompt, the epoch and the sample."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.failure_window >= self.failure_min_groups,
            "rollout.failure_window",
            f"at least failure_min_groups ({self.failure_min_groups})",
            self.failure_window,
        )


@dataclass
class RolloutConfig(RuntimeConfig):
    """How prompts become groups, and how far generation may run ahead of training."""

    max_staleness: int = bounded(1, "0 (on-policy) or more", lambda versions: versions >= 0)
    """Versions that may pass between a group's start and the step that trains on it; 0 is exactly on-policy."""
    max_concurrent: int | None = bounded(
        None, "at least 1 group, or null for no further limit", lambda groups: groups is None or groups >= 1
    )
    """Groups that run at the same time over all heads. None: as many as `max_staleness` admits, which is
    (max_staleness + 1) * batch size."""
    group_size: int = bounded(8, "at least 1", lambda episodes: episodes >= 1)
    """Episodes per prompt."""
    min_group: int | None = None
    """Episodes that must succeed for the group to go on without the others. None: all of them."""
    dynamic_sampling: bool = False
    """Reject groups whose rewards are all equal; other prompts take their place."""
    max_rejected_in_row: int = bounded(1000, "at least 1", lambda groups: groups >= 1)
    """Groups rejected without one accepted in between, after which the run stops."""

    def __post_init__(self) -> None:
        super().__post_init__()
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
