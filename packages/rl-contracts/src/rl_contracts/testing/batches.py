"""Random trajectory batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_contracts.batch.trajectory import Trajectory, stack

if TYPE_CHECKING:
    from tensordict import TensorDict


def make_batch(
    rows: int, seed: int = 0, vocab_size: int = 256, lengths: tuple[int, int] = (4, 24), version: int = 0
) -> TensorDict:
    """Build a valid batch of random sequences in groups of up to four, with the entry `advantages` (float32 [B, T]).

    Args:
        rows: number of sequences, B.
        seed: seed of all random values.
        vocab_size: token ids are 1 to vocab_size - 1.
        lengths: smallest and largest sequence length in tokens, at least 2.
        version: version of every generated token.
    """
    import numpy as np
    import torch

    rng = np.random.default_rng(seed)
    trajectories = []
    for index in range(rows):
        length = int(rng.integers(lengths[0], lengths[1] + 1))
        generated = np.arange(length) >= rng.integers(1, length)
        trajectories.append(
            Trajectory(
                input_ids=rng.integers(1, vocab_size, length),
                loss_mask=generated & (rng.random(length) < 0.9),
                logprobs=np.where(generated, -rng.exponential(size=length), 0.0).astype(np.float32),
                versions=np.where(generated, version, -1).astype(np.int32),
                reward=float(rng.integers(0, 2)),
                temperature=float(rng.choice([0.7, 1.0, 1.3])),
                truncated=bool(rng.random() < 0.2),
                prompt_id=index // 4,
                group_id=index // 4,
                episode_id=index % 4,
            )
        )
    batch = stack(trajectories)
    advantages = torch.from_numpy(rng.normal(size=tuple(batch["input_ids"].shape)).astype(np.float32))
    batch["advantages"] = advantages * batch["loss_mask"]
    return batch
