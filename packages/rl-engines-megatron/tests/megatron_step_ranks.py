"""Save the outputs of a model and the gradients of a step, for each of several losses. Runs on each rank.

Arguments: a model; layout, settings and losses as JSON; the output directory; a second model for the same process, or
empty.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.batch.redistribution import shard_batch
from rl_contracts.config import MicroBatchConfig, OptimizerConfig
from rl_contracts.conformance.train_engine import trained_tokens
from rl_contracts.data import FinetuneSpec, SaveLoadMeta
from rl_contracts.testing import make_batch
from rl_contracts.testing.processes import rank_device
from rl_engines_megatron import MegatronEngine, MegatronEngineConfig

RATE = 1024.0
"""Learning rate at which the change of a weight gives its gradient with a small rounding error."""
HEADS = ("value", "score")


def squares(outputs, packed):
    return (outputs.values - 1.0)[packed["loss_mask"]].square().sum(), {}


def with_entropy(outputs, packed):
    return -(outputs.logprobs + 0.5 * outputs.entropy)[packed["loss_mask"]].sum(), {}


def zero_loss(outputs, packed):
    """Return a zero loss, so that only the auxiliary loss of an MoE model remains."""
    return outputs.logprobs.sum() * 0.0, {}


LOSSES = {"value": squares, "score": squares, "entropy": with_entropy, "balance": zero_loss}


def started(model: str, layout: dict, settings: dict, loss: str) -> MegatronEngine:
    engine = MegatronEngine(MegatronEngineConfig(**settings), ParallelStrategy(**layout))
    optimizer = OptimizerConfig(name="sgd", lr=RATE, weight_decay=0.0, max_grad_norm=0.0)
    micro_batch, head = MicroBatchConfig(64), loss if loss in HEADS else "lm"
    entropy_grad = loss == "entropy"
    engine.initialize(
        FinetuneSpec(model, 1, 0, optimizer, micro_batch, head=head, entropy_grad=entropy_grad, device=rank_device())
    )
    return engine


def outputs_of(engine: MegatronEngine, batch: Any) -> Tensor:
    return engine.forward(batch, lambda outputs, _: outputs.logprobs if outputs.values is None else outputs.values)


def step(model: str, layout: dict, settings: dict, loss: str, state: str = "") -> tuple[dict[str, Tensor], Tensor]:
    """Return this rank's gradients by name, with `loss/aux`, and the model outputs for the sequences of this replica.

    Args:
        state: path to save the state to after the step. A second engine loads it and must return the same outputs.
    """
    engine = started(model, layout, settings, loss)
    batch = shard_batch(make_batch(8, seed=3), engine.parallel)
    before, values = {name: tensor.clone() for name, tensor in engine.full_parameters()}, outputs_of(engine, batch)
    metrics = engine.train_batch(batch, LOSSES[loss], trained_tokens)
    gradients = {name: ((before[name] - tensor) / RATE).cpu() for name, tensor in engine.full_parameters()}
    if state:
        engine.save(SaveLoadMeta(state, "state"))
        expected = outputs_of(engine, batch)
        engine.destroy()
        engine = started(model, layout, settings, loss)
        engine.load(SaveLoadMeta(state, "state"))
        assert torch.equal(outputs_of(engine, batch), expected)
    engine.destroy()
    return gradients | {"loss/aux": torch.tensor(metrics.get("loss/aux", 0.0))}, values


def main(model: str, layout: dict, settings: dict, losses: list[str], out: Path, second_model: str) -> None:
    other = started(second_model, layout, settings, "lm") if second_model else None
    for loss in losses:
        gradients, values = step(model, layout, settings, loss, str(out / f"state-{loss}"))
        save_file(gradients | {"values": values}, out / f"{loss}-{os.environ['RANK']}.safetensors")
    if other is not None:
        other.train_batch(make_batch(8, seed=3), LOSSES["entropy"], trained_tokens)
        other.destroy()


if __name__ == "__main__":
    main(sys.argv[1], *map(json.loads, sys.argv[2:5]), Path(sys.argv[5]), sys.argv[6])
