"""From finished groups to one batch of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl_contracts.errors import InferenceError

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_workflows.executor import FinishedGroup


def assemble(groups: Sequence[FinishedGroup], version: int) -> TensorDict:
    """One batch of all rows of the groups, [rows, T].

    Args:
        groups: accepted groups; none gives a batch of no rows.
        version: version of the trainer.

    Raises:
        InferenceError: a token carries a version that was replaced before its group was admitted, or one that the
            trainer has not reached: a server does not serve what was committed, or stamps it wrongly.
    """
    import torch

    from rl_contracts.trajectory import stack

    batch = stack([row for group in groups for row in group.rows])
    starts = torch.tensor([group.ticket.start for group in groups], dtype=torch.int32)
    starts = starts.repeat_interleave(torch.tensor([len(group.rows) for group in groups], dtype=torch.int64))
    versions = batch["versions"]
    stamped = versions >= 0
    wrong = (stamped & ((versions < starts[:, None]) | (versions > version))).any(-1) if len(starts) else starts.bool()
    if wrong.any():
        row = int(wrong.nonzero()[0, 0])
        found = versions[row][stamped[row]]
        raise InferenceError(
            f"group {int(batch['group_ids'][row])}: admitted at version {int(starts[row])}, trained on at {version}, "
            f"but its tokens carry versions {int(found.min())} to {int(found.max())}. A server does not serve the "
            "version that was committed, or stamps the wrong one."
        )
    return batch
