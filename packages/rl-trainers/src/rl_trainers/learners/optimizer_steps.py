"""The optimizer steps of a training batch, whatever is learned from it."""

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
"""Figures of an optimizer step; all others are means over its tokens (`loss`: over what the loss is divided by)."""


def trained_tokens(batch: TensorDict) -> torch.Tensor:
    """A rank's part of a denominator: its trained tokens."""
    return batch["loss_mask"].sum().float()


def take_steps(
    engine: TrainEngine, batch: TensorDict, loss: LossFn, weigh: LossWeightFn, minibatches: int = 1
) -> dict[str, float | None]:
    """One optimizer step per minibatch; the version advances by one, unless no step was applied (collective).

    A minibatch without anything to learn from (a short last batch has fewer rows than minibatches; every row may be
    masked) is skipped and counted.

    Args:
        batch: this rank's rows; with `minibatch`, where there are several.
        weigh: a minibatch's part of the denominator.

    Returns:
        the engine's statistics over all minibatches: means weighted by the tokens (`loss`: by the denominator) of each,
        the largest of `.../max`, the sum of `tokens`, plain means of `STEP_METRICS`; and `minibatches/empty`. With
        nothing to learn from at all `applied` is 0 and there is no other statistic.
    """
    steps, weights, empty = [], [], 0
    for number in range(minibatches):
        rows = batch
        if minibatches > 1:
            rows = select(batch, (batch[MINIBATCH_KEY] == number).nonzero().flatten())
        sums = torch.stack([weigh(rows).double(), rows["loss_mask"].sum().double()])
        divisor, trained = engine.parallel.sum_over_replicas(sums).tolist()
        if not divisor:
            empty += 1
            continue
        try:
            steps.append(engine.train_batch(rows, loss, weigh))
        except StopRequestedError as stop:
            stop.weights_unchanged = not steps
            raise
        weights.append((divisor, trained))
        if not steps[-1]["applied"]:
            found = {name: steps[-1][name] for name in ("loss", "grad_norm")}
            log.warning("version %d: minibatch %d was not applied: %s is not finite", engine.version, number, found)
    result = _combined(steps, weights) | {"minibatches/empty": float(empty)}
    if any(step["applied"] for step in steps):
        engine.version += 1
    return result


def _combined(steps: list[dict[str, float]], weights: list[tuple[float, float]]) -> dict[str, float | None]:
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
            of = [1.0 if name in STEP_METRICS else weight[name != "loss"] for weight in weights]
            result[name] = sum(v * w for v, w in zip(values, of, strict=True)) / sum(of)
    return result
