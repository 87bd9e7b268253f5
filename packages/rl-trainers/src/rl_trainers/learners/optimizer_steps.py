"""The optimizer steps of a training batch, shared by all learners."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_contracts.batch.redistribution import MINIBATCH_KEY
from rl_contracts.batch.trajectory import select
from rl_contracts.errors import StopRequestedError
from rl_contracts.runtime.logging import get_logger

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_contracts.engine import LossFn, LossWeightFn, TrainEngine

log = get_logger("trainers")

STEP_METRICS = ("grad_norm", "lr", "applied")
"""Statistics of a whole optimizer step. The others are means over tokens; `loss` is divided by its denominator."""


def trained_tokens(batch: TensorDict) -> torch.Tensor:
    """Return a rank's contribution to a denominator, counted in trained tokens."""
    return batch["loss_mask"].sum().float()


def take_steps(
    engine: TrainEngine, batch: TensorDict, loss: LossFn, weigh: LossWeightFn, minibatches: int = 1
) -> dict[str, float | None]:
    """Take one optimizer step per minibatch (collective).

    The version advances by one unless no step was applied. A minibatch with a denominator of 0 is skipped and counted.
    This happens if all its sequences are masked, or if a short last batch has fewer sequences than minibatches.

    Args:
        engine: the model that learns.
        batch: this rank's sequences; with the entry `minibatch` if there are several minibatches.
        loss: loss of a packed micro-batch.
        weigh: returns a minibatch's contribution to the denominator.
        minibatches: optimizer steps per batch.

    Returns:
        The engine's statistics over all minibatches, and `minibatches/empty`. Names ending in `/max` are combined by
        maximum, `tokens` by sum, and `STEP_METRICS` by plain mean. `loss` is a mean weighted by the denominators, and
        the others are means weighted by trained tokens. If every minibatch was skipped, the engine's statistics are
        replaced by `applied`, which is 0.

    Raises:
        StopRequestedError: the step was abandoned; `weights_unchanged` is set if no optimizer step was taken.
    """
    steps, weights, empty = [], [], 0
    for index in range(minibatches):
        minibatch = batch
        if minibatches > 1:
            minibatch = select(batch, (batch[MINIBATCH_KEY] == index).nonzero().flatten())
        sums = torch.stack([weigh(minibatch).double(), minibatch["loss_mask"].sum().double()])
        divisor, trained = engine.parallel.sum_over_replicas(sums).tolist()
        if not divisor:
            empty += 1
            continue
        try:
            steps.append(engine.train_batch(minibatch, loss, weigh))
        except StopRequestedError as stop:
            stop.weights_unchanged = not steps
            raise
        weights.append((divisor, trained))
        if not steps[-1]["applied"]:
            values = {name: steps[-1][name] for name in ("loss", "grad_norm")}
            log.warning("version %d: skipped minibatch %d with non-finite values: %s", engine.version, index, values)
    result = _combine_statistics(steps, weights) | {"minibatches/empty": float(empty)}
    if any(step["applied"] for step in steps):
        engine.version += 1
    return result


def _combine_statistics(steps: list[dict[str, float]], weights: list[tuple[float, float]]) -> dict[str, float | None]:
    if not steps:
        return {"applied": 0.0}
    result: dict[str, float | None] = {}
    for name in steps[0]:
        values = [step[name] for step in steps]
        if name.endswith("/max"):
            result[name] = max(values)
        elif name == "tokens":
            result[name] = sum(values)
        else:
            step_weights = [1.0 if name in STEP_METRICS else weight[name != "loss"] for weight in weights]
            result[name] = sum(v * w for v, w in zip(values, step_weights, strict=True)) / sum(step_weights)
    return result
