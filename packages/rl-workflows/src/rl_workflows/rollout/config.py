"""Settings of the rollout runtime."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rl_contracts.config import Settings, bounded, require
from rl_contracts.errors import ConfigError


@dataclass
class RuntimeConfig(Settings):
    """Settings of episodes, used in training and in evaluation."""

    setting: ClassVar[str] = "rollout"
    failure_budget: float = bounded(0.1, "a fraction in [0, 1]", lambda fraction: 0 <= fraction <= 1)
    """Fraction of the last 1000 groups of a data-parallel leader that may fail. Above it the run stops with the trace
    of the first failure. The check starts after 16 groups."""
    stall_timeout: float = bounded(600.0, "more than 0 seconds", lambda seconds: seconds > 0)
    """Seconds without progress (nothing generated, accepted, rejected or failed) after which the run fails with an
    error that names the stuck stage. The launcher restarts a run that has a recovery checkpoint."""


@dataclass
class RolloutConfig(RuntimeConfig):
    """Settings of groups, and of how far generation may run ahead of training."""

    max_staleness: int = bounded(1, "0 (on-policy) or more", lambda versions: versions >= 0)
    """Maximum number of versions between the start of a group and the step that trains on it. 0 is exactly
    on-policy."""
    max_concurrent: int | None = bounded(
        None, "at least 1 group, or null for no further limit", lambda groups: groups is None or groups >= 1
    )
    """Groups that run at the same time on all data-parallel leaders together. None: as many as `max_staleness` admits,
    which is (max_staleness + 1) * batch size."""
    group_size: int = bounded(8, "at least 1", lambda episodes: episodes >= 1)
    """Episodes per prompt."""
    min_group: int | None = None
    """Episodes of a group that must succeed. The group is then used without its failed episodes. None: all episodes."""
    dynamic_sampling: bool = False
    """Reject groups whose rewards are all equal and replace them with groups of other prompts."""
    max_rejected_in_row: int = bounded(1000, "at least 1", lambda groups: groups >= 1)
    """Consecutive rejected groups after which the run stops."""

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
            "a group_size of at least 2, because it compares the rewards of a group",
            self.group_size,
        )

    @property
    def needed(self) -> int:
        """Number of episodes that must succeed in each group."""
        return self.group_size if self.min_group is None else self.min_group


def groups_per_replica(total: int, replicas: int, field_name: str) -> int:
    """Return the number of groups per data-parallel replica, out of `total`.

    Raises:
        ConfigError: `total` is not divisible by `replicas`; the message suggests the nearest divisible numbers.
    """
    if total >= replicas and total % replicas == 0:
        return total // replicas
    lower, upper = total // replicas * replicas, (total // replicas + 1) * replicas
    near = f"{lower} or {upper}" if lower else str(upper)
    raise ConfigError(
        f"{field_name}={total} must be divisible by the number of trainer replicas, {replicas}; use {near}, or another "
        "number of trainer replicas."
    )
