"""Which finished groups are worth training on: any `should_accept(trajectories) -> bool`, and the built-in ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_contracts.trajectory import Trajectory

ShouldAccept = Callable[[Sequence["Trajectory"]], bool]
"""`(all rows of one group) -> whether it is trained on`. A rejected group is replaced and its prompt counted."""


def dynamic_sampling(trajectories: Sequence[Trajectory]) -> bool:
    """Whether the rewards of a group differ (DAPO, arXiv 2503.14476, section 3.2).

    Equal rewards give every member the advantage 0: the group would only thin the batch.
    """
    first = trajectories[0].reward
    return any(row.reward != first for row in trajectories)
