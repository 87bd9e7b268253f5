"""Conversion of accepted groups to a batch of tensors, or to state for a recovery checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from itertools import batched
from typing import TYPE_CHECKING, Any

from rl_contracts.errors import InferenceError
from rl_workflows.rollout.groups import FinishedGroup
from rl_workflows.rollout.staleness import Ticket

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torch import Tensor

    from rl_contracts.batch.trajectory import Trajectory
    from rl_contracts.images import Image

TOKEN_ARRAYS = {
    "input_ids": "int64",
    "loss_mask": "bool",
    "logprobs": "float32",
    "versions": "int32",
    "token_rewards": "float32",
}
"""Per-token arrays of a trajectory and their dtypes. Only some workflows set `token_rewards`."""

TRAJECTORY_FIELDS = {
    "reward": float,
    "reward_components": dict,
    "temperature": float,
    "truncated": bool,
    "prompt_id": int,
    "group_id": int,
    "episode_id": int,
    "info": dict,
}
"""Other fields of a trajectory and the types they are converted to: a workflow may set NumPy values, which are not
JSON."""


def assemble(groups: Sequence[FinishedGroup], version: int) -> TensorDict:
    """Stack all trajectories of the groups into one batch, [sequences, T].

    Args:
        groups: accepted groups; without groups, the batch has no sequences.
        version: version of the trainer.

    Raises:
        InferenceError: a token's version is older than the admission of its group, or newer than the trainer's. The
            server then does not serve the committed version, or stamps its tokens incorrectly.
    """
    import torch

    from rl_contracts.batch.trajectory import stack

    batch = stack([trajectory for group in groups for trajectory in group.trajectories])
    starts = torch.tensor([group.ticket.start for group in groups], dtype=torch.int32)
    starts = starts.repeat_interleave(torch.tensor([len(group.trajectories) for group in groups], dtype=torch.int64))
    versions = batch["versions"]
    generated = versions >= 0
    invalid = (
        (generated & ((versions < starts[:, None]) | (versions > version))).any(-1) if len(starts) else starts.bool()
    )
    if invalid.any():
        index = int(invalid.nonzero()[0, 0])
        token_versions = versions[index][generated[index]]
        raise InferenceError(
            f"group {int(batch['group_ids'][index])}, admitted at version {int(starts[index])} and trained on at "
            f"version {version}, has tokens of versions {int(token_versions.min())} to {int(token_versions.max())}. "
            "A server does not serve the committed version, or stamps its tokens incorrectly."
        )
    return batch


def groups_to_state(groups: Sequence[FinishedGroup]) -> dict[str, Any]:
    """Convert groups to JSON values and tensors.

    Returns:
        `{"groups": JSON, "tensors": {name: tensor}}`. Each tensor of a per-token array concatenates this array of all
        sequences. Images are the tensors of `rl_contracts.batch.image_entries`.
    """
    from rl_contracts.batch.image_entries import to_tensors

    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    images = [trajectory.images for trajectory in trajectories]
    return {
        "groups": [
            {
                "ticket": list(group.ticket),
                "prompt": group.prompt,
                "trajectories": [_field_values(trajectory) for trajectory in group.trajectories],
            }
            for group in groups
        ],
        "tensors": {name: _concatenate(trajectories, name, dtype) for name, dtype in TOKEN_ARRAYS.items()}
        | (to_tensors(images) if any(images) else {}),
    }


def groups_from_state(state: dict[str, Any]) -> list[FinishedGroup]:
    """Rebuild groups from the result of `groups_to_state`."""
    from rl_contracts.batch.image_entries import TENSORS, from_tensors

    tensors = state["tensors"]
    remaining = {name: tensors[name].numpy() for name in TOKEN_ARRAYS}
    images = iter(from_tensors(tensors)) if TENSORS[0] in tensors else itertools.repeat(())

    def take(name: str, length: int) -> Any:
        taken, remaining[name] = remaining[name][:length], remaining[name][length:]
        return taken

    return [
        FinishedGroup(
            Ticket(*map(int, entry["ticket"])),
            entry["prompt"],
            [_trajectory(values, take, next(images)) for values in entry["trajectories"]],
        )
        for entry in state["groups"]
    ]


def _concatenate(trajectories: Sequence[Trajectory], name: str, dtype: str) -> Tensor:
    import numpy as np
    import torch

    arrays = [array for array in (getattr(trajectory, name) for trajectory in trajectories) if array is not None]
    # The empty array sets the dtype if there are no sequences. Chunks let the event loop take the GIL in between.
    chunks = (np.concatenate(chunk).astype(dtype, copy=False) for chunk in batched([np.empty(0, dtype), *arrays], 1000))
    return torch.cat([torch.from_numpy(chunk) for chunk in chunks])


def _field_values(trajectory: Trajectory) -> dict[str, Any]:
    values = {name: kind(getattr(trajectory, name)) for name, kind in TRAJECTORY_FIELDS.items()}
    return {**values, "length": len(trajectory), "has_token_rewards": trajectory.token_rewards is not None}


def _trajectory(values: dict[str, Any], take: Any, images: tuple[Image, ...]) -> Trajectory:
    from rl_contracts.batch.trajectory import Trajectory

    names = [name for name in TOKEN_ARRAYS if name != "token_rewards" or values["has_token_rewards"]]
    arrays = {name: take(name, int(values["length"])) for name in names}
    return Trajectory(**arrays, images=images, **{name: values[name] for name in TRAJECTORY_FIELDS})
