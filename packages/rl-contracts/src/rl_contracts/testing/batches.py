"""Random trajectory batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_contracts.batch.trajectory import Trajectory, stack

if TYPE_CHECKING:
    from tensordict import TensorDict


def make_batch(
    rows: int, seed: int = 0, vocab_size: int = 256, lengths: tuple[int, int] = (4, 24), version: int = 0
) -> TensorDict:
    """A valid batch of random rows in groups of up to four, with the entry `advantages` (float32 [B, T]).

    Args:
        rows: rows, [B].
        seed: of everything random.
        vocab_size: ids are 1 to vocab_size - 1.
        lengths: shortest and longest row in tokens, at least 2.
        version: of every generated token.
    """
    import numpy as np
    import torch

    rng = np.random.default_rng(seed)
    made = []
    for row in range(rows):
        length = int(rng.integers(lengths[0], lengths[1] + 1))
        generated = np.arange(length) >= rng.integers(1, length)
        made.append(
            Trajectory(
                input_ids=rng.integers(1, vocab_size, length),
                loss_mask=generated & (rng.random(length) < 0.9),
                logprobs=np.where(generated, -rng.exponential(size=length), 0.0).astype(np.float32),
                versions=np.where(generated, version, -1).astype(np.int32),
                reward=float(rng.integers(0, 2)),
                temperature=float(rng.choice([0.7, 1.0, 1.3])),
                truncated=bool(rng.random() < 0.2),
                prompt_id=row // 4,
                group_id=row // 4,
                episode_id=row % 4,
            )
        )
    batch = stack(made)
    advantages = torch.from_numpy(rng.normal(size=tuple(batch["input_ids"].shape)).astype(np.float32))
    batch["advantages"] = advantages * batch["loss_mask"]
    return batch
